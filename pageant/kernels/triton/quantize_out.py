"""Finished rows in the form a quantised output has: a step of its own, after both phases.

    fp8_e4m3: code = sat(x / out_scale)
    nvfp4:    y = out_scale * x;  sf = e4m3(absmax(y) / 6);  code = e2m1(y / sf)

Bytes as ``cache/quantize.py`` defines them, scales where ``cache/out_scales.py`` says. A program
takes a few rows, each one token of one head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pageant.cache.formats import FORMATS
from pageant.cache.out_scales import (
    GROUP_ROWS,
    TILE,
    TILE_BLOCKS,
    TILE_ROWS,
    OutScales,
    SwizzledScales,
)
from pageant.kernels.triton.common.encode import encode_blocks, encode_plain, load_scale, pack
from pageant.kernels.triton.common.scalars import kernel_scale
from pageant.plan.bound import Bound
from pageant.plan.inputs import LayerParams

PROGRAM = 2048  # elements: 16 a thread, one block of nvfp4
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

_TILE = tl.constexpr(TILE)
_TILE_ROWS, _TILE_BLOCKS = tl.constexpr(TILE_ROWS), tl.constexpr(TILE_BLOCKS)
_GROUP_ROWS = tl.constexpr(GROUP_ROWS)
_ROW_STEP = tl.constexpr(TILE // GROUP_ROWS)


@triton.jit(do_not_specialize=["scales", "end", "num_tokens", "start_row", "scales_token"])
def quantize_kernel(
    x,
    out,
    scales,
    end,
    num_tokens,
    start_row,
    scales_token,
    scales_block,
    x_token,
    x_head,
    x_content,
    out_token,
    out_head,
    out_content,
    out_scale,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAM: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    TOP: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid: ceil(T * HEADS / rows a program). Pointers to bytes are to uint8; strides in elements.

    out_scale is a number, a pointer, or None for 1; end points to the number of rows that count, or
    is None; TOP is 0 for fp8; TILES is how many tiles of scales lie side by side, 0 for linear.
    """
    WIDTH: tl.constexpr = triton.next_power_of_2(D)
    ROWS: tl.constexpr = PROGRAM // WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    if end is not None:
        num_tokens = tl.minimum(num_tokens, tl.load(end))
    is_row = (token < num_tokens)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    values = tl.load(
        x + (token * x_token + head * x_head)[:, None] + column.to(tl.int64) * x_content,
        mask=is_row & (column < D),
        other=0.0,
    )
    target = out + (token * out_token + head * out_head)[:, None]
    if TOP > 0.0:
        BLOCKS: tl.constexpr = WIDTH // 16
        blocks = tl.reshape(values * load_scale(out_scale), [ROWS, BLOCKS, 16])
        codes, found = encode_blocks(blocks, tl.full([], 1.0, tl.float32), TOP, 0.0)
        byte = tl.arange(0, WIDTH // 2)[None, :]
        tl.store(
            target + byte.to(tl.int64) * out_content,
            pack(codes, ROWS, WIDTH // 2),
            mask=is_row & (byte < D // 2),
        )
        block = tl.arange(0, BLOCKS)[None, :]
        COUNT: tl.constexpr = (D + 15) // 16
        of_token = head[:, None] * COUNT + block
        if TILES > 0:
            place = _in_tiles(token[:, None] + start_row, of_token, TILES)
        else:
            place = token[:, None] * scales_token + of_token * scales_block
        tl.store(scales + place, found.to(tl.uint8), mask=is_row & (block < COUNT))
    else:
        codes = encode_plain(values, out_scale, EXPONENT_BITS, MANTISSA_BITS, MAX)
        target += column.to(tl.int64) * out_content
        tl.store(target, codes.to(tl.uint8), mask=is_row & (column < D))


@triton.jit
def _in_tiles(row, block, TILES: tl.constexpr):
    """Byte of the scale of a row's block, as `in_tiles` has it; `row` and `block` broadcast."""
    tile = row // _TILE_ROWS * TILES + block // _TILE_BLOCKS
    group = row % _TILE_ROWS // _GROUP_ROWS * _TILE_BLOCKS
    return tile * _TILE + row % _GROUP_ROWS * _ROW_STEP + group + block % _TILE_BLOCKS


def quantize_out(
    rows: torch.Tensor,
    out: torch.Tensor,
    scales: OutScales | None,
    params: LayerParams,
    end: torch.Tensor | None = None,
    kept: dict[Any, Any] | None = None,
) -> None:
    """Write rows as params.out_format stores them; rows of `out` and `scales` past them stay.

    One launch; nothing waits for the device.

    Args:
        rows: float32 [T, Hq, Dv], any strides.
        out: float8_e4m3fn [>= T, Hq, Dv], or uint8 [>= T, Hq, Dv / 2] for nvfp4; any strides.
        scales: of nvfp4, e4m3 [>= T, Hq * Dv / 16] or swizzled; None for fp8.
        params: out_format and out_scale.
        end: int32 [1] on the device, how many of the rows are no padding; None: all.
        kept: see ``AttentionCall.kept``.
    """
    num_tokens, heads, dim = rows.shape
    if num_tokens == 0:
        return
    start_row = tiles = 0
    if isinstance(scales, SwizzledScales):
        start_row, scales = scales.start_row, scales.scales
        tiles = scales.shape[1] // TILE_BLOCKS
    scales = None if scales is None else scales.view(torch.uint8)
    moving = (rows, out.view(torch.uint8), scales, end, num_tokens, start_row)
    steps = (0, 0) if scales is None else scales.stride()
    kind = ("quantize", tiles, steps[1], end is None)
    ready = None if kept is None else kept.get(kind)
    if ready is None:
        fixed = _fixed(rows, out, params, tiles)
        kernel = Bound(quantize_kernel, (*moving, *steps, *fixed), rows.device, **OPTIONS)
        ready = kernel, kernel.raw(fixed)
        if kept is not None:
            kept[kind] = ready
    kernel, fixed = ready
    grid = (-(-num_tokens * heads // (PROGRAM // triton.next_power_of_2(dim))), 1, 1)
    kernel(grid, *kernel.raw(moving), *steps, *fixed)


def _fixed(
    rows: torch.Tensor, out: torch.Tensor, params: LayerParams, tiles: int
) -> tuple[Any, ...]:
    """The kernel's arguments from `x_token` on."""
    fmt = FORMATS[params.out_format]
    return (
        *rows.stride(),
        *out.stride(),
        kernel_scale(params.out_scale),
        rows.shape[2],
        rows.shape[1],
        PROGRAM,
        fmt.exponent_bits,
        fmt.mantissa_bits,
        fmt.max_value,
        fmt.block_tops[0] if fmt.block_tops else 0.0,
        tiles,
    )
