"""One tile of query rows over a range of keys: what both attention kernels are made of.

A tile holds some tokens of one request, and for each of them query heads that share a kv head: row
i is token i // HEADS of the tile, head i % HEADS. Keys go by BLOCK at a time, numbered as they lie
in the request's pages, at multiples of BLOCK; what a row does not see is hidden by its score. So a
block that a row sees nothing of changes no bit of the row, and which other rows share a tile, or
where its keys begin, changes none either.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pageant.kernels.triton.attention_tile_keys import ROW_SCALES, places_of, rows_of
from pageant.kernels.triton.common.widen import BLOCKS_FACTOR, E2M1
from pageant.plan.on_device import held

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HALF_SHIFT = tl.constexpr(12)  # weights in float16 are 2 ** 12 as large: the small ones are normal
HALF_EXPONENT = tl.constexpr(13)  # of the largest element of a bfloat16 row that becomes float16
NON_CAUSAL, CAUSAL, CAUSAL_BY_REQUEST = (tl.constexpr(kind) for kind in range(3))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is compiled into a kernel; two that are equal share their code.

    Attributes:
        tokens, heads, rows: of a tile; rows is the next power of 2 of their product, 16 or more.
        block: keys at a time.
        group: query heads of a kv head.
        kv_heads: Hkv.
        page_size: tokens a page.
        dim, padded_dim, value_dim, padded_value_dim: D and Dv, and the next powers of 2.
        kind, native, scales, value_scales: how the cache stores elements and scales.
        dtype: of both products' operands.
        as_is: whether queries are of that type, and their scores' factor is known to be above 0.
        causal: NON_CAUSAL, CAUSAL, or CAUSAL_BY_REQUEST.
        draft_mask, window, cap, alibi: whether there are such.
        world: ranks that share the keys.
        in_parts: whether blocks that all rows see whole go by in a loop of their own.
        is_far: whether addresses in the cache take 64 bits.
    """

    tokens: int
    heads: int
    rows: int
    block: int
    group: int
    kv_heads: int
    page_size: int
    dim: int
    padded_dim: int
    value_dim: int
    padded_value_dim: int
    kind: int
    native: bool
    scales: int
    value_scales: int
    dtype: tl.dtype
    as_is: bool
    causal: int
    draft_mask: bool
    window: bool
    cap: bool
    alibi: bool
    world: int
    in_parts: bool
    is_far: bool


@triton.jit
def position_of(keys, shard, WORLD: tl.constexpr):
    """Where in the sequence the rank's keys stand; see ``ContextParallel.position``."""
    if WORLD == 1:
        return keys
    rank, interleave = shard
    return (keys // interleave * WORLD + rank) * interleave + keys % interleave


@triton.jit
def _tanh(x):
    """To float32's precision for arguments of any size."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x + x * square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315)))
    return tl.where(tl.abs(x) < 0.1, small, tl.where(x < 0, -large, large))


@triton.jit
def _walk(
    state,
    begin,
    end,
    q,
    factor,
    table,
    head,
    row,
    span,
    sides,
    cap,
    masks,
    shard,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Let the blocks of keys `begin` to `end` go by.

    Args:
        state: acc float32 [rows, Dv], peak and total float32 [rows], in powers of 2.
        begin, end: numbers of blocks.
        q: [rows, D].
        factor: float32 [rows], above 0: makes of q . k a score, as a power of 2.
        table: the request's page ids.
        head: kv head.
        row: of each row, its position, the last one it sees by its causality, its token (a row of
            the draft mask) and its slope.
        span: first_new (position of the request's first new token), num_new, low and high (keys
            of the rank that some row of the request sees), window.
        sides: keys and values, see `rows_of`.
        cap: of scores.
        masks: draft mask (or None) and its stride.
        shard: rank and interleave.
        C: the variant.
        MASKED: whether some row may not see some key of these blocks.

    Returns:
        The state after them.
    """
    BLOCK: tl.constexpr = C.block
    SHIFT: tl.constexpr = HALF_SHIFT if C.dtype == tl.float16 else 0
    # One explicit instruction makes of a score, capped or not, what exp2 takes: so loops with a
    # mask and without round alike. Slopes are added to scores before, likewise.
    unit = factor
    if C.cap:
        unit = tl.zeros_like(factor) + cap * LOG2_E
    acc, peak, total = state
    position, last, token, slope = row
    first_new, num_new, low, high, window = span
    for number in tl.range(begin, end):
        key = number * BLOCK + tl.arange(0, BLOCK)
        live = (key >= low) & (key < high) if C.window else key < high
        page, in_page = places_of(table, number, key, low, high, live, C, MASKED)
        k, k_scale = rows_of(
            sides[0],
            page,
            in_page,
            head,
            live,
            C.dim,
            C.padded_dim,
            C.kind,
            C.scales,
            C.native,
            MASKED,
            C.dtype,
        )
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if C.scales == ROW_SCALES:
            s = s * k_scale[None, :]
        at = position_of(key, shard, C.world)
        if C.cap:
            s = _tanh(s * (factor * (LN_2 / cap))[:, None])
        if C.alibi:
            bias = slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
            s = tl.fma(s, unit[:, None], bias)
        if MASKED:
            if C.draft_mask:
                column = at - first_new
                among = (column >= 0) & (column < num_new)
                mask_at = masks[0] + token.to(tl.int64)[:, None] * masks[1] + column[None, :]
                own = tl.load(mask_at, mask=(token >= 0)[:, None] & among[None, :], other=0)
                seen = live[None, :] & ((column < 0)[None, :] | (own != 0))
            elif C.causal != NON_CAUSAL:
                seen = at[None, :] <= last[:, None]
            else:
                seen = live[None, :]
            if C.window:
                seen = seen & (at[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            if C.draft_mask:
                live = live & (tl.max(seen.to(tl.int32), 0) > 0)
        highest = tl.max(s, 1)
        if not C.alibi:
            highest = highest * unit
        new_peak = tl.maximum(peak, highest - SHIFT)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if C.alibi:
            p = tl.exp2(s - base[:, None])
        else:
            p = tl.exp2(tl.fma(s, unit[:, None], -base[:, None]))
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(p, 1)
        v, v_scale = rows_of(
            sides[1],
            page,
            in_page,
            head,
            live,
            C.value_dim,
            C.padded_value_dim,
            C.kind,
            C.value_scales,
            C.native,
            MASKED,
            C.dtype,
        )
        if C.value_scales == ROW_SCALES:
            # A weight times a scale may leave float16's range, and prefills lack the registers.
            if C.dtype == tl.float16 or C.in_parts:
                v = (v.to(tl.float32) * v_scale[:, None]).to(C.dtype)
            else:
                p = p * v_scale[None, :]
        acc = tl.dot(p.to(C.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _as_operand(q, factor, C: tl.constexpr):
    """Rows of q in the products' type, and the factors [rows] that make up for it.

    Factors become positive, or 1 for rows of 0: then the largest product is the largest score. A
    row of bfloat16 becomes float16 by a power of 2 that leaves its largest element below 2 ** 14;
    what this rounds is 2 ** -28 of that or less. What needs none of this stays in shared memory,
    where wgmma takes it from.
    """
    ROWS: tl.constexpr = C.rows
    if C.as_is:
        return q, tl.zeros([ROWS], tl.float32) + factor
    sign = tl.where(factor == 0, 0.0, tl.where(factor < 0, -1.0, 1.0))
    wide = q.to(tl.float32) * sign
    factor = tl.where(factor == 0, 1.0, factor * sign) + tl.zeros([ROWS], tl.float32)
    if C.dtype == tl.float16 and q.dtype != tl.float16:
        bits = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23
        bits = tl.maximum(bits, 64)  # exponent + 127
        wide *= ((254 - bits + HALF_EXPONENT) << 23).to(tl.float32, bitcast=True)[:, None]
        factor *= ((bits - HALF_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return wide.to(C.dtype), factor


@triton.jit
def attend(
    request,
    head,
    first_head,
    first_token,
    begin,
    end,
    q,
    starts,
    lens,
    pages,
    sides,
    causal,
    masks,
    slopes,
    numbers,
    factors,
    shard,
    gathered,
    C: tl.constexpr,
):
    """The rows of a tile over blocks `begin` to `end`.

    Loops over blocks that may hide keys take one step at least, as ptxas 12.8 gives wrong results
    for some that take none: of blocks past the end, no row sees anything.

    Args:
        request, head: whose rows, over which kv head.
        first_head: of the tile, within the group.
        first_token: of the tile, within the request's new tokens.
        begin, end: numbers of blocks; see `blocks_of`.
        q: pointer, and strides of token and head.
        starts, lens: int32 [R + 1] and [R]: first tokens and key counts.
        pages: page table and its stride.
        sides: keys and values, see `rows_of`.
        causal: bool [R], or None.
        masks: draft mask bool [T, M] (or None) and its stride.
        slopes: float32 [Hq], or None.
        numbers: factor on scores, cap, window.
        factors: further factors on scores, [1] each, or None: of queries, of keys.
        shard: rank and interleave.
        gathered: int32 [rows] twice, token and position of each row the requests hold; every row
            then sees every key of these blocks. Or None.
        C: the variant.

    Returns:
        out float32 [rows, Dv], normalised; lse float32 [rows], a power of 2; of each row, its token
        in the batch or its gathered row (int64), its query head, and whether there is such a row.
    """
    ROWS: tl.constexpr = C.rows
    HEADS: tl.constexpr = C.heads
    BLOCK: tl.constexpr = C.block
    PADDED: tl.constexpr = C.padded_dim
    VALUES: tl.constexpr = C.padded_value_dim
    start = tl.load(starts + request)
    num_new = tl.load(starts + request + 1) - start
    n = tl.load(lens + request)
    first_new = n - num_new
    i = tl.arange(0, ROWS)
    own = first_token + i // HEADS
    query_head = head * C.group + first_head + i % HEADS
    exists = (i < C.tokens * HEADS) & (own < num_new) & (first_head + i % HEADS < C.group)
    token = (start + own).to(tl.int64)
    source = token
    if gathered is not None:
        source = tl.load(gathered[0] + token, mask=exists, other=0).to(tl.int64)
    d = tl.arange(0, PADDED)
    q_at = q[0] + (source * q[1] + query_head * q[2])[:, None] + d[None, :]
    query = tl.load(q_at, mask=exists[:, None] & (d < C.dim)[None, :], other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + query_head, mask=exists, other=0.0) * LOG2_E
    score, cap, window = numbers
    if factors[0] is not None:
        score *= tl.load(factors[0]).to(tl.float32)
    if factors[1] is not None:
        score *= tl.load(factors[1]).to(tl.float32)
    if C.kind == E2M1:
        score *= BLOCKS_FACTOR
    query, factor = _as_operand(query, score * LOG2_E, C)
    is_causal = 1
    if C.causal == CAUSAL_BY_REQUEST:
        is_causal = tl.load(causal + request).to(tl.int32)
    low = 0
    if C.window:
        low = held(tl.maximum(first_new - window + 1, 0), shard, C.world)
    high = held(n, shard, C.world)
    table = pages[0] + request.to(tl.int64) * pages[1]
    position = first_new + own
    if gathered is not None:
        position = tl.load(gathered[1] + token, mask=exists, other=0)
    last = tl.where(is_causal != 0, position, n - 1)
    masked_row = tl.where(exists, start + own, -1)
    row = (position, last, masked_row, slope)
    span = (first_new, num_new, low, high, window)
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    state = (acc, peak, total)
    if gathered is not None:
        acc, peak, total = _walk(
            state, begin, end, query, factor, table, head, row, span, sides, cap, masks, shard, C,
            False,
        )  # fmt: skip
    elif C.in_parts:
        last_token = tl.minimum(first_token + C.tokens, num_new) - 1
        whole = high
        if C.draft_mask:
            whole = held(tl.maximum(first_new, 0), shard, C.world)
        elif C.causal != NON_CAUSAL:
            whole = held(tl.maximum(first_new + first_token + 1, 0), shard, C.world)
            whole = tl.where(is_causal != 0, tl.minimum(whole, high), high)
        middle = begin
        if C.window:
            first = held(tl.maximum(first_new + last_token - window + 1, 0), shard, C.world)
            middle = tl.maximum((first + BLOCK - 1) // BLOCK, begin + 1)
            state = _walk(
                state, begin, middle, query, factor, table, head, row, span, sides, cap, masks,
                shard, C, True,
            )  # fmt: skip
        masked = tl.maximum(whole // BLOCK, middle)
        state = _walk(
            state, middle, masked, query, factor, table, head, row, span, sides, cap, masks, shard,
            C, False,
        )  # fmt: skip
        acc, peak, total = _walk(
            state, masked, tl.maximum(end, masked + 1), query, factor, table, head, row, span,
            sides, cap, masks, shard, C, True,
        )  # fmt: skip
    else:
        acc, peak, total = _walk(
            state, begin, tl.maximum(end, begin + 1), query, factor, table, head, row, span, sides,
            cap, masks, shard, C, True,
        )  # fmt: skip
    share = 1.0 / tl.where(total > 0, total, 1.0)
    if C.kind == E2M1:
        share *= BLOCKS_FACTOR
    out = acc * share[:, None]
    out = tl.where((peak == float("-inf"))[:, None], 0.0, out)
    lse = tl.where(peak == float("-inf"), peak, peak + tl.log2(total))
    return out, lse, token, query_head, exists


@triton.jit
def finish(
    out,
    lse,
    token,
    query_head,
    exists,
    sinks,
    value_scale,
    value_factor,
    out_to,
    lse_to,
    C: tl.constexpr,
):
    """Store finished rows: the sink joins, the scale of values multiplies.

    Args:
        out, lse, token, query_head, exists: as `attend` returns them.
        sinks: float32 [Hq], or None.
        value_scale, value_factor: factors on the output: a number; [1] or None.
        out_to, lse_to: pointer, and strides of token and head; lse's pointer may be None.
        C: the variant.
    """
    VALUES: tl.constexpr = C.padded_value_dim
    factor = value_scale
    if value_factor is not None:
        factor *= tl.load(value_factor).to(tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + query_head, mask=exists, other=0.0) * LOG2_E
        out = out / (1.0 + tl.exp2(sink - lse))[:, None]
        out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
    d = tl.arange(0, VALUES)
    at = out_to[0] + (token * out_to[1] + query_head * out_to[2])[:, None] + d[None, :]
    inside = exists[:, None] & (d < C.value_dim)[None, :]
    tl.store(at, (out * factor).to(out_to[0].dtype.element_ty), mask=inside)
    if lse_to[0] is not None:
        tl.store(lse_to[0] + token * lse_to[1] + query_head * lse_to[2], lse * LN_2, mask=exists)


@triton.jit
def blocks_of(request, first_token, starts, lens, window, causal, shard, C: tl.constexpr):
    """Numbers of the first and after the last block that a tile's rows can see anything of."""
    BLOCK: tl.constexpr = C.block
    num_new = tl.load(starts + request + 1) - tl.load(starts + request)
    n = tl.load(lens + request)
    end = n
    if C.causal != NON_CAUSAL and not C.draft_mask:
        reach = tl.minimum(first_token + C.tokens, num_new) + n - num_new
        end = tl.minimum(tl.maximum(reach, 0), n)
        if C.causal == CAUSAL_BY_REQUEST:
            end = tl.where(tl.load(causal + request) != 0, end, n)
    begin = 0
    if C.window:
        begin = tl.maximum(n - num_new + first_token - window + 1, 0)
    begin = held(tl.minimum(begin, end), shard, C.world) // BLOCK
    return begin, (held(end, shard, C.world) + BLOCK - 1) // BLOCK
