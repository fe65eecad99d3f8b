"""Pages read back as plain numbers: the kernel leaves the bytes the definition leaves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS, resolve
from pageant.cache.layout import LAYOUTS
from pageant.cache.pages import LayerCache
from pageant.kernels.cpu import dequantize_pages as cpu
from pageant.kernels.triton import dequantize_pages as fast
from tests.cache.test_write import PAGES, dirty_cache
from tests.kernels.triton.test_write_pages import over, unify_nans

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, PAGE_SIZE = 3, 4
TABLE, LENS = [[2, 0, -9], [1, 99, 99], [0, 0, 1], [7, 7, 7]], [7, 4, 9, 0]
SCALES = (0.3, torch.tensor([7.0]))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def plain(cache, pages, dtype, device):
    """Pages of ones: what is not written shows."""
    views = []
    for view in (cache.k, cache.v):
        _, *rows, size = view.shape
        shape = (pages, *rows, size * cache.format.per_byte)
        views.append(torch.ones(shape, dtype=dtype, device=device))
    return LayerCache(*views, resolve("auto", dtype))


def agree(storage, cache, table, lens, dtype, scales=(1.0, 1.0)):
    """Both, compared bit for bit; the plain one's result."""
    if cache.format.name == "bf16" and DEVICE.type == "cpu":  # wrong in the interpreter
        for view in (cache.k, cache.v):
            view.masked_fill_(view.abs() < torch.finfo(view.dtype).tiny, 0.0)
    table = torch.tensor(table, dtype=torch.int32).reshape(len(lens), len(table[0]) if table else 0)
    lens = torch.tensor(lens, dtype=torch.int32)
    want = plain(cache, table.numel(), dtype, torch.device("cpu"))
    cpu.dequantize_pages(cache, table, lens, scales, want)
    got = plain(cache, table.numel(), dtype, DEVICE)
    source = over(storage.to(DEVICE), cache)
    fast.dequantize_pages(source, table.to(DEVICE), lens.to(DEVICE), scales, got)
    got = LayerCache(got.k.cpu(), got.v.cpu(), got.format)
    for one in (want, got):
        unify_nans(one)
    for a, b in ((want.k, got.k), (want.v, got.v)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return want


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_layout(order, name):
    """Pages of random bytes, all codes and NaN among them."""
    storage, cache = dirty_cache(order, name, PAGE_SIZE, HEADS, (16, 72))
    found = agree(storage, cache, TABLE, LENS, torch.float32, SCALES)
    in_use = torch.zeros(12, PAGE_SIZE, dtype=torch.bool)
    for page, count in ((0, 4), (1, 3), (3, 4), (6, 4), (7, 4), (8, 1)):
        in_use[page, :count] = True
    assert (found.k[~in_use] == 1).all()
    assert not (found.k[in_use] == 1).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.3, 7.0), (1e4, torch.tensor(1e-3))])
def test_every_dtype_and_scale(name, dtype, scales):
    storage, cache = dirty_cache("LBNHC", name, PAGE_SIZE, HEADS, (24, 128))
    agree(storage, cache, TABLE, LENS, dtype, scales)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_scales_that_the_kernel_loads(monkeypatch, name):
    monkeypatch.setattr(fast, "kernel_scale", lambda scale: scale.to(DEVICE))
    storage, cache = dirty_cache("LBHNC", name, PAGE_SIZE, HEADS, (24, 16))
    scales = (torch.tensor(0.37), torch.tensor([3.0], dtype=torch.float64))
    agree(storage, cache, TABLE, LENS, torch.float16, scales)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])
@pytest.mark.parametrize("dims", [(64, 128), (24, 192)])
def test_swizzled_scales(name, dims):
    storage, cache = dirty_cache("LBHNC", name, 8, HEADS, dims, "swizzled")
    agree(storage, cache, [[2, 1], [0, 9]], [16, 5], torch.bfloat16, SCALES)
    _, linear = dirty_cache("LBHNC", name, 8, HEADS, dims)
    found = [plain(of, 2, torch.float32, torch.device("cpu")) for of in (cache, linear)]
    for of, to in zip((cache, linear), found, strict=True):
        table = torch.tensor([[2, 1]], dtype=torch.int32)
        cpu.dequantize_pages(of, table, torch.tensor([16]), (1.0, 1.0), to)
    assert torch.equal(found[0].k.nan_to_num(), found[1].k.nan_to_num())
    assert not torch.equal(found[0].v.nan_to_num(), found[1].v.nan_to_num())


@pytest.mark.parametrize(("table", "lens"), [([], []), ([[], []], [0, 0]), ([[9], [9]], [0, 0])])
def test_nothing_in_use(table, lens):
    storage, cache = dirty_cache("LBHNC", "fp8_e4m3", PAGE_SIZE, HEADS)
    agree(storage, cache, table, lens, torch.float16)


def test_what_the_host_cannot_see_stays_within_cache_and_table():
    storage, cache = dirty_cache("LBHNC", "fp8_e4m3", PAGE_SIZE, HEADS)
    table = torch.tensor([[0, PAGES], [1, -1], [2, 2]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([8, 8, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    got = plain(cache, 6, torch.float32, DEVICE)
    fast.dequantize_pages(over(storage.to(DEVICE), cache), table, lens, (1.0, 1.0), got)
    changed = (got.k.cpu() != 1).flatten(1).any(1)
    assert changed.tolist() == [True, False, True, False, True, True]


@settings(max_examples=25)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(tuple(FORMATS)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from(FLOATS),
    st.tuples(st.integers(2, 10), st.integers(2, 64)),
    st.data(),
)
def test_anything_goes(order, name, page_size, dtype, eighths, data):
    storage, cache = dirty_cache(order, name, page_size, HEADS, tuple(8 * n for n in eighths))
    width = data.draw(st.integers(1, 3))
    lens = data.draw(st.lists(st.integers(0, width * page_size), max_size=4))
    ids = st.lists(st.integers(0, PAGES - 1), min_size=width, max_size=width)
    agree(storage, cache, [data.draw(ids) for _ in lens], lens, dtype, SCALES)
