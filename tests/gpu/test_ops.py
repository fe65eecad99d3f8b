"""On a GPU, ops beside attention equal the CPU's on the same data, and wait for nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pageant import ops
from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
from pageant.cache.pages import LayerCache
from tests.cache.test_write import dirty_cache
from tests.inputs import BOUNDS, assert_close
from tests.kernels.cpu.test_merge import parts
from tests.kernels.triton.test_write_pages import over

pytestmark = pytest.mark.gpu

INF, NAN = math.inf, math.nan
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SINKS = torch.tensor([-50.0, 0.0, 3.0])
HEADS, DIMS, PAGE_SIZE = 3, (48, 72), 8
LAYER_SCALES: list[Any] = [1.0, 0.3, torch.tensor(0.3), "on the device"]


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def placed(scale: Any) -> tuple[Any, Any]:
    """The same scale for the CPU and for the GPU."""
    if scale == "on the device":
        return torch.tensor([0.3]), torch.tensor([0.3], device="cuda")
    return scale, scale


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether the bytes are equal, all NaN of wide floats being one."""
    if a is None or b is None:
        return a is b
    a, b = a.cpu(), b.cpu()
    if a.dtype in FLOATS:
        a, b = (x.masked_fill(x.isnan(), NAN) for x in (a, b))
    a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


# merge_states


def on_gpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the same strides."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
        for x in tensors
    ]


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("count", [1, 2, 7, 70])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_merge_states(dtype: torch.dtype, count: int, sinks: torch.Tensor | None) -> None:
    outs, lses = parts(count, dtype)
    lses[0][0, 0], lses[-1][1, 1] = -INF, INF
    want, want_lse = ops.merge_states(outs, lses, sinks)
    device = on_gpu(outs), on_gpu(lses), None if sinks is None else sinks.cuda()
    with nothing_waits():
        out, lse = ops.merge_states(*device)
        again, _ = ops.merge_states(*device, out=device[0][0])
    assert out.dtype == dtype
    assert_close(out.cpu(), want, 2 * BOUNDS.get(dtype, 1e-5))
    assert_close(lse.cpu(), want_lse, 1e-5)
    assert same(again, out)


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("place", [0, 1])
def test_merging_with_nothing_changes_no_bit(empty: float, place: int) -> None:
    (state, other), (lse, other_lse) = parts(2)
    state[0], lse[0], other[:], other_lse[:] = -0.0, -0.0, NAN, empty
    outs, lses = [other], [other_lse]
    outs.insert(place, state)
    lses.insert(place, lse)
    got, got_lse = ops.merge_states(on_gpu(outs), on_gpu(lses), torch.full((3,), -INF).cuda())
    assert same(got, state)
    assert same(got_lse, lse)


def test_merging_parts_that_lie_across_the_output() -> None:
    outs, lses = parts(2)
    want, _ = ops.merge_states(on_gpu(outs), on_gpu(lses))
    memory = torch.zeros(6, 3, 8, device="cuda")
    memory[:5] = outs[0]
    got, _ = ops.merge_states([memory[:5], outs[1].cuda()], on_gpu(lses), out=memory[1:])
    assert same(got, want)


# Pages


def pages(order: str, name: str, swizzle: str = "linear") -> tuple[LayerCache, LayerCache]:
    """The same random bytes on the CPU and on the GPU."""
    storage, cache = dirty_cache(order, name, PAGE_SIZE, HEADS, DIMS, swizzle)
    return cache, over(storage.cuda(), cache)


def views(cache: LayerCache) -> list[torch.Tensor | None]:
    return [cache.k, cache.v, cache.k_scales, cache.v_scales]


@pytest.mark.parametrize("scale", [0.3, "on the device"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_write_pages(name: str, dtype: torch.dtype, scale: Any) -> None:
    cache, cuda_cache = pages("LBHNC", name)
    rng = torch.Generator().manual_seed(4)
    k, v = (torch.randn(9, HEADS, dim, generator=rng).to(dtype) * 3 for dim in DIMS)
    k[0, 0, 0], k[1, 1, 3], v[2, 2, 5] = NAN, INF, -INF
    slots = torch.tensor([5, -1, 0, 23, 9, -7, 11, 12])
    given = zip((cache, cuda_cache), placed(scale), (slots, slots.cuda()), strict=True)
    for of, factor, at in given:
        stored = {"k_scales": of.k_scales, "v_scales": of.v_scales}
        rows = k.to(at.device), v.to(at.device)
        scales = (factor, factor)
        if of is cache:
            ops.write_pages(*rows, of.k, of.v, at, format=name, scales=scales, **stored)
            continue
        past = torch.cat([at, torch.tensor([24], device="cuda")])  # there is no such slot
        with nothing_waits():
            ops.write_pages(*rows, of.k, of.v, past, format=name, scales=scales, **stored)
    assert all(same(a, b) for a, b in zip(views(cache), views(cuda_cache), strict=True))


@pytest.mark.parametrize(
    ("lens", "width", "page_size"),
    [
        ([6, 0, 4, 17], 5, 4),
        ([0], 1, 16),
        ([], 3, 16),
        ([i % 90 for i in range(3000)], 90, 1),
        ([50_000, 1], 3125, 16),
    ],
)
def test_page_indices(lens: list[int], width: int, page_size: int) -> None:
    rng = torch.Generator().manual_seed(1)
    table = torch.randint(0, 1 << 30, (len(lens), width), generator=rng, dtype=torch.int32)
    want = ops.page_indices(ints(lens), table, page_size)
    given = ints(lens).cuda(), table.T.contiguous().cuda().T
    sizes = [len(lens) + 1, table.numel(), len(lens)]
    room = [torch.full((size,), 7, dtype=torch.int32, device="cuda") for size in sizes]
    with nothing_waits():
        got = ops.page_indices(*given, page_size)
        ops.page_indices(*given, page_size, out=(room[0], room[1], room[2]))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    used = int(want[0][-1])
    assert same(room[0], want[0])
    assert same(room[2], want[2])
    assert same(room[1][:used], want[1][:used])
    assert (room[1][used:] == 7).all()


def test_page_indices_in_a_graph() -> None:
    lens, table = ints([6, 4]).cuda(), ints([[7, 0], [5, 3]]).cuda()
    out = tuple(torch.zeros(size, dtype=torch.int32, device="cuda") for size in (3, 4, 2))
    a, b, c = out
    ops.page_indices(lens, table, 4, out=(a, b, c))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.page_indices(lens, table, 4, out=(a, b, c))
    lens.copy_(ints([0, 8]))
    graph.replay()
    assert [x.tolist() for x in out] == [[0, 0, 2], [5, 3, 5, 0], [0, 4]]


PLAIN_FORMATS = [*FORMATS, "swizzled"]
DTYPE_AND_SCALE = [(dtype, scale) for dtype in FLOATS for scale in (1.0, "on the device")]


@pytest.mark.parametrize("name", PLAIN_FORMATS)
@pytest.mark.parametrize(
    ("order", "dtype", "scale"),
    [
        *((order, torch.bfloat16, 0.3) for order in LAYOUTS),
        *(("LBHNC", *others) for others in DTYPE_AND_SCALE),
    ],
)
def test_dequantize_pages(name: str, order: str, dtype: torch.dtype, scale: Any) -> None:
    swizzled = name == "swizzled"
    if swizzled:
        storage, cache = dirty_cache(order, "nvfp4", PAGE_SIZE, HEADS, (48, 64), name)
        cuda_cache = over(storage.cuda(), cache)
    else:
        cache, cuda_cache = pages(order, name)
    table, lens = ints([[2, 0, 2, 99], [1, -9, 9, 9], [0, 0, 0, 0]]), ints([23, 8, 0])
    on_host, on_device = placed(scale)
    options: dict[str, Any] = {"dtype": dtype, "layout": order}
    want, want_table = ops.dequantize_pages(cache, table, lens, scales=(on_host, 7.0), **options)
    given = cuda_cache, table.cuda(), lens.cuda()
    with nothing_waits():
        got, got_table = ops.dequantize_pages(*given, scales=(on_device, 7.0), **options)
    assert got.k.stride() == want.k.stride()
    assert same(got.k, want.k)
    assert same(got.v, want.v)
    assert same(got_table, want_table)


# quantize and dequantize


def numbers() -> torch.Tensor:
    """float32 [n, 48]: at and beside every tie of eight bits, all binades, and none at all."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([upper, upper + 1, (upper - 1) % (1 << 32), upper + 0x8000])
    every = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    rng = torch.Generator().manual_seed(8)
    rows = torch.randn(2000, 48, generator=rng) * torch.exp2(
        torch.randint(-20, 20, (2000, 1), generator=rng).float()
    )
    grid = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -6.0, 448.0])
    tied = grid[torch.randint(0, len(grid), (2000, 48), generator=rng)]
    every = torch.cat([every, every.new_zeros(-len(every) % 48)]).view(-1, 48)
    return torch.cat([every, rows, tied, tied * 448 / 6, torch.zeros(1, 48)])


@pytest.mark.parametrize("scale", [*LAYER_SCALES, 7.0, 1e-40], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_and_back(name: str, dtype: torch.dtype, scale: Any) -> None:
    x = numbers().to(dtype)
    on_host, on_device = placed(scale)
    want, want_scales = ops.quantize(x, name, on_host)
    cuda_x = x.cuda()
    with nothing_waits():
        codes, scales = ops.quantize(cuda_x, name, on_device)
        values = ops.dequantize(codes, scales, name, on_device)
    assert same(codes, want)
    assert same(scales, want_scales)
    assert same(values, ops.dequantize(want, want_scales, name, on_host))
