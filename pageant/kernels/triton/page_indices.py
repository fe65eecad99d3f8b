"""Flat lists of the pages in use; see ``pageant.ops.page_indices``.

    count = ceil(len / N);  indptr = cumsum(count);  indices[indptr[r] + c] = page_table[r, c]

A program copies some columns of one request's row; where they go it finds by adding the counts of
the requests before it. A length is read as no less than 0 and no more than the row of its table
holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of the table, a program
NUM_WARPS = 4


@triton.jit
def _lens_at(seq_lens, step, request, is_wanted, width, PAGE_SIZE: tl.constexpr):
    """int64 lengths of some requests; 0 where not wanted."""
    lens = tl.load(seq_lens + request.to(tl.int64) * step, mask=is_wanted, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(lens, 0), width.to(tl.int64) * PAGE_SIZE)


@triton.jit(do_not_specialize=["width"])
def list_pages(
    seq_lens,
    lens_step,
    table,
    table_row,
    table_column,
    indptr,
    indptr_step,
    indices,
    indices_step,
    last_page_len,
    last_step,
    width,
    PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: R, ceil(width / COLUMNS) or 1. Names of strides, in elements."""
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    before = tl.zeros([COLUMNS], tl.int64)
    for first in range(0, request + 1, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        lens = _lens_at(seq_lens, lens_step, other, other < request, width, PAGE_SIZE)
        before += (lens + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(before, 0)
    own = _lens_at(seq_lens, lens_step, request, True, width, PAGE_SIZE)
    count = (own + PAGE_SIZE - 1) // PAGE_SIZE
    if chunk == 0:
        if request == 0:
            tl.store(indptr, 0)
        number = request.to(tl.int64)
        tl.store(indptr + (number + 1) * indptr_step, (start + count).to(tl.int32))
        last = own - tl.maximum(count - 1, 0) * PAGE_SIZE
        tl.store(last_page_len + number * last_step, last.to(tl.int32))
    column = chunk.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_used = column < count
    ids = tl.load(
        table + request.to(tl.int64) * table_row + column * table_column, mask=is_used, other=0
    )
    tl.store(indices + (start + column) * indices_step, ids, mask=is_used)


def page_indices(
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write offsets, page ids and lengths of last pages, in one launch.

    Args:
        seq_lens: int32 [R].
        page_table: int32 [R, W], any strides.
        page_size: tokens a page.
        out: indptr int32 [R + 1], indices int32 [>= R * W], last_page_len int32 [R].
    """
    indptr, indices, last_page_len = out
    requests, width = page_table.shape
    if requests == 0:
        indptr.zero_()
        return
    list_pages[(requests, max(1, -(-width // COLUMNS)))](
        seq_lens,
        seq_lens.stride(0),
        page_table,
        *page_table.stride(),
        indptr,
        indptr.stride(0),
        indices,
        indices.stride(0),
        last_page_len,
        last_page_len.stride(0),
        width,
        PAGE_SIZE=page_size,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
