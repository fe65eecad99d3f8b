"""Tiles whose keys several shares hold, made of their parts; plain Triton, launched after a decode.

Programs (g, ..) take part where a tile goes on into share g from the one before: of all programs of
that kind, each folds all parts of some rows of the tile. What they wait for is memory, so there are
several for each share, and each has all it reads under way at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from pageant.plan.on_device import CLOSER, ITEM, OPENER, PARTIAL, REQUEST, UNIT

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _join_slices(
    first, step, tile, out_to, lse_to, parts, sinks, factor,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Slices `first`, `first + step` and on of a tile: ROWS rows, of each WIDTH elements.

    Args:
        first, step: which slices.
        tile: first kv head, first query head in a group, first token in the batch, tokens from
            there, first and last share.
        out_to, lse_to, parts, sinks: see `join_parts`.
        factor: on the output.
        PARTS: folded at a time.
        ROWS, WIDTH: of a slice, powers of 2.
        C: the decode's variant.
    """
    head, first_head, first_token, num_tokens, opener, closer = tile
    part_out, part_lse = parts
    LINES: tl.constexpr = C.kv_heads * C.columns  # of a part: columns of every kv head
    LIVE: tl.constexpr = C.query_tokens * C.heads  # columns that may be rows
    ACROSS: tl.constexpr = (C.value_dim + WIDTH - 1) // WIDTH
    SLICES: tl.constexpr = (C.kv_heads * LIVE + ROWS - 1) // ROWS * ACROSS
    for number in range(first, SLICES, step):
        row = number // ACROSS * ROWS + tl.arange(0, ROWS)
        d = number % ACROSS * WIDTH + tl.arange(0, WIDTH)
        own = row % LIVE // C.heads
        in_group = first_head + row % LIVE % C.heads
        exists = (row < C.kv_heads * LIVE) & (own < num_tokens) & (in_group < C.group)
        line = row // LIVE * C.columns + row % LIVE
        inside = exists[:, None] & (d < C.value_dim)[None, :]
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(opener, closer + 1, PARTS):
            share = begin + tl.arange(0, PARTS)
            slot = (2 * share + (share == opener).to(tl.int32)).to(tl.int64)
            lines = slot[:, None] * LINES + line[None, :]
            there = (share <= closer)[:, None] & exists[None, :]
            lse = tl.load(part_lse + lines, mask=there, other=float("-inf"), cache_modifier=".cg")
            out = tl.load(
                part_out + (lines * C.value_dim)[:, :, None] + d[None, None, :],
                mask=(share <= closer)[:, None, None] & inside[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2(peak - base)
            weight = tl.exp2(lse - base[None, :])
            acc = acc * decay[:, None] + tl.sum(out * weight[:, :, None], 0)
            total = total * decay + tl.sum(weight, 0)
            peak = new_peak
        lse = tl.where(total > 0, peak + tl.log2(total), float("-inf"))
        query_head = (head + row // LIVE) * C.group + in_group
        scale = tl.where(total > 0, factor / total, 0.0)
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=exists, other=0.0) * LOG2_E
            scale = scale / (1.0 + tl.exp2(sink - lse))
        token = (first_token + own).to(tl.int64)
        at = out_to[0] + (token * out_to[1] + query_head * out_to[2])[:, None] + d[None, :]
        tl.store(at, (acc * scale[:, None]).to(out_to[0].dtype.element_ty), mask=inside)
        if lse_to[0] is not None:
            lse_at = lse_to[0] + token * lse_to[1] + query_head * lse_to[2]
            tl.store(lse_at, lse * LN_2, mask=exists & (number % ACROSS == 0))


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
    g = tl.program_id(0)
    # Lists are older than the decode that this waits for.
    item = items + tl.load(shares + 2 * g) * ITEM
    count = tl.load(shares + 2 * g + 1)
    partial = tl.load(item + PARTIAL)
    request = tl.load(item + REQUEST)
    unit = tl.load(item + UNIT)
    opener = tl.load(item + OPENER)
    closer = tl.load(item + CLOSER)
    cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    if (count > 0) & (partial >= 0) & (partial % 2 == 0):
        start = tl.load(starts + request)
        factor = value_scale
        if value_factor is not None:
            factor *= tl.load(value_factor).to(tl.float32)
        SETS: tl.constexpr = C.all_kv_heads // C.kv_heads
        piece = unit // SETS
        own = piece // C.pieces * C.query_tokens
        left = tl.load(starts + request + 1) - start - own
        tile = (
            unit % SETS * C.kv_heads, piece % C.pieces * C.heads, start + own, left, opener, closer,
        )  # fmt: skip
        beside = tl.num_programs(1)
        mine = (g - opener - 1) * beside + tl.program_id(1)
        step = (closer - opener) * beside
        WIDTH: tl.constexpr = C.padded_value_dim if C.padded_value_dim < 128 else 128
        ROWS: tl.constexpr = 1024 // WIDTH
        if step < 4 * beside:
            _join_slices(mine, step, tile, out_to, lse_to, parts, sinks, factor, 4, ROWS, WIDTH, C)
        elif step < 16 * beside:
            _join_slices(
                mine, step, tile, out_to, lse_to, parts, sinks, factor, 16, ROWS // 4, WIDTH, C
            )
        else:
            _join_slices(mine, step, tile, out_to, lse_to, parts, sinks, factor, 256, 1, 16, C)
