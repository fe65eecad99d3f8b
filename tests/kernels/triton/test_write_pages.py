"""Writing pages: the kernel leaves exactly the bytes the CPU's writer leaves, and no others."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
from pageant.cache.pages import LayerCache
from pageant.cache.quantize import encode
from pageant.kernels.cpu import write_pages as cpu
from pageant.kernels.triton import write_pages as module
from pageant.kernels.triton.write_pages import write_pages
from pageant.plan.pages import write_index
from tests.cache.test_write import PAGES, dirty_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, PAGE_SIZE = 3, 12
POOL = PAGES * PAGE_SIZE
SLOTS = (POOL - 1, -1, 0, POOL // 2, -(2**40), POOL, 2**40, 7)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def agree(make, k, v, slots, scales=(1.0, 1.0)):
    """Both writers over equal memory; the whole storage is compared, and returned.

    Args:
        make: gives a storage and a cache over it, the same bytes every time.
        k, v, slots, scales: of the writers.
    """
    (plain, plain_cache), (fast, fast_cache) = make(), make()
    slots = torch.tensor(slots, dtype=torch.int64)
    memory = fast.to(DEVICE)
    write_pages(k.to(DEVICE), v.to(DEVICE), over(memory, fast_cache), slots.to(DEVICE), scales)
    fast.copy_(memory)
    page_size = plain_cache.page_size
    inside = torch.where(slots < plain_cache.num_pages * page_size, slots, -1)
    cpu.write_pages(k, v, plain_cache, write_index(inside, page_size), scales)
    for cache in (plain_cache, fast_cache):
        unify_nans(cache)
    assert torch.equal(plain, fast)
    return fast


def over(memory, cache):
    """The cache's views, over other memory."""

    def view(of):
        if of is None:
            return None
        empty = torch.empty(0, dtype=of.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), of.storage_offset(), of.shape, of.stride())

    names = ("k", "v", "k_scales", "v_scales")
    return replace(cache, **{name: view(getattr(cache, name)) for name in names})


def unify_nans(cache):
    """Of NaN's many patterns, which one a float's cast leaves is nobody's promise."""
    for view in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if view is not None and view.dtype in FLOATS:
            view.masked_fill_(view.isnan(), torch.nan)


def dirty(order, name, dims, v_scale_order="linear", page_size=PAGE_SIZE):
    return lambda: dirty_cache(order, name, page_size, HEADS, dims, v_scale_order)


def rows(count, dims, dtype):
    """Magnitudes of many binades, blocks of zeros, and values that are not finite."""
    rng = torch.Generator().manual_seed(count)
    made = []
    for dim in dims:
        x = torch.randn(count, HEADS, dim, generator=rng)
        x *= torch.exp2(torch.randint(-20, 12, (count, HEADS, 1), generator=rng).float())
        x[0, 0, :16], x[0, 1, 3], x[0, 2, 5] = 0.0, torch.nan, -torch.inf
        x[-1, 0] = -0.0
        made.append(x.to(dtype))
    return made


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_cpu_writer(order, name):
    dims = (16, 72) if name == "nvfp4" else (40, 24)
    k, v = rows(len(SLOTS) + 2, dims, torch.float32)
    before, _ = dirty(order, name, dims)()
    after = agree(dirty(order, name, dims), k, v, SLOTS)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "scales",
    [(0.3, 7.0), (torch.tensor(0.1), torch.tensor([7.0], dtype=torch.float64)), (1.0, 1e-40)],
)
def test_every_dtype_and_scale(name, dtype, scales):
    k, v = rows(len(SLOTS), (24, 128), dtype)
    agree(dirty("LBNHC", name, (24, 128)), k, v, SLOTS, scales)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4_4over6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scales_that_the_kernel_loads(monkeypatch, name, dtype):
    """As those on a GPU are."""
    monkeypatch.setattr(module, "kernel_scale", lambda scale: scale.to(DEVICE))
    scales = torch.tensor([[3.0], [7.0]], dtype=dtype).unbind()
    k, v = rows(5, (24, 16), torch.float32)
    agree(dirty("LBHNC", name, (24, 16)), k, v, (3, 9, 22, 21, 20), scales)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("order", LAYOUTS[:3])
@pytest.mark.parametrize("dims", [(16, 64), (40, 128)])
def test_swizzled_value_scales(name, order, dims):
    k, v = rows(11, dims, torch.float32)
    make = dirty(order, name, dims, "swizzled", page_size=8)
    agree(make, k, v, (0, 5, 6, 17, -1, 7, 23, 22, 21, 20, 1))


def test_four_over_six_decides_alike():
    """Blocks on the grid of either top, beside it, and far from both: many errors nearly tie."""
    rng = torch.Generator().manual_seed(5)
    points = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0])
    k, v = (points[torch.randint(0, 11, (60, HEADS, 128), generator=rng)] for _ in range(2))
    k = k * torch.exp2(torch.randint(-3, 3, (60, HEADS, 1), generator=rng).float())
    v = v + torch.randn(v.shape, generator=rng) * 0.25
    make = dirty("LBHNC", "nvfp4_4over6", (128, 128), page_size=20)
    agree(make, k, v, range(60), (1.0, 0.7))


def edges(low, high, decide):
    """Blocks [n, 16] on both sides of a decision: by bisection, until hardly a bit is between."""
    for _ in range(40):
        middle = (low + high) / 2
        is_high = decide(middle)[:, None]
        low, high = torch.where(is_high, low, middle), torch.where(is_high, middle, high)
    return torch.cat([low, high])


def write_blocks(name, blocks, factor):
    """Every block of [n, 16], in keys and in values."""
    whole = -(-len(blocks) // (8 * HEADS)) * 8 * HEADS
    x = torch.nn.functional.pad(blocks, (0, 0, 0, whole - len(blocks))).view(-1, HEADS, 128)
    page_size = -(-len(x) // PAGES)
    make = dirty("LBNHC", name, (128, 128), page_size=page_size)
    agree(make, x, -x, range(len(x)), (factor, factor))


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_errors_that_nearly_tie(factor):
    """The order in which squares are added then decides between 4 and 6."""
    blocks = (torch.rand(999, 16, generator=torch.Generator().manual_seed(2)) - 0.5) * 12
    blocks[:, 0] = 6.0  # the largest stays, so errors move little by little

    def is_four(x):
        scales = (encode(x, FORMATS[name], factor)[1] for name in ("nvfp4", "nvfp4_4over6"))
        return torch.ne(*(stored.view(torch.uint8)[:, 0] for stored in scales))

    four = is_four(blocks)
    low, high = blocks[~four], blocks[four]
    count = min(len(low), len(high))
    assert count > 200
    write_blocks("nvfp4_4over6", edges(low[:count], high[:count], is_four), factor)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
def test_scales_between_two_codes(name):
    """The order in which a block's largest is divided then decides."""
    factor = 0.7
    sizes = torch.arange(1, 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    blocks = (sizes[:, None] * 6 * factor).expand(-1, 16)
    codes = torch.arange(2, 0x7E)

    def is_next(x):
        return encode(x, FORMATS["nvfp4"], factor)[1].view(torch.uint8)[:, 0] >= codes

    write_blocks(name, edges(blocks[:-1], blocks[1:], is_next), factor)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "int8", "nvfp4"])
@pytest.mark.parametrize("kind", ["columns apart", "heads innermost", "one row for all", "fused"])
def test_rows_of_any_strides(name, kind):
    k, v = rows(6, (24, 48), torch.float32)
    if kind == "columns apart":
        k, v = (torch.stack([x, -x], -1)[..., 0] for x in (k, v))
    elif kind == "heads innermost":
        k, v = (x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (k, v))
    elif kind == "one row for all":
        k, v = (x[2:3, :1].expand(6, HEADS, -1) for x in (k, v))
    else:
        k, v = torch.cat([k, v], -1).split((24, 48), -1)
    agree(dirty("LBNHC", name, (24, 48)), k, v, (4, 3, 2, 30, 31, -1))


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3_token_head", "nvfp4"])
def test_a_cache_of_any_strides(name):
    fmt, dims = FORMATS[name], (24, 48)

    def make():
        storage = torch.full((120_000,), 0x5A, dtype=torch.uint8)
        views, first = {}, 0
        for part, dim in zip(("k", "v"), dims, strict=True):
            size = fmt.data_bytes(dim) // fmt.element_dtype.itemsize
            shapes = {part: (fmt.element_dtype, size)}
            if fmt.scale_dtype is not None:
                shapes[f"{part}_scales"] = (fmt.scale_dtype, fmt.num_scales(dim))
            for key, (dtype, count) in shapes.items():
                whole = storage[first : first + 3 * 5 * 7 * 2 * count * dtype.itemsize].view(dtype)
                first += -(-whole.nbytes // 16) * 16
                view = whole.view(7, 3, 2 * 5, count).permute(1, 0, 2, 3)[
                    :, 1:5, 1 : 1 + HEADS * 2 : 2
                ]
                views[key] = (
                    view[..., 0] if key.endswith("scales") and not fmt.scale_block else view
                )
        return storage, LayerCache(format=fmt, **views)

    k, v = rows(4, dims, torch.float16)
    agree(make, k, v, (11, 0, -3, 6))


def test_no_tokens():
    storage, cache = dirty("LBNHC", "fp8_e4m3", (16, 16))()
    before = storage.clone()
    none = torch.empty(0, HEADS, 16)
    write_pages(none, none, cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(before, storage)


@settings(max_examples=30)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(tuple(FORMATS)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    st.tuples(st.integers(2, 10), st.integers(2, 10)),
    st.sampled_from(((1.0, 1.0), (0.37, 1.0), (1e30, 2.0**-9))),
    st.data(),
)
def test_anything_goes(order, name, page_size, dtype, eighths, scales, data):
    dims = tuple(8 * n for n in eighths)
    slot = st.integers(-3, PAGES * page_size + 2)
    unique = {"unique_by": lambda s: s if s >= 0 else object()}
    slots = data.draw(st.lists(slot, min_size=1, max_size=9, **unique))
    k, v = rows(len(slots) + data.draw(st.integers(0, 2)), dims, dtype)
    agree(dirty(order, name, dims, page_size=page_size), k, v, slots, scales)
