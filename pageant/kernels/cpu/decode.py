"""Decode on the CPU: few query rows a request, each page read once, in the order it lies in memory.

For row i of a request with m new tokens and n keys, at position p = n - m + i, and query head h:

    s_j = score_scale * (q . k_j);  s = cap * tanh(s / cap);  s = s + slope_h * (j - p);  mask
    out = value_scale * sum_j e^(s_j - max) v_j / sum_j e^(s_j - max);  lse = max + ln sum

An item of the work list is one request's rows and a range of its keys. Keys go by in tiles of
KEY_TILE: the scores of every head, the softmax, then the values. Within a tile, BLOCK rows of K (or
V) at a time are widened into a float32 buffer and used by all rows that share the head, so the
cache is read once whatever the group. Blocks follow memory, heads inside tokens where a token's
heads lie together and tokens inside heads otherwise, and are asked for AHEAD of their use. An item
that is a part of a request leaves a normalised part and its lse in the workspace; `_merge` folds
the parts in ascending order. The sink enters once, when a row is finished.

Layout: a cache is a flat array of its storage type and 64-bit strides, so all strides work and only
three variants are compiled: uint8, uint16 and float32 storage. Everything compiled is in this file:
numba's cache on disk notices no change in another.

Limits: unit content stride; element formats that are floats without stored scales; a work list
names consecutive requests.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from pageant.cache.formats import Format
from pageant.kernels.call import AttentionCall
from pageant.kernels.cpu.common import Array, as_float32, copy, flat, float32_rows, run_shares
from pageant.plan.work import KEY_BEGIN, KEY_END, PARTIAL, QUERY_BEGIN, QUERY_END, REQUEST

KEY_TILE = 64  # keys of one softmax step
BLOCK = 4  # rows of K or V widened together
AHEAD = 2  # blocks of one head whose loading starts early
LANES = 16  # buffers are padded to whole vectors of this many floats
THREAD_READS = 1 << 22  # elements of K and V; below, torch threads still spinning eat the gain
PIECES = 4  # of the work, for each thread
UNBOUNDED = 1 << 62
NONE, NO_MASK = np.empty(0, np.float32), np.empty((0, 0), np.bool_)

# Not nnan or ninf: -inf is the score of a hidden key, and a NaN that is seen must stay one.
_FAST = {"reassoc", "contract", "arcp", "nsz"}
_OPTIONS = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}


def _jit(function: Any, **options: Any) -> Any:
    """Compile when first called, and keep the code on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, **_OPTIONS, **options)(function)
    except RuntimeError:  # numba found no folder it may write to
        return numba.njit(**_OPTIONS, **options)(function)


def _lean_jit(function: Any) -> Any:
    """For functions that neither allocate nor return arrays: no counting of references.

    Numba counts with atomics at every view and call, which took two thirds of the time.
    """
    return _jit(function, forceinline=True, _nrt=False)


_f32, _u32 = np.float32, np.uint32
_LOG2_E, _LN_2 = _f32(1.4426950408889634), _f32(0.6931471805599453)
_LOWEST = _f32(-87.0)  # e^x is no normal float32 below
_HIDDEN = _f32(-np.inf)
_ONE = _u32(1 << 23)  # the smallest float32 with a leading 1
_INFINITY = _u32(0x7F800000)


@_lean_jit
def _exp(x):
    """e^x for x <= 88 to 2e-7, 0 below _LOWEST: 2^n e^r, |r| <= ln 2 / 2, e^r by its Taylor series.

    No branches and no calls, so that loops over it vectorise: numba has no vector math library.
    """
    bounded = x if x > _LOWEST else _LOWEST
    n = np.floor(bounded * _LOG2_E + _f32(0.5))
    r = bounded - n * _LN_2
    y = _f32(1 / 5040)
    y = y * r + _f32(1 / 720)
    y = y * r + _f32(1 / 120)
    y = y * r + _f32(1 / 24)
    y = y * r + _f32(1 / 6)
    y = y * r + _f32(1 / 2)
    y = y * r + _f32(1)
    y = y * r + _f32(1)
    y = y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(_f32)
    y = y if x > _LOWEST else _f32(0)
    return x if x != x else y  # noqa: PLR0124


@_lean_jit
def _tanh(x):
    """tanh x to 3e-7: a continued fraction near 0, where 1 - 2 / (e^2x + 1) would cancel."""
    z = x * x
    near = x * (_f32(945) + z * (_f32(105) + z)) / (_f32(945) + z * (_f32(420) + z * _f32(15)))
    size = abs(x)
    bounded = size if size < _f32(40) else _f32(40)
    far = _f32(1) - _f32(2) / (_exp(bounded + bounded) + _f32(1))
    far = -far if x < _f32(0) else far
    far = x if x != x else far  # noqa: PLR0124
    return near if size < _f32(0.6) else far


@_lean_jit
def _widen(source, at, size, coding, block, b):
    """Stored elements at, at + 1, … as float32 in row b of `block`; at and size are uint64.

    coding: uint32 (shift, rebias, top). A magnitude shifted left by `shift` has its mantissa where
    float32 has it, and its exponent too low by `rebias`. Numbers without a leading 1 take the
    smallest exponent that has one and lose that 1 again: no denormal is computed with. Magnitudes
    from `top` on are not finite.
    """
    if source.itemsize == 4:
        for d in range(size):
            block[b, d] = source[at + d]
        return
    shift, rebias, top = coding[0], coding[1], coding[2]
    if rebias == 0:
        for d in range(size):
            block[b, d] = _u32(_u32(source[at + d]) << _u32(16)).view(_f32)
        return
    sign_at = _u32(8 * source.itemsize - 1)
    magnitude = _u32((1 << sign_at) - 1)
    leading_one = _u32(rebias + _ONE).view(_f32)
    for d in range(size):
        code = _u32(source[at + d])
        bits = _u32(_u32(code & magnitude) << shift)
        small = _u32(bits + rebias + _ONE).view(_f32) - leading_one
        found = _f32(small).view(_u32) if bits < _ONE else _u32(bits + rebias)
        found = _u32(bits | _INFINITY) if bits >= top else found
        sign = _u32(_u32(code >> sign_at) << _u32(31))
        block[b, d] = _u32(found | sign).view(_f32)


@intrinsic
def _prefetch(context: Any, array: Any, index: Any) -> tuple[Any, Any]:
    """Ask for the cache line of array[index]."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        view = arrayobj.make_array(signature.args[0])(context, builder, values[0])
        place = builder.bitcast(builder.gep(view.data, [values[1]]), ir.IntType(8).as_pointer())
        kind = ir.IntType(32)
        hint = ir.FunctionType(ir.VoidType(), [place.type, kind, kind, kind])
        function = cgutils.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0i8")
        builder.call(function, [place, kind(0), kind(3), kind(1)])  # read, keep close, data
        return context.get_dummy_value()

    return types.void(array, index), emit


@_lean_jit
def _step(i, steps):
    """First key and head of the i-th block in memory; steps: (blocks, heads, heads inside)."""
    blocks, heads, heads_inside = steps
    block, head = (i // heads, i % heads) if heads_inside else (i % blocks, i // blocks)
    return block * BLOCK, head


@_lean_jit
def _fetch_block(source, places, i, steps, head_stride, size):
    """Start loading the rows that step i will widen: a processor does not guess jumps of pages."""
    if i < steps[0] * steps[1]:
        at, head = _step(i, steps)
        for b in range(BLOCK):
            place = places[at + b]
            if place >= 0:
                for d in range(0, size, 64 // source.itemsize):
                    _prefetch(source, place + head * head_stride + d)


@_lean_jit
def _widen_block(source, places, first, head_offset, size, coding, block):
    """BLOCK rows of one head into `block` [BLOCK, padded]; place -1 is a key nobody sees: 0."""
    for b in range(BLOCK):
        at = places[first + b]
        if at < 0:
            for d in range(size):
                block[b, d] = _f32(0)
        else:
            _widen(source, np.uint64(at + head_offset), np.uint64(size), coding, block, b)


@_lean_jit
def _score(k, places, steps, head_stride, size, coding, block, q, scores):
    """scores [rows, KEY_TILE] = q [rows, padded] . each key of the tile; rows in order of heads."""
    blocks, heads, _ = steps
    rows, padded = len(q) // heads, block.shape[1]
    for i in range(blocks * heads):
        at, head = _step(i, steps)
        _fetch_block(k, places, i + AHEAD, steps, head_stride, size)
        _widen_block(k, places, at, head * head_stride, size, coding, block)
        for r in range(head * rows, head * rows + rows):
            s0, s1, s2, s3 = _f32(0), _f32(0), _f32(0), _f32(0)
            for d in range(padded):
                x = q[r, d]
                s0 += x * block[0, d]
                s1 += x * block[1, d]
                s2 += x * block[2, d]
                s3 += x * block[3, d]
            scores[r, at], scores[r, at + 1] = s0, s1
            scores[r, at + 2], scores[r, at + 3] = s2, s3


@_lean_jit
def _weigh(v, places, steps, head_stride, size, coding, block, weights, acc):
    """acc [rows, padded] += weights [rows, KEY_TILE] times each value of the tile."""
    blocks, heads, _ = steps
    rows, padded = len(acc) // heads, block.shape[1]
    for i in range(blocks * heads):
        at, head = _step(i, steps)
        _fetch_block(v, places, i + AHEAD, steps, head_stride, size)
        _widen_block(v, places, at, head * head_stride, size, coding, block)
        for r in range(head * rows, head * rows + rows):
            w0, w1 = weights[r, at], weights[r, at + 1]
            w2, w3 = weights[r, at + 2], weights[r, at + 3]
            for d in range(padded):
                acc[r, d] += (
                    w0 * block[0, d] + w1 * block[1, d] + w2 * block[2, d] + w3 * block[3, d]
                )


@_lean_jit
def _soften(s, first, last, distance, cap, slope, hidden, fold, peak):
    """Scores s [KEY_TILE] of one row become weights e^(s - peak); returns peak and their sum.

    Keys first to last of the tile are seen, except where `hidden`; `distance` is j - p of key 0.
    """
    if cap > 0:
        for c in range(KEY_TILE):
            s[c] = cap * _tanh(s[c] / cap)
    if slope != 0:
        for c in range(KEY_TILE):
            s[c] += slope * _f32(distance + c)
    s[:first] = _HIDDEN
    s[last:] = _HIDDEN
    for c in range(len(hidden)):
        if hidden[c]:
            s[c] = _HIDDEN
    width = KEY_TILE // 2  # the maximum by halves: a loop that keeps one is not vectorised
    for c in range(width):
        fold[c] = s[c] if s[c] > s[c + width] else s[c + width]
    while width > 1:
        width //= 2
        for c in range(width):
            fold[c] = fold[c] if fold[c] > fold[c + width] else fold[c + width]
    peak = fold[0] if fold[0] > peak else peak
    total = _f32(0)
    base = peak if peak > _HIDDEN else _f32(0)  # nothing finite so far: -inf - -inf is NaN
    for c in range(KEY_TILE):
        w = _exp(s[c] - base)
        s[c] = w
        total += w
    return peak, total


@_lean_jit
def _finish(acc, total, peak, factor, sink, out):
    """Write one row, acc over its sum of weights, and return its lse (without the sink)."""
    if total == 0:
        out[:] = _f32(0)
        return _HIDDEN
    whole = total + math.exp(np.float64(sink) - peak)
    scale = factor / whole
    for d in range(len(out)):
        out[d] = acc[d] * scale
    return _f32(peak + math.log(total))


@_lean_jit
def _hide(mask, row, column, hidden):
    """hidden [KEY_TILE]: keys of the tile a draft row's mask refuses; key 0 is column `column`."""
    for c in range(KEY_TILE):
        hidden[c] = 0 <= column + c < mask.shape[1] and not mask[row, column + c]


@_lean_jit
def _row(i, head, rows, group):
    """Where row i of a query head stands in buffers: the rows of one kv head lie together."""
    return (head // group * rows + i) * group + head % group


@_jit
def _walk(  # budget: what a call holds, unpacked for compiled code
    items, first_token, key_lens, table, geometry, k, v, coding, q, causal, mask, numbers, slopes,
    sinks, out, lse, partial_out, partial_lse,
):  # fmt: skip
    """Attend to every item of `items`; see the top of the file.

    geometry: int64, as `_geometry` lists it. numbers: float32 (score_scale, value_scale, cap).
    """
    heads, page_size, table_stride, window, heads_inside = geometry[:5]
    k_page, k_token, k_head, v_page, v_token, v_head = geometry[5:11]
    size, v_size, q_heads = q.shape[2], out.shape[2], q.shape[1]
    group = q_heads // heads
    drafted = mask.size > 0
    k_block = np.zeros((BLOCK, -(-size // LANES) * LANES), _f32)
    v_block = np.zeros((BLOCK, -(-v_size // LANES) * LANES), _f32)
    k_at, v_at = np.empty(KEY_TILE, np.int64), np.empty(KEY_TILE, np.int64)
    hidden, nothing = np.empty(KEY_TILE, np.bool_), np.empty(0, np.bool_)
    fold = np.empty(KEY_TILE, _f32)
    for index in range(len(items)):
        request, partial = items[index, REQUEST], items[index, PARTIAL]
        begin, rows = items[index, QUERY_BEGIN], items[index, QUERY_END] - items[index, QUERY_BEGIN]
        token = first_token[request] + begin
        n = np.int64(key_lens[request])
        first_new = n - (first_token[request + 1] - first_token[request])
        position = first_new + begin
        ahead = drafted or not causal[request]  # rows may see keys after their own
        low = max(items[index, KEY_BEGIN], position - window + 1)
        high = min(items[index, KEY_END], n if ahead else position + rows)

        total_rows = rows * q_heads
        queries = np.zeros((total_rows, k_block.shape[1]), _f32)
        acc = np.zeros((total_rows, v_block.shape[1]), _f32)
        scores = np.empty((total_rows, KEY_TILE), _f32)
        peak, total = np.full(total_rows, _HIDDEN), np.zeros(total_rows, _f32)
        for head in range(q_heads):
            for i in range(rows):
                r = _row(i, head, rows, group)
                for d in range(size):
                    queries[r, d] = q[token + i, head, d] * numbers[0]

        for tile in range(low, high, KEY_TILE):
            count = min(KEY_TILE, high - tile)
            blocks = -(-count // BLOCK)
            masked = drafted and tile + count > first_new
            for c in range(blocks * BLOCK):
                key = tile + c
                seen = c < count
                if seen and masked and key >= first_new:
                    seen = False
                    for i in range(rows):
                        if key > position + i - window and mask[token + i, key - first_new]:
                            seen = True
                k_at[c] = v_at[c] = -1
                if seen:
                    row = key % page_size
                    page = np.int64(table[request * table_stride + key // page_size])
                    k_at[c] = page * k_page + row * k_token
                    v_at[c] = page * v_page + row * v_token
            steps = (blocks, heads, heads_inside)
            _score(k, k_at, steps, k_head, size, coding, k_block, queries, scores)
            for i in range(rows):
                first = max(position + i - window + 1 - tile, 0)
                last = min(count, count if ahead else position + i + 1 - tile)
                concealed = hidden if masked else nothing
                if masked:
                    _hide(mask, token + i, tile - first_new, hidden)
                for head in range(q_heads):
                    r = _row(i, head, rows, group)
                    slope = slopes[head] if slopes.size > 0 else _f32(0)
                    old = peak[r]
                    peak[r], added = _soften(
                        scores[r], min(first, KEY_TILE), max(last, 0), tile - position - i,
                        numbers[2], slope, concealed, fold, old,
                    )  # fmt: skip
                    if peak[r] > old and total[r] != 0:
                        shrink = _exp(old - peak[r])
                        total[r] *= shrink
                        for d in range(acc.shape[1]):
                            acc[r, d] *= shrink
                    total[r] += added
            _weigh(v, v_at, steps, v_head, v_size, coding, v_block, scores, acc)

        for i in range(rows):
            for head in range(q_heads):
                r = _row(i, head, rows, group)
                if partial < 0:
                    sink = sinks[head] if sinks.size > 0 else _HIDDEN
                    row, row_lse = out[token + i], lse[token + i]
                else:
                    sink = _HIDDEN
                    row, row_lse = partial_out[partial, begin + i], partial_lse[partial, begin + i]
                row_lse[head] = _finish(acc[r], total[r], peak[r], numbers[1], sink, row[head])


@_jit
def _merge(groups, first_token, partial_out, partial_lse, sinks, out, lse):
    """Fold each request's parts s: out = sum e^(lse_s - max) out_s / sum e^(lse_s - max)."""
    for index in range(len(groups)):
        request, slot, parts = groups[index, 0], groups[index, 1], groups[index, 2]
        token = first_token[request]
        acc = np.empty(out.shape[2], _f32)
        for i in range(first_token[request + 1] - token):
            for head in range(out.shape[1]):
                peak, total = _HIDDEN, _f32(0)
                for s in range(slot, slot + parts):
                    peak = max(peak, partial_lse[s, i, head])
                acc[:] = 0
                for s in range(slot, slot + parts):
                    if partial_lse[s, i, head] == _HIDDEN:
                        continue
                    weight = _f32(math.exp(partial_lse[s, i, head] - peak))
                    total += weight
                    part = partial_out[s, i, head]
                    for d in range(len(acc)):
                        acc[d] += weight * part[d]
                sink = sinks[head] if sinks.size > 0 else _HIDDEN
                row = out[token + i, head]
                lse[token + i, head] = _finish(acc, total, peak, _f32(1), sink, row)


def run(call: AttentionCall) -> None:
    """Attend to every row the work list names; rows of other requests are not touched."""
    work = call.work
    num_items, num_groups = work.counts.tolist()
    if num_items == 0:
        return
    first_token = call.query_start_loc.numpy()
    first, last = work.items[0, REQUEST], work.items[num_items - 1, REQUEST] + 1
    tokens = slice(int(first_token[first]), int(first_token[last]))
    out = float32_rows(call.out, tokens.stop)
    wanted = torch.empty(out.shape[:2]) if call.lse is None else call.lse
    lse = float32_rows(wanted, tokens.stop)
    constants, sinks = _constants(call, tokens.stop)
    results = (sinks, out.numpy(), lse.numpy())
    parts = (call.workspace.partial_out.numpy(), call.workspace.partial_lse.numpy())
    shares, workers = _shares(call, work.items[:num_items])
    run_shares(_walk, shares, workers, *constants, *results, *parts)
    if num_groups:
        _merge(work.groups[:num_groups], first_token, *parts, *results)
    if out is not call.out:
        copy(call.out[tokens], out[tokens])
    if lse is not wanted:
        copy(wanted[tokens], lse[tokens])


def _constants(call: AttentionCall, num_tokens: int) -> tuple[tuple[Any, ...], Array]:
    """What `_walk` reads, from first_token to slopes; and the sinks."""
    params, cache, mask, causal = call.params, call.cache, call.draft_mask, call.causal
    constants = (
        call.query_start_loc.numpy(),
        call.key_lens.numpy(),
        flat(call.page_table),
        _geometry(call),
        flat(cache.k),
        flat(cache.v),
        _coding(cache.format),
        as_float32(call.q[:num_tokens]).numpy(),
        np.full(len(call.key_lens), causal) if isinstance(causal, bool) else causal.numpy(),
        NO_MASK if mask is None else mask.contiguous().numpy(),
        np.array((params.score_scale, params.value_scale, params.soft_cap or 0.0), np.float32),
        NONE if params.alibi_slopes is None else params.alibi_slopes.contiguous().numpy(),
    )
    return constants, NONE if params.sinks is None else params.sinks.contiguous().numpy()


def _geometry(call: AttentionCall) -> Array:
    """Sizes and strides, in elements: int64, in the order in which `_walk` unpacks them."""
    k, v, window = call.cache.k, call.cache.v, call.params.window
    _, page_size, heads, _ = k.shape
    k_strides, v_strides = k.stride()[:3], v.stride()[:3]
    heads_inside = heads == 1 or k_strides[2] < k_strides[1]
    window = UNBOUNDED if window is None else window
    table_stride = call.page_table.stride(0)
    return np.array(
        (heads, page_size, table_stride, window, heads_inside, *k_strides, *v_strides), np.int64
    )


@lru_cache
def _coding(fmt: Format) -> Array:
    """uint32 (shift, rebias, top): how `_widen` reads the format.

    fp8_e4m3, whose largest number 448 is 0x7e, one below its NaN; its exponent bias is 7:

    >>> from pageant.cache.formats import FORMATS
    >>> [hex(number) for number in _coding(FORMATS["fp8_e4m3"])]
    ['0x14', '0x3c000000', '0x7f00000']
    """
    shift = 23 - fmt.mantissa_bits
    rebias = (128 - (1 << fmt.exponent_bits - 1)) << 23
    largest = int(np.array(fmt.max_value, np.float32).view(np.uint32)) - rebias
    return np.array((shift, rebias, largest + (1 << shift)), np.uint32)


def _shares(call: AttentionCall, items: Array) -> tuple[list[Array], int]:
    """The items in pieces of about equal work, and how many workers they are for."""
    ends = np.cumsum(items[:, KEY_END] - items[:, KEY_BEGIN])
    heads, size = call.cache.k.shape[2:]
    workers = int(np.count_nonzero(np.diff(call.work.share_start)))
    if workers == 1 or ends[-1] * heads * (size + call.cache.v.shape[3]) < THREAD_READS:
        return [items], 1
    pieces = PIECES * workers
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) // pieces)
    bounds = np.unique(np.concatenate(([0], cuts, [len(items)])))
    return [items[a:b] for a, b in itertools.pairwise(bounds.tolist())], workers
