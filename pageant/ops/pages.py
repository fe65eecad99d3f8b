"""Pages without attention: written, listed, and read back as plain numbers."""

from __future__ import annotations

from typing import Any

import torch

from pageant.cache.formats import resolve
from pageant.cache.pages import LayerCache, PagedCache, layout_for
from pageant.cache.tensors import FLOATS, check_tensor, check_writable
from pageant.cache.wrap import wrap
from pageant.plan.copies import DeviceWrites
from pageant.plan.inputs import check_cache, check_cache_writable, check_new_rows
from pageant.plan.op_inputs import (
    check_apart,
    check_new_pages,
    check_page_ids,
    check_scales,
    check_table,
)
from pageant.plan.pages import WriteIndex, write_index
from pageant.select.choose import load_step
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Scalar, Shape, bad

PageIndices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def write_pages(  # budget: one argument for each thing writing needs
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    format: str = "auto",
    scales: tuple[Scalar, Scalar] = (1.0, 1.0),
) -> None:
    """Store tokens' keys and values by slot (page * page_size + row); negative slots are skipped.

    On a GPU nothing waits for the device, and slots past the last page are skipped too.

    Args:
        k, v: [>= T, Hkv, D] and [>= T, Hkv, Dv]; rows past T are ignored.
        k_cache, v_cache: [P, N, Hkv, D] and [P, N, Hkv, Dv], any strides.
        k_scales, v_scales: scales beside them, as in ``LayerCache``, for formats that store them.
        slot_mapping: int64 [T].
        format: the cache's format.
        scales: k_scale and v_scale, which writing divides by in formats they apply to.
    """
    check_new_pages(k, v, (k_cache, v_cache), slot_mapping, scales)
    fmt = resolve(format, k.dtype)
    _, page_size, heads, _ = k_cache.shape
    shape = Shape(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=k.shape[-1],
        v_head_dim=v.shape[-1],
        dtype=k.dtype,
    )
    spec = CacheSpec(format=fmt.name, page_size=page_size)
    valid = check_config(shape, spec)
    if not valid.ok:  # head sizes are those of k and v
        argument = "k" if valid.argument == "head_dim" else valid.argument
        raise ArgumentError(valid.reason or "", argument or "")
    cache = wrap(shape, spec, (k_cache, v_cache), (k_scales, v_scales), k.device)
    check_cache_writable(cache)
    index: WriteIndex | DeviceWrites
    if k.is_cuda:
        index = DeviceWrites(slot_mapping, slot_mapping.shape[0])
    else:
        index = write_index(slot_mapping, page_size)
    index.check(cache.num_pages * page_size)
    check_new_rows(k, v, shape, index.num_tokens, k.device)
    load_step("write_pages", k.device)(k, v, cache, index, scales)


def page_indices(
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    out: PageIndices | None = None,
) -> PageIndices:
    """The pages in use as flat lists, as FlashInfer's wrappers take them.

    Args:
        seq_lens: int32 [R], tokens of each request, 0 allowed.
        page_table: int32 [R, W], any strides; what its rows hold past ceil(len / N) is not looked
            at, the rest is copied as it is, page 0 too.
        page_size: N, tokens a page.
        out: three tensors like those returned, written in place; `indices` may be longer.

    Returns:
        indptr int32 [R + 1], where each request's pages begin; indices int32 [R * W], the room that
        the table may need: entries from indptr[-1] on are 0, or in `out` left alone; last_page_len
        int32 [R], tokens on each request's last page, 0 if it has none.

    Raises:
        ArgumentError: for tensors that do not fit together; on the CPU also for lengths below 0 or
            beyond W * N. On a GPU nothing waits for the device, and they count as 0 and as W * N.

    Two requests, 4 tokens a page; the second fills its page exactly:

    >>> table = torch.tensor([[7, 0], [5, -1]], dtype=torch.int32)
    >>> [x.tolist() for x in page_indices(torch.tensor([6, 4], dtype=torch.int32), table, 4)]
    [[0, 2, 3], [7, 0, 5, 0], [2, 4]]
    """
    check_table(seq_lens, page_table, page_size)
    device, (requests, width) = page_table.device, page_table.shape
    sizes = {"indptr": requests + 1, "indices": requests * width, "last_page_len": requests}
    if out is None:
        indptr, indices, last = (seq_lens.new_zeros(size) for size in sizes.values())
        out = indptr, indices, last
    elif not isinstance(out, tuple | list) or len(out) != len(sizes):
        raise bad("out", type(out).__name__, "three tensors: indptr, indices, last_page_len")
    for (name, size), x in zip(sizes.items(), out, strict=True):
        check_tensor(f"out: {name}", x, (torch.int32,), dims=1, device=device)
        if len(x) != size and (name != "indices" or len(x) < size):
            raise bad(f"out: {name}", list(x.shape), f"[{size}]")
        check_writable(f"out: {name}", x)
    check_apart(dict(zip(sizes, out, strict=True)), (seq_lens, page_table))
    load_step("page_indices", device)(seq_lens, page_table, page_size, out)
    return out


def dequantize_pages(
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: tuple[Scalar, Scalar] = (1.0, 1.0),
    layout: str = "LBHNC",
) -> tuple[LayerCache, torch.Tensor]:
    """The tokens in use as plain numbers, in a cache of their own: for kernels that read no other.

    Page page_table[r, c] becomes page r * W + c, so give no more columns than the longest request
    needs: all R * W pages are allocated. What no request has tokens for is 0.

    Args:
        cache: one layer's pages, of any format.
        page_table: int32 [R, W]; entries past ceil(len / N) may hold anything.
        seq_lens: int32 [R], tokens of each request, 0 allowed.
        dtype: float32, float16 or bfloat16, of the result.
        scales: k_scale and v_scale, which the result is multiplied by where the format uses them.
        layout: of the result's memory, one of ``pageant.cache.layout.LAYOUTS``.

    Returns:
        One layer's pages, and the table int32 [R, W] to read them by, 0 to R * W - 1.

    Raises:
        ArgumentError: for arguments that do not fit together; on the CPU also for lengths and page
            ids that do not exist. On a GPU nothing waits for the device: lengths below 0 count as
            0, those beyond W * N as W * N, and pages that do not exist are read as zeros.

    Codes 56 and 64 of fp8 are 1 and 2; of the second page only one token is in use:

    >>> codes = torch.tensor([56, 64]).byte()[:, None, None, None].expand(2, 2, 1, 16)
    >>> pages = codes.contiguous().view(torch.float8_e4m3fn)
    >>> fp8 = LayerCache(pages, pages.clone(), resolve("fp8", torch.bfloat16))
    >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
    >>> lens = torch.tensor([3], dtype=torch.int32)
    >>> plain, table = dequantize_pages(fp8, table, lens, scales=(0.5, 1.0))
    >>> plain.k[:, :, 0, 0].tolist(), table.tolist()
    ([[1.0, 1.0], [0.5, 0.0]], [[0, 1]])
    """
    _check_reading(cache, page_table, seq_lens, dtype, scales)
    shape, stored = _held_by(cache, dtype)
    plain = CacheSpec(page_size=cache.page_size, layout=layout)
    for spec in (stored, plain):
        valid = check_config(shape, spec)
        if not valid.ok:
            raise ArgumentError(valid.reason or "", valid.argument or "")
    num_pages, device = page_table.numel(), page_table.device
    check_cache(cache, shape, stored, cache.format, device)
    memory = layout_for(shape, plain, 1, num_pages)
    result = PagedCache(memory, resolve("auto", dtype), device)[0]
    load_step("dequantize_pages", device)(cache, page_table, seq_lens, scales, result)
    table = torch.arange(num_pages, dtype=torch.int32, device=device)
    return result, table.view(page_table.shape)


def _check_reading(
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    scales: tuple[Scalar, Scalar],
) -> None:
    if not isinstance(cache, LayerCache):
        raise bad("cache", type(cache).__name__, "one layer of a cache: kv[i]")
    if dtype not in FLOATS:
        raise bad("dtype", dtype, ", ".join(map(str, FLOATS)))
    check_scales(scales)
    check_table(seq_lens, page_table, cache.page_size)
    check_page_ids(page_table, seq_lens, cache)


def _held_by(cache: LayerCache, dtype: torch.dtype) -> tuple[Shape, CacheSpec]:
    """What the sizes of a cache's tensors say it holds."""
    _, page_size, heads, elements = cache.k.shape
    shape = Shape(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=elements * cache.format.per_byte,
        v_head_dim=cache.v.shape[3] * cache.format.per_byte,
        dtype=dtype,
    )
    order: Any = cache.v_scale_order
    return shape, CacheSpec(format=cache.format.name, page_size=page_size, v_scale_order=order)
