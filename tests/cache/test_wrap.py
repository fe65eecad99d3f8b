"""Wrapped tensors of formats that store scales: the same bytes as in a cache of our own."""

import pytest
import torch

import pageant
from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
from tests.cache.definition import stored

SCALED = tuple(name for name, fmt in FORMATS.items() if fmt.scale_dtype is not None)
HEADS, SIZE, PAGES = 3, 4, 5
TABLE = [[3, 0, 2]]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_format = pytest.mark.parametrize("format", SCALED)
each_dims = pytest.mark.parametrize("dims", [(32, 32), (32, 64), (40, 16)])


def attention(format, layout="LBHNC", dims=(32, 32), **spec):
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=dims[0],
            v_head_dim=dims[1],
            dtype=torch.float32,
        ),
        pageant.CacheSpec(format=format, page_size=SIZE, layout=layout, **spec),
        pageant.Limits(max_requests=4, max_tokens=16),
        pageant.Features(lse=True),
        pageant.Options(kernels="reference"),
    )


def write(attn, cache):
    """Ten tokens over three pages; returns k and v."""
    rng = torch.Generator().manual_seed(8)
    k = torch.randn(10, HEADS, attn.shape.head_dim, generator=rng)
    v = torch.randn(10, HEADS, attn.shape.value_dim, generator=rng)
    plan = attn.plan(pageant.Batch.from_lengths([10], [10], TABLE, SIZE))
    attn.write(plan, cache, k, v)
    return k, v


def run(attn, cache):
    rng = torch.Generator().manual_seed(9)
    q = torch.randn(2, HEADS, attn.shape.head_dim, generator=rng)
    plan = attn.plan(pageant.Batch.from_lengths([2], [10], TABLE, SIZE))
    return attn.run(plan, q, cache, return_lse=True)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ours(attn):
    """A cache of our own with the ten tokens: its storage, and what attention answers."""
    kv = attn.new_cache(num_layers=1, num_pages=PAGES)
    write(attn, kv[0])
    return kv.storage, run(attn, kv[0])


def in_order(layout, sizes):
    return [sizes[axis] for axis in layout if axis != "L"]


@each_format
@each_layout
@each_dims
def test_one_tensor_of_bytes_is_our_own_storage(format, layout, dims):
    """[.., bytes of a row]: a budget. The bytes, and their places, are those of new_cache."""
    attn = attention(format, layout, dims)
    storage, answer = ours(attn)
    fmt = FORMATS[format]
    row = sum(fmt.data_bytes(dim) + fmt.scale_bytes(dim) for dim in dims)
    sizes = {"B": PAGES, "H": HEADS, "N": SIZE, "C": row}
    combined = torch.zeros(in_order(layout, sizes), dtype=torch.uint8)
    cache = attn.wrap_cache(combined)
    write(attn, cache)
    assert torch.equal(combined.flatten(), storage)
    assert same(run(attn, cache), answer)


@each_format
@each_layout
def test_values_as_more_heads(format, layout):
    """vLLM's form, [B, 2 Hkv, N, bytes of a key]. Pages that hold all heads are our own pages."""
    attn = attention(format, layout)
    storage, answer = ours(attn)
    fmt = FORMATS[format]
    sizes = {"B": PAGES, "H": 2 * HEADS, "N": SIZE, "C": fmt.data_bytes(32) + fmt.scale_bytes(32)}
    combined = torch.zeros(in_order(layout, sizes), dtype=torch.uint8)
    cache = attn.wrap_cache(combined)
    write(attn, cache)
    assert same(run(attn, cache), answer)
    if layout in ("LHBNC", "BHLNC"):
        # A head's page is on its own: [data | scales] of keys, then elsewhere those of values.
        mine = storage.reshape([*in_order(layout, {**sizes, "H": HEADS})[:2], 2, -1])
        heads = in_order(layout, sizes).index(2 * HEADS)
        want = torch.cat(mine.unbind(2), heads)
    else:
        want = storage
    assert torch.equal(combined.flatten(), want.flatten())


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_4over6"])
def test_vllms_page_byte_by_byte(format):
    """[K data | K scales | V data | V scales]; data [head][token][D / 2], scales likewise."""
    attn = attention(format, dims=(64, 64))
    combined = torch.zeros(PAGES, 2 * HEADS, SIZE, 32 + 4, dtype=torch.uint8)
    k, v = write(attn, attn.wrap_cache(combined))
    flat = combined.reshape(PAGES, -1)
    data, scales = HEADS * SIZE * 32, HEADS * SIZE * 4
    for token in range(10):
        page, t = TABLE[0][token // SIZE], token % SIZE
        for head in range(HEADS):
            row = head * SIZE + t
            for x, side in ((k, 0), (v, data + scales)):
                codes, factors = stored(x[token, head].numpy(), format)
                at = side + row * 32
                assert flat[page, at : at + 32].tolist() == codes.tolist()
                at = side + data + row * 4
                assert flat[page, at : at + 4].tolist() == factors.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swizzled_scales_in_wrapped_bytes(layout):
    attn = attention("nvfp4", layout, (64, 64), v_scale_order="swizzled")
    storage, answer = ours(attn)
    assert same(answer, ours(attention("nvfp4", layout, (64, 64)))[1])
    sizes = {"B": PAGES, "H": HEADS, "N": SIZE, "C": 72}
    combined = torch.zeros(in_order(layout, sizes), dtype=torch.uint8)
    cache = attn.wrap_cache(combined)
    write(attn, cache)
    assert torch.equal(combined.flatten(), storage)
    assert same(run(attn, cache), answer)


@each_format
@each_layout
def test_one_layer_of_a_larger_tensor(format, layout):
    """Layers that stand inside or outside pages: a slice has gaps between pages, none within."""
    attn = attention(format, layout)
    storage, answer = ours(attn)
    fmt = FORMATS[format]
    row = 2 * (fmt.data_bytes(32) + fmt.scale_bytes(32))
    sizes = {"L": 2, "B": PAGES, "H": HEADS, "N": SIZE, "C": row}
    whole = torch.full([sizes[axis] for axis in layout], 7, dtype=torch.uint8)
    mine, other = whole.unbind(layout.index("L"))
    before = other.clone()
    mine[:] = 0
    cache = attn.wrap_cache(mine)
    write(attn, cache)
    assert torch.equal(mine.flatten(), storage)
    assert torch.equal(other, before)
    assert same(run(attn, cache), answer)


def separate(format, dims=(32, 32), pages=PAGES):
    fmt = FORMATS[format]
    made = {}
    for name, dim in zip(("k", "v"), dims, strict=True):
        shape = (pages, SIZE, HEADS)
        made[name] = torch.zeros(*shape, dim // fmt.per_byte).to(fmt.element_dtype)
        blocks = (fmt.num_scales(dim),) if fmt.scale_block else ()
        made[f"{name}_scales"] = torch.zeros(*shape, *blocks).to(fmt.scale_dtype)
    return made


@each_format
@each_dims
def test_four_tensors(format, dims):
    attn = attention(format, dims=dims)
    tensors = separate(format, dims)
    cache = attn.wrap_cache(**tensors)
    for name, tensor in tensors.items():
        assert getattr(cache, name).data_ptr() == tensor.data_ptr()
    write(attn, cache)
    assert same(run(attn, cache), ours(attn)[1])


@each_format
def test_four_tensors_of_any_strides(format):
    attn, tensors = attention(format), separate(format)
    odd = {}
    for name, x in tensors.items():
        is_row = x.dim() == 4
        wide = torch.zeros(PAGES, HEADS, 2 * SIZE, *([x.shape[3] + 8] if is_row else []))
        view = wide.to(x.dtype)[:, :, ::2].transpose(1, 2)
        odd[name] = view[..., : x.shape[3]] if is_row else view
    cache = attn.wrap_cache(**odd)
    write(attn, cache)
    assert same(run(attn, cache), ours(attn)[1])


@each_format
def test_bytes_in_place_of_one_byte_types(format):
    attn, tensors = attention(format), separate(format)
    cache = attn.wrap_cache(
        **{name: x.view(torch.uint8) if x.itemsize == 1 else x for name, x in tensors.items()}
    )
    assert cache.k.dtype == FORMATS[format].element_dtype
    assert cache.k_scales.dtype == FORMATS[format].scale_dtype
    write(attn, cache)
    assert same(run(attn, cache), ours(attn)[1])


NVFP4 = [
    ("k", lambda x: x.float(), "torch.float32"),
    ("k", lambda x: x[..., :8], "(5, 4, 3, 8)"),
    ("k", lambda x: x.repeat(1, 1, 1, 2), "(5, 4, 3, 32)"),
    ("k_scales", lambda x: None, "None"),
    ("v_scales", lambda x: None, "None"),
    ("k_scales", lambda x: x.float(), "torch.float32"),
    ("v_scales", lambda x: x.to(torch.float8_e5m2), "torch.float8_e5m2"),
    ("v_scales", lambda x: x[..., :1], "(5, 4, 3, 1)"),
    ("k_scales", lambda x: x[..., 0], "(5, 4, 3)"),
    ("k_scales", lambda x: x.transpose(1, 2), "(5, 3, 4, 2)"),
    ("k_scales", lambda x: x[:4], "4 pages"),
    ("v_scales", lambda x: x[:4], "4 pages"),
    ("v", lambda x: x[:4], "4 pages"),
    ("v_scales", lambda x: x.transpose(1, 3).contiguous().transpose(1, 3), "content stride"),
    ("k_scales", lambda x: x.to("meta"), "meta"),
    ("v_scales", lambda x: [[1.0]], "[[1.0]]"),
]
INT8 = [
    ("k", lambda x: x.to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ("v", lambda x: x.to(torch.int16), "torch.int16"),
    ("v_scales", lambda x: None, "None"),
    ("k_scales", lambda x: x.half(), "torch.float16"),
    ("k_scales", lambda x: x.double(), "torch.float64"),
    ("k_scales", lambda x: x[..., None], "(5, 4, 3, 1)"),
    ("v_scales", lambda x: x[:, :, :1], "(5, 4, 1)"),
    ("v_scales", lambda x: x[:, :3], "(5, 3, 3)"),
    ("k_scales", lambda x: x[1:], "4 pages"),
    ("v_scales", lambda x: x.requires_grad_(), "grad"),
    ("v_scales", lambda x: x.to("meta"), "meta"),
]


@pytest.mark.parametrize(
    ("format", "name", "change", "said"),
    [("nvfp4", *case) for case in NVFP4] + [("int8", *case) for case in INT8],
)
def test_refuses(format, name, change, said):
    tensors = separate(format)
    tensors[name] = change(tensors[name])
    with pytest.raises(pageant.ArgumentError) as caught:
        attention(format).wrap_cache(**tensors)
    assert caught.value.argument == name
    assert said in str(caught.value)


def good(format, extra=0, layout="LBHNC"):
    row = {"int8": 72, "nvfp4": 36}[format]
    sizes = {"B": PAGES, "H": HEADS, "N": SIZE, "C": row + extra}
    return torch.zeros(in_order(layout, sizes), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("combined", "said"),
    [
        (lambda: good("nvfp4").float(), "torch.float32"),
        (lambda: good("nvfp4")[..., :35], "(5, 3, 4, 35)"),
        (lambda: good("nvfp4", 4)[..., :36], "no gaps"),
        (lambda: good("nvfp4").repeat(1, 1, 2, 1)[:, :, ::2], "no gaps"),
        (lambda: good("nvfp4").repeat(1, 2, 1, 1)[:, ::2], "no gaps"),
        (lambda: good("nvfp4").transpose(1, 2), "(5, 4, 3, 36)"),
        (lambda: good("nvfp4").transpose(1, 2).contiguous().transpose(1, 2), "no gaps"),
        (lambda: good("nvfp4")[:, :2], "(5, 2, 4, 36)"),
        (lambda: good("nvfp4")[0], "(3, 4, 36)"),
        (lambda: good("nvfp4").to("meta"), "meta"),
        (lambda: good("nvfp4").repeat(1, 2, 1, 1), "(5, 6, 4, 36)"),
        (lambda: None, "None"),
    ],
)
def test_one_tensor_refuses(combined, said):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention("nvfp4").wrap_cache(combined())
    assert caught.value.argument == "combined"
    assert said in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_scales_lie_at_multiples_of_four(layout):
    attn = attention("int8", layout)
    flat = torch.zeros(good("int8").numel() + 4, dtype=torch.uint8)
    shape = good("int8", layout=layout).shape
    assert attn.wrap_cache(flat[4:].view(shape)).k_scales.data_ptr() % 4 == 0
    with pytest.raises(pageant.ArgumentError, match="multiples of 4") as caught:
        attn.wrap_cache(flat[1:-3].view(shape))
    assert caught.value.argument == "combined"


@pytest.mark.parametrize("name", ["k_scales", "v_scales"])
def test_scales_beside_one_tensor_are_refused(name):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention("nvfp4").wrap_cache(good("nvfp4"), **{name: separate("nvfp4")[name]})
    assert caught.value.argument == name


@pytest.mark.parametrize("format", SCALED)
def test_a_cache_of_another_kind_does_not_run(format):
    attn = attention(format)
    plan = attn.plan(pageant.Batch.from_lengths([1], [1], [[0]], SIZE))
    q = torch.zeros(1, HEADS, 32)
    for other in {"int8", "fp8_e4m3", "nvfp4"} - {format}:
        cache = attention(other).new_cache(num_layers=1, num_pages=PAGES)[0]
        with pytest.raises(pageant.ArgumentError) as caught:
            attn.run(plan, q, cache)
        assert caught.value.argument == "cache"
