"""What the warps of a Gluon decode compute, each for one kv head.

Operands are swapped: scores are keys times queries, [tokens, columns], and the output is values
times weights, [elements, columns], so a softmax over tokens stays within a warp, and the keys, of
which there are many, fill the side of the product that cannot be small. A column is a token and a
query head of its group: column c is token c // HEADS of the tile, head c % HEADS of it.

A program's tiles follow each other through one ring of stages: while the last keys of a tile are
multiplied, the first of the next are under way. A stage holds `tokens` keys and values for each
warp. Where fewer kv heads than warps are computed together, warps share a head: each takes its part
of every stage's tokens, and in the end their results are folded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pageant.kernels.gluon.common.variant import (
    BLOCK_SCALES,
    CAUSAL,
    CAUSAL_BY_REQUEST,
    ROW_SCALES,
    held,
    next_stage,
    place,
    position_of,
    range_of,
)
from pageant.kernels.gluon.common.widen import (
    E2M1_FACTOR,
    PLAIN,
    element_of,
    widen_keys,
    widen_two,
    widen_values,
)
from pageant.kernels.gluon.decode_attend_rows import LOG2_E, LOWEST, finish, joined, store_all
from pageant.plan.on_device import CLOSER, ITEM, OPENER, PARTIAL, REQUEST, UNIT

TURN = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.jit
def _tanh(x):
    """To float32's precision for arguments of any size."""
    e = gl.exp2(gl.abs(x) * (-2.0 * LOG2_E))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    small = x + x * square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315)))
    return gl.where(gl.abs(x) < 0.1, small, gl.where(x < 0, -large, large))


@gluon.jit
def _query(
    q, source, query_head, exists, PLANE: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr
):
    """One plane of the queries, model dtype [warps, words, columns].

    Args:
        q: pointer, and strides of token and head.
        source, query_head, exists: of each warp's columns [warps, columns], in a slice of LAYOUT.
    """
    INNER: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    word = gl.expand_dims(gl.expand_dims(gl.arange(0, C.words, layout=INNER), 0), 2)
    element = element_of(word, PLANE, C.planes)
    at = gl.expand_dims(source * q[1] + query_head * q[2], 1) + element
    inside = gl.expand_dims(exists, 1) & (element < C.dim)
    return gl.load(q[0] + at, mask=inside, other=0.0)


@gluon.jit
def _columns(
    LAYOUT: gl.constexpr, head, first_head, first_token, num_new, GROUPS: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Of each warp's columns [warps, columns]: token of the request, query head, is there one.

    Args:
        LAYOUT: of the results.
        head, first_head, first_token: see `place`.
        num_new: tokens of the request.
        GROUPS: warps that share a head; 1 where their results are folded.
        C: the variant.
    """
    warp = gl.arange(0, C.kv_heads * GROUPS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, C.columns, layout=gl.SliceLayout(0, LAYOUT))
    in_group = first_head + column % C.heads
    own = first_token + column // C.heads
    exists = (column < C.query_tokens * C.heads) & (own < num_new) & (in_group < C.group)
    query_head = gl.expand_dims((head + warp // GROUPS) * C.group, 1)
    query_head = query_head + gl.expand_dims(in_group, 0)
    own = gl.expand_dims(own, 0) + gl.expand_dims(warp * 0, 1)
    exists = gl.expand_dims(exists, 0) & (gl.expand_dims(warp, 1) >= 0)
    return own, query_head, exists


@gluon.jit
def _exponents(top):
    """Powers of two that bring float32 magnitudes below 2, and their inverses."""
    exponent = (top.to(gl.int32, bitcast=True) >> 23) & 255
    exponent = gl.minimum(gl.maximum(exponent, 1), 253)
    down = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return down, (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _turned(p, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Weights [warps, tokens, columns] as the second operand; 8 x 8 of them are transposed."""
    x = gl.inline_asm_elementwise(TURN, "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2)
    x = x.reshape([C.warps, C.tokens // 8, 8, C.columns // 8, 8]).permute((0, 1, 4, 3, 2))
    return gl.convert_layout(x.reshape([C.warps, C.tokens, C.columns]), LAYOUT)


@gluon.jit
def _seen(at, live, columns, span, masks, C: gl.constexpr):
    """Which keys each column sees, int1 [warps, tokens, columns].

    Args:
        at: positions of the keys, int32 [warps, tokens, 1].
        live: whether any row of the request may see them, likewise.
        columns: of each, its position, and its row of the draft mask or -1, [warps, 1, columns].
        span: first_new, num_new, is_causal, window: see `attend`.
        masks: draft mask (or None), and its stride.
    """
    position, row = columns
    first_new, num_new, is_causal, window = span
    seen = gl.broadcast(live, position)[0]
    if C.draft_mask:
        column = at - first_new
        among = live & (column >= 0) & (column < num_new)
        mask_at = masks[0] + row.to(gl.int64) * masks[1] + column
        own = gl.load(mask_at, mask=(row >= 0) & among, other=0)
        seen = live & ((column < 0) | (own != 0))
    elif C.causal == CAUSAL:
        seen = live & (at <= position)
    elif C.causal == CAUSAL_BY_REQUEST:
        seen = live & ((at <= position) | (is_causal == 0))
    if C.window:
        seen = seen & (at > position - window)
    return seen


@gluon.jit
def _products(
    stage, views, q0, q1, q2, q3, SCORES: gl.constexpr, LEFT: gl.constexpr, C: gl.constexpr
):
    """Keys of a stage times queries, float32 [warps, tokens, columns]."""
    s = gl.full([C.warps, C.tokens, C.columns], 0.0, gl.float32, layout=SCORES)
    if C.stores_queries:
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
        q0 = views[4].index(0).permute((0, 2, 1)).load(RIGHT)
        if C.planes >= 2:
            q1 = views[4].index(1).permute((0, 2, 1)).load(RIGHT)
        if C.planes == 4:
            q2 = views[4].index(2).permute((0, 2, 1)).load(RIGHT)
            q3 = views[4].index(3).permute((0, 2, 1)).load(RIGHT)
    k = views[0].index(stage).load(LEFT)
    if C.planes == 1:
        s = mma_v2(k, q0, s)
    elif C.planes == 2:
        k0, k1 = widen_two(k, C.kind, True)
        s = mma_v2(k0, q0, s)
        s = mma_v2(k1, q1, s)
    else:
        k0, k1, k2, k3 = widen_keys(k, views[2].index(stage), C.blocks)
        s = mma_v2(k0, q0, s)
        s = mma_v2(k1, q1, s)
        s = mma_v2(k2, q2, s)
        s = mma_v2(k3, q3, s)
    return s


@gluon.jit
def _clear(rows, live, LAYOUT: gl.constexpr):
    """Make rows of tokens that are not live 0, for a weight of 0 times NaN would be NaN.

    In shared memory, as few blocks hide any: choosing among values would cost all of them.

    Args:
        rows: shared memory [warps, tokens, words].
        live: int1 [warps, tokens].
        LAYOUT: of rows in registers.
    """
    x = rows.load(LAYOUT)
    kept = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(2, LAYOUT)), 2)
    rows.store(gl.where(gl.broadcast(kept, x)[0], x, gl.full(x.shape, 0, x.dtype, layout=LAYOUT)))


@gluon.jit
def _add_values(stage, views, p, o0, o1, o2, o3, LEFT: gl.constexpr, C: gl.constexpr):
    """Values of a stage times weights, added to the planes of the output.

    Args:
        stage: whose.
        views: shared memory of keys, values and their scales.
        p: weights, [warps, tokens, columns], as second operand.
        o0, o1, o2, o3: float32 [warps, words, columns].
    """
    v = views[1].index(stage).permute((0, 2, 1)).load(LEFT)
    if C.planes == 1:
        o0 = mma_v2(v, p, o0)
    elif C.planes == 2:
        v0, v1 = widen_two(v, C.kind, False)
        o0 = mma_v2(v0, p, o0)
        o1 = mma_v2(v1, p, o1)
    else:
        v0, v1, v2, v3 = widen_values(v, views[3].index(stage).permute((0, 2, 1)), C.value_blocks)
        o0 = mma_v2(v0, p, o0)
        o1 = mma_v2(v1, p, o1)
        o2 = mma_v2(v2, p, o2)
        o3 = mma_v2(v3, p, o3)
    return o0, o1, o2, o3


@gluon.jit
def attend(
    views, full, empty, stage, phase, request, head, first_head, first_token, begin, end, q, starts,
    lens, causal, masks, slopes, numbers, factors, shard, C: gl.constexpr,
):  # fmt: skip
    """A tile over blocks `begin` to `end`, as they come.

    Args:
        views: shared memory of keys, values and their scales, [stages, warps, tokens, ..]; of
            queries, [planes, warps, columns, words], if stored.
        full, empty, stage, phase: the ring, and where it stands.
        request, head, first_head, first_token: whose, see `place`.
        begin, end: numbers of blocks.
        q: pointer, and strides of token and head.
        starts, lens: int32 [R + 1] and [R]: first tokens and key counts.
        causal: bool [R], or None.
        masks: draft mask bool [T, M] (or None) and its stride.
        slopes: float32 [Hq], or None.
        numbers: factor on scores, cap, window.
        factors: further factors on scores, [1] each, or None: of queries, of keys.
        shard: rank and interleave.
        C: the variant.

    Returns:
        Planes float32 [warps, words, columns], sums of weighted values; peak and total float32
        [warps, columns], of scores in powers of 2; where the ring stands.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [C.warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(1, SCORES)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [C.warps, 1, 1], [2, 1, 0])
    start = gl.load(starts + request)
    num_new = gl.load(starts + request + 1) - start
    n = gl.load(lens + request)
    first_new = n - num_new
    score, cap, window = numbers
    if factors[0] is not None:
        score *= gl.load(factors[0]).to(gl.float32)
    if factors[1] is not None:
        score *= gl.load(factors[1]).to(gl.float32)
    if C.planes == 4:
        score *= E2M1_FACTOR
    own, query_head, exists = _columns(
        gl.SliceLayout(1, RIGHT), head, first_head, first_token, num_new, C.groups, C
    )
    source = (start + own).to(gl.int64)
    q0 = _query(q, source, query_head, exists, 0, RIGHT, C)
    q1, q2, q3 = q0, q0, q0
    factor = gl.full([C.warps, 1, C.columns], 1.0, gl.float32, layout=SCORES) * score
    if C.kind != PLAIN:
        # Rows may exceed what a float16 holds; powers of two cost no accuracy.
        q1 = _query(q, source, query_head, exists, 1, RIGHT, C)
        top = gl.maximum(gl.max(gl.abs(q0.to(gl.float32)), 1), gl.max(gl.abs(q1.to(gl.float32)), 1))
        if C.planes == 4:
            q2 = _query(q, source, query_head, exists, 2, RIGHT, C)
            q3 = _query(q, source, query_head, exists, 3, RIGHT, C)
            top = gl.maximum(top, gl.max(gl.abs(q2.to(gl.float32)), 1))
            top = gl.maximum(top, gl.max(gl.abs(q3.to(gl.float32)), 1))
        down, up = _exponents(top)
        down = gl.expand_dims(down, 1)
        q0 = (q0.to(gl.float32) * down).to(C.dtype)
        q1 = (q1.to(gl.float32) * down).to(C.dtype)
        if C.planes == 4:
            q2 = (q2.to(gl.float32) * down).to(C.dtype)
            q3 = (q3.to(gl.float32) * down).to(C.dtype)
        factor = factor * gl.expand_dims(gl.convert_layout(up, BY_COLUMN), 1)
    if C.stores_queries:
        gl.thread_barrier()  # all warps are done with those of the tile before
        views[4].index(0).permute((0, 2, 1)).store(q0)
        if C.planes >= 2:
            views[4].index(1).permute((0, 2, 1)).store(q1)
        if C.planes == 4:
            views[4].index(2).permute((0, 2, 1)).store(q2)
            views[4].index(3).permute((0, 2, 1)).store(q3)
        gl.thread_barrier()
    own, query_head, exists = _columns(
        BY_COLUMN, head, first_head, first_token, num_new, C.groups, C
    )
    slope = gl.full([C.warps, 1, C.columns], 0.0, gl.float32, layout=SCORES)
    if C.alibi:
        slope = gl.load(slopes + query_head, mask=exists, other=0.0)
        slope = gl.expand_dims(slope, 1) * LOG2_E
    position = gl.expand_dims(first_new + own, 1)
    row = gl.expand_dims(gl.where(exists, start + own, -1), 1)
    is_causal = 1
    if C.causal == CAUSAL_BY_REQUEST:
        is_causal = gl.load(causal + request).to(gl.int32)
    high = held(n, shard, C.world)
    low = 0
    if C.window:
        low = held(gl.maximum(first_new - window + 1, 0), shard, C.world)
    surely = high  # keys before this one and from `low` on are seen by some row
    if C.draft_mask:
        surely = held(gl.maximum(first_new, 0), shard, C.world)
    token = gl.arange(0, C.tokens, layout=gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))
    warp = gl.arange(0, C.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))
    offset = gl.expand_dims(warp % C.groups * C.tokens, 1) + gl.expand_dims(token, 0)
    peak = gl.full([C.warps, C.columns], LOWEST, gl.float32, layout=BY_COLUMN)
    sums = gl.full([C.warps, C.tokens, C.columns], 0.0, gl.float32, layout=SCORES)
    o0 = gl.full([C.warps, C.value_words, C.columns], 0.0, gl.float32, layout=SCORES)
    o1, o2, o3 = o0, o0, o0
    for block in range(begin, end):
        key = offset + block * C.block
        live = (key >= low) & (key < high)
        mbarrier.wait(full.index(stage), phase)
        s = _products(stage, views, q0, q1, q2, q3, SCORES, LEFT, C)
        if C.scales == ROW_SCALES:
            s = s * gl.expand_dims(views[2].index(stage).load(gl.SliceLayout(2, SCORES)), 2)
        if C.cap:
            s = (cap * LOG2_E) * _tanh(s * (factor / cap))
        else:
            s = s * (factor * LOG2_E)
        at = gl.expand_dims(position_of(key, shard, C.world), 2)
        if C.alibi:
            s += slope * (at - position).to(gl.float32)
        span = (first_new, num_new, is_causal, window)
        seen = _seen(at, gl.expand_dims(live, 2), (position, row), span, masks, C)
        s = gl.where(seen, s, float("-inf"))
        weighted = s
        if C.scales == ROW_SCALES:
            # Weights are taken relative to the largest with its value's scale, so that none of
            # them leaves float16's range.
            v_scale = views[3].index(stage).load(gl.SliceLayout(2, SCORES))
            size = gl.where(live, gl.maximum(gl.log2(v_scale), -100.0), -100.0)
            weighted = s + gl.expand_dims(size, 2)
        new_peak = gl.maximum(peak, gl.max(weighted, 1))
        base = gl.expand_dims(new_peak, 1)
        decay = gl.expand_dims(gl.exp2(peak - new_peak), 1)
        p = gl.exp2(weighted - base)
        if C.scales == ROW_SCALES:
            sums = sums * decay + gl.exp2(s - base)
        else:
            sums = sums * decay + p
        peak = new_peak
        o0 = o0 * decay
        if C.planes >= 2:
            o1 = o1 * decay
        if C.planes == 4:
            o2 = o2 * decay
            o3 = o3 * decay
        if (block * C.block < low) | (block * C.block + C.block > surely):
            if C.draft_mask:
                live = live & (gl.max(seen.to(gl.int32), 2) > 0)
            if C.scales == BLOCK_SCALES:
                _clear(views[3].index(stage), live, WORDS)
            else:
                _clear(views[1].index(stage), live, WORDS)
            fence_async_shared()
            gl.thread_barrier()
        turned = _turned(p.to(C.dtype), RIGHT, C)
        o0, o1, o2, o3 = _add_values(stage, views, turned, o0, o1, o2, o3, LEFT, C)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, C.stages)
    return o0, o1, o2, o3, peak, gl.sum(sums, 1), stage, phase


@gluon.jit
def _folded(o0, o1, o2, o3, peak, total, C: gl.constexpr):
    """Results of the warps that share a head, made one: all have kv_heads in place of warps."""
    if C.groups > 1:
        BY_COLUMN: gl.constexpr = peak.type.layout
        peaks = peak.reshape([C.kv_heads, C.groups, C.columns])
        highest = gl.expand_dims(gl.max(peaks, 1), 1)
        weight = gl.exp2(peaks - highest).reshape([C.warps, C.columns])
        weight = gl.convert_layout(weight, BY_COLUMN)
        peak = gl.max(peaks, 1)
        total = gl.sum((total * weight).reshape([C.kv_heads, C.groups, C.columns]), 1)
        weight = gl.expand_dims(weight, 1)
        o0 = _sum_of_groups(o0 * weight, C)
        if C.planes == 1:
            o1, o2, o3 = o0, o0, o0
        else:
            o1 = _sum_of_groups(o1 * weight, C)
            if C.planes == 4:
                o2 = _sum_of_groups(o2 * weight, C)
                o3 = _sum_of_groups(o3 * weight, C)
            else:
                o2, o3 = o0, o0
    return o0, o1, o2, o3, peak, total


@gluon.jit
def _sum_of_groups(x, C: gl.constexpr):
    return gl.sum(x.reshape([C.kv_heads, C.groups, C.value_words, C.columns]), 1)


@gluon.jit
def attend_all(
    views, full, empty, q, out_to, lse_to, work, joins, parts, starts, lens, causal, masks, slopes,
    sinks, numbers, factors, value_scale, value_factor, shard, C: gl.constexpr,
):  # fmt: skip
    """Attend to a share's tiles, in order; leave finished rows, or a tile's part.

    Args:
        out_to, lse_to: pointer, and strides of token and head; lse's pointer may be None.
        work: items, shares and arrivals, see ``plan_step``.
        joins: whether, of the programs that leave parts of a tile, the last one joins them.
        parts: float32 [slots, kv_heads * columns, Dv] and [slots, kv_heads * columns]: rows
            divided by their total, and logarithms to base 2 of those.
        sinks: float32 [Hq], or None.
        value_scale, value_factor: factors on the output: a number; [1] or None.
        views .. C: see `attend`.
    """
    items, shares, arrivals = work
    g = gl.program_id(0)
    first = gl.load(shares + 2 * g)
    count = gl.load(shares + 2 * g + 1)
    stage = 0
    phase = 0
    for number in range(first, first + count):
        item = items + number * ITEM
        request = gl.load(item + REQUEST)
        partial = gl.load(item + PARTIAL)
        head, first_head, first_token = place(gl.load(item + UNIT), C)
        begin, end = range_of(item)
        o0, o1, o2, o3, peak, total, stage, phase = attend(
            views, full, empty, stage, phase, request, head, first_head, first_token, begin, end,
            q, starts, lens, causal, masks, slopes, numbers, factors, shard, C,
        )  # fmt: skip
        o0, o1, o2, o3, peak, total = _folded(o0, o1, o2, o3, peak, total, C)
        BY_COLUMN: gl.constexpr = gl.SliceLayout(1, o0.type.layout)
        peak = gl.convert_layout(peak, BY_COLUMN)
        total = gl.convert_layout(total, BY_COLUMN)
        start = gl.load(starts + request)
        num_new = gl.load(starts + request + 1) - start
        own, query_head, exists = _columns(BY_COLUMN, head, first_head, first_token, num_new, 1, C)
        lse = gl.where(total > 0, peak + gl.log2(total), float("-inf"))
        factor = gl.where(total > 0, 1.0 / total, 0.0)
        if C.planes == 4:
            factor = factor * E2M1_FACTOR
        token = (start + own).to(gl.int64)
        if partial < 0:
            finish(
                o0, o1, o2, o3, factor, lse, token, query_head, exists, sinks, value_scale,
                value_factor, out_to, lse_to, C,
            )  # fmt: skip
        else:
            of_head = gl.arange(0, C.kv_heads, layout=gl.SliceLayout(1, BY_COLUMN))
            column = gl.arange(0, C.columns, layout=gl.SliceLayout(0, BY_COLUMN))
            line = gl.expand_dims(of_head * C.columns, 1) + gl.expand_dims(column, 0)
            line = line.to(gl.int64)
            part_line = line + partial.to(gl.int64) * (C.kv_heads * C.columns)
            store_all(o0, o1, o2, o3, factor, parts[0] + part_line * C.value_dim, exists, C)
            gl.store(parts[1] + part_line, lse, mask=exists)
            if joins != 0:
                opener = gl.load(item + OPENER)
                closer = gl.load(item + CLOSER)
                gl.thread_barrier()  # all threads have stored
                arrived = gl.atomic_add(arrivals + opener, 1, sem="acq_rel")
                if arrived == closer - opener:
                    gl.store(arrivals + opener, 0)
                    o0, o1, o2, o3, peak, total = joined(
                        o0, o1, o2, o3, line, exists, parts, opener, closer, C
                    )
                    lse = gl.where(total > 0, peak + gl.log2(total), float("-inf"))
                    factor = gl.where(total > 0, 1.0 / total, 0.0)
                    finish(
                        o0, o1, o2, o3, factor, lse, token, query_head, exists, sinks, value_scale,
                        value_factor, out_to, lse_to, C,
                    )  # fmt: skip
