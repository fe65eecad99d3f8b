"""Cached keys and values as plain numbers, request by request; ``ops.dequantize_pages``.

    value = code * stored scale * layer's scale, in float32, then cast: as ``cache/quantize.py``

A program takes a few rows of one request, each one token of one head, of the keys or of the
values; programs past the request's end return at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pageant.cache.pages import LayerCache, Side
from pageant.kernels.triton.common.encode import cast, load_scale
from pageant.kernels.triton.common.scalars import kernel_scale
from pageant.kernels.triton.common.widen import BLOCKS_FACTOR, E2M1, kind_of, widen, widen_blocks
from pageant.types import Scalar

PROGRAM = 4096  # elements
NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_pages", "width", "chunks"])
def dequantize_kernel(
    sides,
    to,
    factors,
    table,
    table_row,
    table_column,
    seq_lens,
    lens_step,
    num_pages,
    width,
    chunks,
    D: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PROGRAM: tl.constexpr,
    KIND: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    """Grid: R * chunks, 2; keys first. A chunk of a request is the rows of one program.

    Args:
        sides: keys and values: elements, scales or None; strides of page, token and head, in
            elements, then in scales. Eight-bit floats as bytes.
        to: keys and values: elements, and their strides.
        factors: of keys and of values, as `load_scale` takes them.
        table, table_row, table_column: page ids, and strides.
        KIND: see `widen`.
        SWIZZLED: whether scales of values are.
    """
    if tl.program_id(1) == 0:
        _side(
            sides[0], to[0], factors[0], table, table_row, table_column, seq_lens, lens_step,
            num_pages, width, chunks, D, HEADS, PAGE_SIZE, PROGRAM, KIND, False,
        )  # fmt: skip
    else:
        _side(
            sides[1], to[1], factors[1], table, table_row, table_column, seq_lens, lens_step,
            num_pages, width, chunks, DV, HEADS, PAGE_SIZE, PROGRAM, KIND, SWIZZLED,
        )  # fmt: skip


@triton.jit
def _side(
    side,
    to,
    factor,
    table,
    table_row,
    table_column,
    seq_lens,
    lens_step,
    num_pages,
    width,
    chunks,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PROGRAM: tl.constexpr,
    KIND: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    elements, scales, strides, scale_strides = side
    target, to_strides = to
    WIDTH: tl.constexpr = triton.next_power_of_2(D)
    ROWS: tl.constexpr = PROGRAM // WIDTH
    request = (tl.program_id(0) // chunks).to(tl.int64)
    size = tl.load(seq_lens + request * lens_step).to(tl.int64)
    size = tl.minimum(size, width.to(tl.int64) * PAGE_SIZE)
    first = (tl.program_id(0) % chunks).to(tl.int64) * ROWS
    if first < size * HEADS:
        i = first + tl.arange(0, ROWS)
        token, head = i // HEADS, i % HEADS
        column, row = token // PAGE_SIZE, token % PAGE_SIZE
        live = token < size
        page = tl.load(table + request * table_row + column * table_column, mask=live, other=-1)
        page = page.to(tl.int64)
        live = live & (page >= 0) & (page < num_pages)
        at = elements + (page * strides[0] + row * strides[1] + head * strides[2])[:, None]
        at_scale = page * scale_strides[0] + head * scale_strides[2]
        d = tl.arange(0, WIDTH)[None, :]
        inside = live[:, None] & (d < D)
        if KIND == E2M1:
            byte = tl.arange(0, WIDTH // 2)[None, :]
            codes = tl.load(at + byte, mask=live[:, None] & (byte < D // 2), other=0)
            block = tl.arange(0, WIDTH // 16)[None, :]
            COUNT: tl.constexpr = (D + 15) // 16
            line, spot = row[:, None], block
            if SWIZZLED:  # see ``pageant.cache.layout.swizzled``
                QUARTER: tl.constexpr = COUNT // 4
                spot = block % QUARTER * 4 + line % 4
                line = line // 4 * 4 + block // QUARTER
            stored = tl.load(
                scales + at_scale[:, None] + line * scale_strides[1] + spot,
                mask=live[:, None] & (block < COUNT),
                other=0,
            )
            values = widen_blocks(codes, stored, WIDTH).to(tl.float32) * BLOCKS_FACTOR
        else:
            codes = tl.load(at + d, mask=inside, other=0)
            values = widen(codes, KIND, False, tl.float32)
            if scales is not None:
                own = tl.load(scales + at_scale + row * scale_strides[1], mask=live, other=0.0)
                values = values * own[:, None]
        if factor is not None:
            values = values * load_scale(factor)
        place = (request * width + column) * to_strides[0] + row * to_strides[1]
        place = target + (place + head * to_strides[2])[:, None] + d
        tl.store(place, cast(values, target.dtype.element_ty), mask=inside)


def dequantize_pages(
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: tuple[Scalar, Scalar],
    out: LayerCache,
) -> None:
    """Fill page r * W + c of `out` from page page_table[r, c], as far as the request has tokens.

    One launch; nothing waits for the device. Pages the cache does not have are left out.

    Args:
        cache: one layer's pages, any format.
        page_table: int32 [R, W], any strides.
        seq_lens: int32 [R]; read as no more than W * N.
        scales: k_scale and v_scale, for formats they apply to; tensors may lie anywhere.
        out: [R * W, N, Hkv, ..], a format without scales.
    """
    requests, width = page_table.shape
    _, page_size, heads, dim = out.k.shape
    value_dim = out.v.shape[3]
    if requests * width == 0:
        return
    factors: tuple[Scalar | None, ...] = (None, None)
    if cache.format.uses_layer_scales:
        factors = tuple(map(kernel_scale, scales))
    rows = PROGRAM // triton.next_power_of_2(max(dim, value_dim))
    chunks = -(-width * page_size * heads // rows)
    dequantize_kernel[(requests * chunks, 2)](
        tuple(map(_source, cache.sides)),
        tuple((side.elements, side.elements.stride()[:3]) for side in out.sides),
        factors,
        page_table,
        *page_table.stride(),
        seq_lens,
        seq_lens.stride(0),
        cache.num_pages,
        width,
        chunks,
        D=dim,
        DV=value_dim,
        HEADS=heads,
        PAGE_SIZE=page_size,
        PROGRAM=PROGRAM,
        KIND=kind_of(cache.format),
        SWIZZLED=cache.v_scale_order == "swizzled",
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )


def _source(side: Side) -> tuple[Any, ...]:
    elements, scales = side.elements, side.scales
    if elements.itemsize == 1 and elements.is_floating_point():
        elements = elements.view(torch.uint8)
    if scales is None:
        return elements, None, elements.stride()[:3], (0, 0, 0)
    if scales.itemsize == 1:
        scales = scales.view(torch.uint8)
    return elements, scales, elements.stride()[:3], scales.stride()[:3]
