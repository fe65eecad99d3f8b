"""Pages: memory of our own, and anybody else's wrapped without a copy, or refused with a reason."""

import pytest
import torch

import pageant
from pageant.cache.layout import LAYOUTS
from pageant.cache.pages import LayerCache, PagedCache

SIZES = {"auto": 2, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Bytes of a key of 32 elements and of its scales, then of a value of 16.
PARTS = {name: (32 * size, 0, 16 * size, 0) for name, size in SIZES.items()}
SCALED = {
    "int8": (32, 4, 16, 4),
    "fp8_e4m3_token_head": (32, 4, 16, 4),
    "nvfp4": (16, 2, 8, 1),
    "nvfp4_4over6": (16, 2, 8, 1),
}
PARTS |= SCALED
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_plain_format = pytest.mark.parametrize("format", SIZES)
each_scaled_format = pytest.mark.parametrize("format", SCALED)
each_format = pytest.mark.parametrize("format", PARTS)


def attention(format="auto", page_size=16, layout="LBHNC", kv_heads=2, dims=(32, 16), **spec):
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1]
        ),
        pageant.CacheSpec(format=format, page_size=page_size, layout=layout, **spec),
        pageant.Limits(max_requests=4, max_tokens=16),
    )


def views_of(cache):
    views = (cache.k, cache.k_scales, cache.v, cache.v_scales)
    return [view for view in views if view is not None]


@each_layout
@each_format
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_new_cache(layout, format, page_size):
    attn = attention(format, page_size, layout)
    kv = attn.new_cache(num_layers=3, num_pages=7)
    parts = PARTS[format]
    want = 3 * 7 * page_size * 2 * sum(parts)
    assert isinstance(kv, PagedCache)
    assert kv.num_bytes == kv.storage.nbytes == want
    assert len(kv) == len(list(kv)) == 3
    assert not kv.storage.any()
    for layer in kv:
        assert isinstance(layer, LayerCache)
        size = layer.k.element_size()
        assert layer.k.shape == (7, page_size, 2, parts[0] // size)
        assert layer.v.shape == (7, page_size, 2, parts[2] // size)
        assert layer.k.dtype == layer.v.dtype == attn.format.element_dtype
        assert layer.k.stride(-1) == layer.v.stride(-1) == 1
        assert (layer.num_pages, layer.page_size) == (7, page_size)
        assert layer.format is attn.format
        assert layer.v_scale_order == "linear"
        for view in views_of(layer):
            assert view.untyped_storage().data_ptr() == kv.storage.data_ptr()
        if format not in SCALED:
            assert layer.k_scales is layer.v_scales is None
        elif format.startswith("nvfp4"):
            assert layer.k_scales.shape == (7, page_size, 2, 2)
            assert layer.v_scales.shape == (7, page_size, 2, 1)
            assert layer.k_scales.dtype == layer.v_scales.dtype == torch.float8_e4m3fn
        else:
            assert layer.k_scales.shape == layer.v_scales.shape == (7, page_size, 2)
            assert layer.k_scales.dtype == layer.v_scales.dtype == torch.float32


@each_layout
@each_format
def test_layers_share_no_byte_and_leave_none(layout, format):
    """Every bit set through the views of one layer after another: the counts add up at the end."""
    kv = attention(format, 5, layout).new_cache(num_layers=3, num_pages=4)
    seen = 0
    for layer in kv:
        for view in views_of(layer):
            view.view(SAME_SIZE[view.element_size()])[:] = -1
            seen += view.numel() * view.element_size()
            assert int((kv.storage == 255).sum()) == seen
    assert seen == kv.num_bytes


@pytest.mark.parametrize("name", ["num_layers", "num_pages"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "3"])
def test_new_cache_sizes(name, value):
    sizes = {"num_layers": 1, "num_pages": 1, name: value}
    with pytest.raises(pageant.ArgumentError, match=name) as caught:
        attention().new_cache(**sizes)
    assert caught.value.argument == name
    assert repr(value) in str(caught.value)


@each_format
@each_layout
def test_pages_for(format, layout):
    attn = attention(format, 16, layout)
    one = 16 * 2 * sum(PARTS[format]) * 3
    assert attn.pages_for(one * 10, num_layers=3) == 10
    assert attn.pages_for(one * 11 - 1, num_layers=3) == 10
    assert attn.pages_for(one - 1, num_layers=3) == 0
    pages = attn.pages_for(1_000_000, num_layers=3)
    assert attn.new_cache(num_layers=3, num_pages=pages).num_bytes <= 1_000_000
    assert attn.new_cache(num_layers=3, num_pages=pages + 1).num_bytes > 1_000_000


@pytest.mark.parametrize(
    ("num_bytes", "num_layers", "name"),
    [(1000, 0, "num_layers"), (1000, -1, "num_layers"), (-1, 1, "num_bytes")],
)
def test_pages_for_refuses(num_bytes, num_layers, name):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention().pages_for(num_bytes, num_layers)
    assert caught.value.argument == name


@each_plain_format
def test_wrap_separate(format):
    attn = attention(format)
    dtype = attn.format.element_dtype
    k, v = torch.zeros(7, 16, 2, 32).to(dtype), torch.zeros(7, 16, 2, 16).to(dtype)
    cache = attn.wrap_cache(k, v)
    assert cache.k.data_ptr() == k.data_ptr()
    assert cache.v.data_ptr() == v.data_ptr()
    assert cache.k.dtype == cache.v.dtype == dtype
    assert (cache.num_pages, cache.page_size) == (7, 16)


@each_plain_format
@each_layout
def test_wrap_combined(format, layout):
    """One tensor in the layout's order is what that layer's part of new_cache would be."""
    attn = attention(format, 16, layout)
    sizes = {"B": 7, "H": 2, "N": 16, "C": 48}
    axes = layout.replace("L", "")
    combined = torch.zeros([sizes[axis] for axis in axes]).to(attn.format.element_dtype)
    cache = attn.wrap_cache(combined)
    assert cache.k.shape == (7, 16, 2, 32)
    assert cache.v.shape == (7, 16, 2, 16)
    assert cache.k.data_ptr() == combined.data_ptr()
    assert cache.v.data_ptr() == combined.data_ptr() + 32 * SIZES[format]
    strides = dict(zip(axes, combined.stride(), strict=True))
    assert cache.k.stride() == cache.v.stride() == tuple(strides[axis] for axis in "BNHC")


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("integer", [torch.uint8, torch.int8])
def test_wrap_bytes(format, integer):
    attn = attention(format)
    k, v = torch.zeros(7, 16, 2, 32, dtype=integer), torch.zeros(7, 16, 2, 16, dtype=integer)
    for cache in (attn.wrap_cache(k, v), attn.wrap_cache(torch.zeros(7, 2, 16, 48, dtype=integer))):
        assert cache.k.dtype == cache.v.dtype == attn.format.element_dtype
    assert attn.wrap_cache(k, v).k.data_ptr() == k.data_ptr()


def good():
    return {"k": torch.zeros(7, 16, 2, 32).bfloat16(), "v": torch.zeros(7, 16, 2, 16).bfloat16()}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("k", lambda x: x.float(), "torch.float32"),
        ("v", lambda x: x.half(), "torch.float16"),
        ("k", lambda x: x.view(torch.uint8), "torch.uint8"),
        ("k", lambda x: x.view(torch.int16), "torch.int16"),
        ("k", lambda x: x[:, :15], "(7, 15, 2, 32)"),
        ("v", lambda x: x[:, :, :1], "(7, 16, 1, 16)"),
        ("v", lambda x: x[..., :8], "(7, 16, 2, 8)"),
        ("k", lambda x: x.transpose(1, 2), "(7, 2, 16, 32)"),
        ("k", lambda x: x[0], "(16, 2, 32)"),
        ("v", lambda x: x[None], "(1, 7, 16, 2, 16)"),
        ("v", lambda x: x[:6], "6 pages"),
        ("k", lambda x: x.repeat(1, 1, 1, 2)[..., ::2], "content stride 2"),
        ("v", lambda x: x.transpose(1, 3).contiguous().transpose(1, 3), "content stride"),
        ("v", lambda x: x.to("meta"), "meta"),
        ("k", lambda x: x.requires_grad_(), "grad"),
        ("k", lambda x: None, "None"),
    ],
)
def test_wrap_refuses(name, change, said):
    tensors = good()
    tensors[name] = change(tensors[name])
    with pytest.raises(pageant.ArgumentError) as caught:
        attention().wrap_cache(**tensors)
    assert caught.value.argument == name
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "said"),
    [
        ((7, 16, 2, 48), torch.bfloat16, "(7, 16, 2, 48)"),
        ((7, 2, 16, 64), torch.bfloat16, "(7, 2, 16, 64)"),
        ((2, 16, 48), torch.bfloat16, "(2, 16, 48)"),
        ((7, 2, 16, 48), torch.float32, "torch.float32"),
        ((7, 2, 16, 96), torch.uint8, "torch.uint8"),
    ],
)
def test_wrap_combined_refuses(shape, dtype, said):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention().wrap_cache(torch.zeros(shape, dtype=dtype))
    assert caught.value.argument == "combined"
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_wrap_refuses_scales_nobody_reads(name):
    with pytest.raises(pageant.ArgumentError, match="stores no scales") as caught:
        attention().wrap_cache(**good(), **{name: torch.ones(7, 16, 2)})
    assert caught.value.argument == name


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"format": "nvfp4", "v_scale_order": "zigzag"}, "v_scale_order"),
        ({"format": "nvfp4", "v_scale_order": None}, "v_scale_order"),
        ({"format": "nvfp4", "v_scale_order": "swizzled", "page_size": 6}, "v_scale_order"),
        ({"format": "nvfp4", "v_scale_order": "swizzled", "dims": (64, 96)}, "v_scale_order"),
        ({"format": "nvfp4", "v_scale_order": "swizzled"}, "v_scale_order"),  # one scale a value
        ({"format": "int8", "v_scale_order": "swizzled", "dims": (64, 64)}, "v_scale_order"),
        ({"format": "bf16", "v_scale_order": "swizzled", "dims": (64, 64)}, "v_scale_order"),
    ],
)
def test_orders_of_value_scales_that_do_not_fit(fields, argument):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention(**fields)
    assert caught.value.argument == argument


def test_swizzled_value_scales():
    attn = attention("nvfp4", dims=(16, 64), v_scale_order="swizzled")
    kv = attn.new_cache(num_layers=1, num_pages=2)
    assert kv[0].v_scale_order == "swizzled"
    cache = kv[0]
    wrapped = attn.wrap_cache(cache.k, cache.v, cache.k_scales, cache.v_scales)
    assert wrapped.v_scale_order == "swizzled"
