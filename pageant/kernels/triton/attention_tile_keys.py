"""A block of keys or values, from where it lies in its pages: what `attention_tile` multiplies."""

from __future__ import annotations

import triton
import triton.language as tl

from pageant.kernels.triton.common.widen import E2M1, widen, widen_blocks

NO_SCALES, ROW_SCALES, BLOCK_SCALES, SWIZZLED_SCALES = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def places_of(table, number, key, low, high, live, C: tl.constexpr, MASKED: tl.constexpr):
    """The page of each key of a block, loaded once for each page, and its row there [BLOCK]."""
    BLOCK: tl.constexpr = C.block
    PAGE: tl.constexpr = C.page_size
    key = key.to(tl.uint32)  # so that dividing by a power of 2 takes one instruction
    if PAGE % BLOCK == 0:
        here = number * BLOCK
        if MASKED:
            is_live = (here < high) & (here + BLOCK > low)
            page = tl.load(table + here // PAGE, mask=is_live, other=0)
        else:
            page = tl.load(table + here // PAGE)
    elif MASKED:
        page = tl.load(table + key // PAGE, mask=live, other=0)
    else:
        page = tl.load(table + key // PAGE)
    row = (key % PAGE).to(tl.int32)
    if C.is_far:
        return page.to(tl.int64), row.to(tl.int64)
    else:
        return page, row


@triton.jit
def rows_of(
    side,
    page,
    row,
    head,
    live,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys or values of a block [BLOCK, PADDED], and their rows' scales (or 1); 0 where not live.

    Of e2m1 they lack `BLOCKS_FACTOR`.

    Args:
        side: elements, scales; strides of page, token and head in elements, then in scales.
        page, row: [BLOCK], where each key lies; int64 where addresses take as much.
        head: kv head.
        live: bool [BLOCK].
        SIZE, PADDED: elements of a row, and the next power of 2.
        KIND, NATIVE: see `widen`.
        SCALES: how scales are stored.
        MASKED: whether any key may not be live.
        DTYPE: of the numbers.
    """
    elements, scales, strides, scale_strides = side
    at = page * strides[0] + head * strides[2] + row * strides[1]
    PER_BYTE: tl.constexpr = 2 if KIND == E2M1 else 1
    column = tl.arange(0, PADDED // PER_BYTE)
    codes_at = elements + at[:, None] + column[None, :]
    inside = column[None, :] < SIZE // PER_BYTE
    if MASKED and SIZE != PADDED:
        codes = tl.load(codes_at, mask=live[:, None] & inside, other=0)
    elif MASKED:
        codes = tl.load(codes_at, mask=live[:, None], other=0)
    elif SIZE != PADDED:
        codes = tl.load(codes_at, mask=inside, other=0)
    else:
        codes = tl.load(codes_at)
    row_scale = 1.0
    if SCALES == ROW_SCALES:
        scales_at = scales + page * scale_strides[0] + head * scale_strides[2]
        scales_at += row * scale_strides[1]
        row_scale = tl.load(scales_at, mask=live, other=0.0)
    if KIND != E2M1:
        values = widen(codes, KIND, NATIVE, DTYPE)
    else:
        BLOCKS: tl.constexpr = (SIZE + 15) // 16
        s = tl.arange(0, PADDED // 16)
        if SCALES == SWIZZLED_SCALES:  # see ``pageant.cache.layout.swizzled``
            QUARTER: tl.constexpr = BLOCKS // 4
            line = (row // 4 * 4)[:, None] + (s // QUARTER)[None, :]
            place = (s % QUARTER * 4)[None, :] + (row % 4)[:, None]
        else:
            line, place = row[:, None], s[None, :]
        in_page = (page * scale_strides[0] + head * scale_strides[2] + row * 0)[:, None]
        scales_at = scales + in_page + (line * scale_strides[1] + place)
        wanted = live[:, None] & (s < BLOCKS)[None, :]
        stored = tl.load(scales_at, mask=wanted, other=0)
        values = widen_blocks(codes, stored, PADDED).to(DTYPE)
    return values, row_scale
