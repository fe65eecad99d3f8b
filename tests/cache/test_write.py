"""Writing pages: the fast writer leaves exactly the bytes the plain one leaves, and no others."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant import ops
from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS, CacheLayout
from pageant.cache.pages import layer_of
from pageant.cache.quantize import decode
from pageant.kernels import reference
from pageant.kernels.cpu.write_pages import write_pages
from pageant.plan.pages import write_index
from tests.cache import definition

PAGES = 3
PLAIN_DIMS = (16, 24)
HEADS = (1, 3, 4, 8)
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def dirty_cache(order, name, page_size, heads, dims=PLAIN_DIMS, v_scale_order="linear"):
    """Three layers full of random bytes, and views of the middle one."""
    fmt = FORMATS[name]
    layout = CacheLayout(
        order,
        3,
        PAGES,
        heads,
        page_size,
        *(fmt.data_bytes(dim) for dim in dims),
        *(fmt.scale_bytes(dim) for dim in dims),
    )
    storage = noise(layout.num_bytes).clone()
    return storage, layer_of(layout, storage, 1, fmt, v_scale_order)


@lru_cache(maxsize=4)
def noise(num_bytes):
    rng = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (num_bytes,), generator=rng).to(torch.uint8)


def bytes_of_slots(order, name, page_size, heads, slots, dims=PLAIN_DIMS):
    """bool [num_bytes]: which bytes belong to these slots of the middle layer, from its layout."""
    storage, cache = dirty_cache(order, name, page_size, heads, dims)
    storage.zero_()
    pages, rows = torch.tensor([divmod(slot, page_size) for slot in slots if slot >= 0]).T
    for side in cache.sides:
        for view in side[:2]:
            if view is not None:
                view.view(SAME_SIZE[view.element_size()])[pages, rows] = -1
    return storage == 255


def tokens(count, heads, dtype, dims=PLAIN_DIMS, size=100.0):
    rng = torch.Generator().manual_seed(count)
    k = torch.randn(count, heads, dims[0], generator=rng) * size
    v = torch.randn(count, heads, dims[1], generator=rng) * size
    k.flatten()[:4] = torch.tensor([float("nan"), float("inf"), -1e9, 0.0])[: k.numel()]
    return k.to(dtype), v.to(dtype)


def agree(order, name, page_size, heads, dtype, slots, scales=(1.0, 1.0), extra=0):
    """Both writers over equal memory; the whole storage is compared."""
    k, v = tokens(len(slots) + extra, heads, dtype)
    slots = torch.tensor(slots, dtype=torch.int64)
    plain, plain_cache = dirty_cache(order, name, page_size, heads)
    fast, fast_cache = dirty_cache(order, name, page_size, heads)
    before = fast.clone()
    reference.write_pages(k, v, plain_cache, slots, scales)
    write_pages(k, v, fast_cache, write_index(slots, page_size), scales)
    assert torch.equal(plain, fast)
    return before, fast


def on_the_grid(name, count, heads, dim, scale, rng):
    """float32 [count, heads, dim] a format stores exactly under a layer's scale, a power of two."""
    fmt, shape = FORMATS[name], (count, heads, dim)
    if not fmt.quantized:
        return torch.randint(-99, 99, shape, generator=rng).float() / 8
    if not fmt.scale_dtype:
        codes = torch.randint(0, 0x7C, shape, generator=rng).to(torch.uint8)
        codes |= torch.randint(0, 2, shape, generator=rng).to(torch.uint8) << 7
        return decode(codes, None, fmt) * scale
    if not fmt.scale_block:
        own = torch.exp2(torch.randint(-9, 9, (count, heads, 1), generator=rng).float())
        if name == "int8":
            values = torch.randint(-127, 128, shape, generator=rng).float()
        else:
            codes = torch.randint(0, 0x7F, shape, generator=rng).to(torch.uint8)
            values = decode(codes, None, FORMATS["fp8_e4m3"])
        values[..., 3] = -fmt.max_value
        return values * own
    codes = torch.randint(0, 16, shape, generator=rng)
    codes[..., ::16] = 7 + 8 * (codes[..., ::16] % 2)  # each block has a 6
    values = torch.tensor(definition.E2M1, dtype=torch.float32)[codes]
    own = torch.randint(8, 0x7F, (count, heads, fmt.num_scales(dim)), generator=rng)
    own = torch.tensor(definition.TABLES["fp8_e4m3"], dtype=torch.float32)[own]
    return values * own.repeat_interleave(16, -1)[..., :dim] * scale


def each_grid(test):
    """Every layout, format and page size; head counts are looped over inside, to be quick."""
    for name, values in {"order": LAYOUTS, "name": FORMATS, "page_size": [1, 16, 48]}.items():
        test = pytest.mark.parametrize(name, values)(test)
    return test


@each_grid
def test_equals_the_plain_writer(order, name, page_size):
    pool = PAGES * page_size
    slots = [pool - 1, -1, 0, pool // 2, -(2**40)]
    for heads in HEADS:
        before, after = agree(order, name, page_size, heads, torch.float32, slots, extra=2)
        changed = before != after
        assert changed.any()
        assert not (changed & ~bytes_of_slots(order, name, page_size, heads, slots)).any()


@each_grid
def test_values_on_the_grid_come_back_exactly(order, name, page_size):
    pool, scales = PAGES * page_size, (0.5, 4.0)
    slots = torch.tensor([pool - 1, 0, pool // 2])
    pages, rows = slots // page_size, slots % page_size
    for heads in HEADS:
        rng = torch.Generator().manual_seed(heads)
        k, v = (
            on_the_grid(name, 3, heads, dim, scale, rng)
            for dim, scale in zip(PLAIN_DIMS, scales, strict=True)
        )
        _, cache = dirty_cache(order, name, page_size, heads)
        write_pages(k, v, cache, write_index(slots, page_size), scales)
        for x, side, scale in zip((k, v), cache.sides, scales, strict=True):
            stored = None if side.scales is None else side.scales[pages, rows]
            got = ops.dequantize(side.elements[pages, rows], stored, name, scale)
            assert torch.equal(got, x)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].quantized])
@pytest.mark.parametrize("dims", [(16, 72), (40, 24)])
def test_bytes_are_the_definitions_where_the_layout_says(order, name, dims):
    """Byte by byte, through `offset`: neither views nor torch's casts have a part in it."""
    heads, size, slot, scales = 3, 4, 9, (0.3, 7.0)
    storage, cache = dirty_cache(order, name, size, heads, dims)
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(1, heads, dim, generator=rng) * 50 for dim in dims)
    write_pages(k, v, cache, write_index(torch.tensor([slot]), size), scales)
    fmt = FORMATS[name]
    parts = ([fmt.data_bytes(dim) for dim in dims], [fmt.scale_bytes(dim) for dim in dims])
    layout = CacheLayout(order, 3, PAGES, heads, size, *parts[0], *parts[1])
    page, token = divmod(slot, size)
    for head in range(heads):
        want = [
            byte
            for x, scale in zip((k, v), scales, strict=True)
            for part in definition.stored(x[0, head].numpy(), name, scale)
            for byte in part.tolist()
        ]
        assert len(want) == layout.row_bytes
        for byte, value in enumerate(want):
            at = layout.offset(layer=1, page=page, head=head, token=token, byte=byte)
            assert storage[at] == value


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("dims", [(16, 64), (40, 128)])
def test_swizzled_value_scales_are_the_linear_ones_elsewhere(order, name, dims):
    heads, size = 3, 8
    k, v = tokens(11, heads, torch.float32, dims)
    slots = torch.tensor([0, 5, 6, 17, -1, 7, 23, 22, 21, 20, 1])
    caches = {}
    for scale_order in ("linear", "swizzled"):
        for write in ("plain", "fast"):
            storage, cache = dirty_cache(order, name, size, heads, dims, scale_order)
            if write == "plain":
                reference.write_pages(k, v, cache, slots)
            else:
                write_pages(k, v, cache, write_index(slots, size))
            caches[scale_order, write] = storage, cache
        assert torch.equal(caches[scale_order, "plain"][0], caches[scale_order, "fast"][0])
    linear, swizzled = (caches[scale_order, "fast"][1] for scale_order in ("linear", "swizzled"))
    assert not linear.sides[1].is_swizzled
    assert swizzled.sides[1].is_swizzled
    assert not swizzled.sides[0].is_swizzled
    for name_of in ("k", "k_scales", "v"):
        one, other = getattr(linear, name_of), getattr(swizzled, name_of)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    blocks = dims[1] // 16
    for slot in slots[slots >= 0].tolist():
        page, t = divmod(slot, size)
        for s in range(blocks):
            row, column = 4 * (t // 4) + s // (blocks // 4), 4 * (s % (blocks // 4)) + t % 4
            want = linear.v_scales[page, t, :, s].view(torch.uint8)
            assert torch.equal(swizzled.v_scales[page, row, :, column].view(torch.uint8), want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(0.5, 3.0), (torch.tensor(0.1), torch.tensor([7.0]))])
def test_every_dtype_and_scale(name, dtype, scales):
    agree("LBHNC", name, 16, 2, dtype, [3, 17, 40, -1], scales)


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(tuple(FORMATS)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from((1, 2, 5)),
    st.data(),
)
def test_random_slots(order, name, page_size, heads, data):
    slot = st.integers(-3, PAGES * page_size - 1)
    slots = data.draw(st.lists(slot, max_size=12, unique_by=lambda s: s if s >= 0 else object()))
    agree(order, name, page_size, heads, torch.bfloat16, slots, extra=data.draw(st.integers(0, 2)))


@pytest.mark.parametrize("name", FORMATS)
def test_values_lie_at_their_slots(name):
    _, cache = dirty_cache("LBNHC", name, 4, 2)
    k = torch.arange(1.0, 4.0)[:, None, None].expand(3, 2, 16)
    v = torch.arange(4.0, 7.0)[:, None, None].expand(3, 2, 24)
    write_pages(k, v, cache, write_index(torch.tensor([9, -1, 2]), 4))
    for (page, row), token in {(2, 1): 0, (0, 2): 2}.items():
        for x, side in zip((k, v), cache.sides, strict=True):
            stored = None if side.scales is None else side.scales[page, row]
            got = ops.dequantize(side.elements[page, row], stored, name)
            # A third of a step at most: only the scales of 5 / 6 and 5 / 127 are inexact.
            torch.testing.assert_close(got, x[token], rtol=1 / 32, atol=0)


@pytest.mark.parametrize("slots", [[], [-1, -1, -5]])
def test_nothing_to_write(slots):
    before, after = agree("LBHNC", "bf16", 16, 2, torch.float32, slots, extra=1)
    assert torch.equal(before, after)


def test_rows_beyond_the_slot_mapping_are_ignored():
    before, _ = dirty_cache("LBHNC", "bf16", 16, 2)
    _, after = agree("LBHNC", "bf16", 16, 2, torch.float32, [], extra=4)
    assert torch.equal(before, after)


@pytest.mark.parametrize("where", ["fused", "permuted", "spread"])
def test_any_strides_of_keys_and_values(where):
    k, v = tokens(4, 2, torch.float32, dims=(16, 16))
    odd = {
        "fused": lambda x: torch.cat([x, x * 2], dim=-1)[..., :16],
        "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "spread": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    }[where]
    slots = write_index(torch.tensor([5, -1, 17, 2]), 16)
    plain, cache = dirty_cache("LBHNC", "fp8_e4m3", 16, 2, (16, 16))
    write_pages(k, v, cache, slots)
    other, cache = dirty_cache("LBHNC", "fp8_e4m3", 16, 2, (16, 16))
    write_pages(odd(k), odd(v), cache, slots)
    assert torch.equal(plain, other)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_and_ops_write_the_same(name):
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16),
        pageant.CacheSpec(format=name, page_size=4),
    )
    k, v = tokens(5, 2, torch.bfloat16, dims=(16, 16))
    plan = attn.plan(pageant.Batch.from_lengths([5], [7], [[2, 0]], page_size=4))
    mine, other = (attn.new_cache(num_layers=1, num_pages=3) for _ in range(2))
    layer = pageant.Layer(k_scale=0.25, v_scale=torch.tensor(2.0))
    attn.write(plan, mine[0], k, v, layer)
    slots = torch.tensor([10, 11, 0, 1, 2])
    cache = other[0]
    ops.write_pages(
        k,
        v,
        cache.k,
        cache.v,
        slots,
        format=name,
        scales=(0.25, torch.tensor(2.0)),
        k_scales=cache.k_scales,
        v_scales=cache.v_scales,
    )
    assert mine.storage.any()
    assert torch.equal(mine.storage, other.storage)
    assert not mine[0].k[1].view(torch.uint8).any()


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].scale_dtype])
def test_ops_want_the_scales_of_formats_that_store_them(name):
    _, cache = dirty_cache("LBHNC", name, 4, 2)
    k, v = tokens(1, 2, torch.float32)
    slots = torch.tensor([3])
    with pytest.raises(pageant.ArgumentError) as caught:
        ops.write_pages(k, v, cache.k, cache.v, slots, format=name, k_scales=cache.k_scales)
    assert caught.value.argument == "v_scales"
