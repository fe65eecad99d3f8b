"""Tiles whose keys several shares hold, made of their parts; plain Triton, launched after a decode.

Program g takes part where a tile goes on into share g from the one before: of all programs of that
kind, each folds all parts of some elements of the tile, in ascending order of shares.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from pageant.plan.on_device import CLOSER, ITEM, OPENER, PARTIAL, REQUEST, UNIT

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _join_slice(
    number, tile, out_to, lse_to, parts, sinks, factor,
    PARTS: tl.constexpr, SLICE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Elements `number` * SLICE and on of a tile, from PARTS parts at a time.

    Args:
        tile: first kv head, first query head in a group, first token in the batch, tokens from
            there, first and last share.
        out_to, lse_to, parts, sinks: see `join_parts`.
        factor: on the output.
    """
    head, first_head, first_token, num_tokens, opener, closer = tile
    part_out, part_lse = parts
    ROWS: tl.constexpr = C.kv_heads * C.columns
    i = number * SLICE + tl.arange(0, SLICE)
    row = i // C.value_dim
    own = row % C.columns // C.heads
    in_group = first_head + row % C.columns % C.heads
    exists = (row < ROWS) & (own < C.query_tokens) & (own < num_tokens) & (in_group < C.group)
    peak = tl.full([SLICE], float("-inf"), tl.float32)
    total = tl.zeros([SLICE], tl.float32)
    acc = tl.zeros([SLICE], tl.float32)
    for first in range(opener, closer + 1, PARTS):
        share = first + tl.arange(0, PARTS)
        slot = (2 * share + (share == opener).to(tl.int32)).to(tl.int64)[:, None]
        inside = (share <= closer)[:, None] & exists[None, :]
        lse_at = part_lse + slot * ROWS + row[None, :]
        lse = tl.load(lse_at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        out_at = part_out + slot * (ROWS * C.value_dim) + i[None, :]
        out = tl.load(out_at, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        weight = tl.exp2(lse - base[None, :])
        acc = acc * decay + tl.sum(out * weight, 0)
        total = total * decay + tl.sum(weight, 0)
        peak = new_peak
    lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
    query_head = (head + row // C.columns) * C.group + in_group
    scale = tl.where(total > 0, factor / total, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=exists, other=0.0) * LOG2_E
        scale = scale / (1.0 + tl.exp2(sink - lse))
    token = (first_token + own).to(tl.int64)
    at = out_to[0] + token * out_to[1] + query_head * out_to[2] + i % C.value_dim
    tl.store(at, (acc * scale).to(out_to[0].dtype.element_ty), mask=exists)
    if lse_to[0] is not None:
        lse_at = lse_to[0] + token * lse_to[1] + query_head * lse_to[2]
        tl.store(lse_at, lse * LN_2, mask=exists & (i % C.value_dim == 0))


@triton.jit(do_not_specialize=["sinks", "value_factor"])
def join_parts(
    out_to, lse_to, items, shares, parts, starts, sinks, value_factor, value_scale,
    C: tl.constexpr,
):  # fmt: skip
    """Write the rows of every tile that was cut.

    Args:
        out_to, lse_to: pointer, and strides of token and head; lse's pointer may be None.
        items, shares: see ``plan_step``.
        parts: float32 [slots, kv_heads * columns, Dv] and [slots, kv_heads * columns], see
            ``decode_attend.attend_all``.
        starts: int32 [R + 1].
        sinks: float32 [Hq], or None.
        value_factor, value_scale: factors on the output: [1] or None; a number.
        C: the decode's variant.
    """
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    g = tl.program_id(0)
    item = items + tl.load(shares + 2 * g) * ITEM
    if tl.load(shares + 2 * g + 1) > 0:
        partial = tl.load(item + PARTIAL)
        if (partial >= 0) & (partial % 2 == 0):
            request = tl.load(item + REQUEST)
            unit = tl.load(item + UNIT)
            opener = tl.load(item + OPENER)
            closer = tl.load(item + CLOSER)
            start = tl.load(starts + request)
            factor = value_scale
            if value_factor is not None:
                factor *= tl.load(value_factor).to(tl.float32)
            SETS: tl.constexpr = C.all_kv_heads // C.kv_heads
            piece = unit // SETS
            own = piece // C.pieces * C.query_tokens
            left = tl.load(starts + request + 1) - start - own
            tile = (
                unit % SETS * C.kv_heads, piece % C.pieces * C.heads, start + own, left, opener,
                closer,
            )  # fmt: skip
            mine = g - opener - 1
            programs = closer - opener
            SIZE: tl.constexpr = C.kv_heads * C.columns * C.value_dim
            if programs == 1:
                for number in range(mine, tl.cdiv(SIZE, 1024), programs):
                    _join_slice(number, tile, out_to, lse_to, parts, sinks, factor, 2, 1024, C)
            elif programs < 16:
                for number in range(mine, tl.cdiv(SIZE, 256), programs):
                    _join_slice(number, tile, out_to, lse_to, parts, sinks, factor, 8, 256, C)
            else:
                for number in range(mine, tl.cdiv(SIZE, 32), programs):
                    _join_slice(number, tile, out_to, lse_to, parts, sinks, factor, 64, 32, C)
