# budget: what is compiled together lies in one file, as numba's cache sees no change in another
"""The compiled part of attention on the CPU: walk items over pages, and merge their parts.

``attention.py`` says what is computed and prepares the arguments.

Stored elements become float32 without branches, in vectors. Small floats go through float16, which
processors convert: they come out too small by 2^8 (e4m3) or 2^14 (e2m1), and `attention.py` puts
that into factors.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from pageant.plan.work import KEY_BEGIN, KEY_END, PARTIAL, QUERY_BEGIN, QUERY_END, REQUEST

KEY_TILE = 64  # keys of one softmax step
BLOCK = 4  # rows of K or V widened together
AHEAD = 4  # blocks of one head whose loading starts early
WIDE = 32  # elements widened together; two vectors of most
LANES = 16  # buffers are padded to whole vectors of this many floats
# How elements are stored; see `_widen`.
FLOAT, UPPER_HALF, HALF, E4M3, INTEGER, E2M1 = range(6)

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


_f32, _u16, _u32, _u64 = np.float32, np.uint16, np.uint32, np.uint64
_LOG2_E, _LN_2 = _f32(1.4426950408889634), _f32(0.6931471805599453)
_LOWEST = _f32(-87.0)  # e^x is no normal float32 below
_HIDDEN = _f32(-np.inf)


# Functions of one number.


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


# What the functions written in vectors have in common.

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_FUSED = ("contract",)  # flag of products and sums that become one step where there is one


def _pointers(context: Any, builder: Any, signature: Any, values: Any) -> Any:
    """A function of (argument, row, elements a row, column, kind): where that element lies."""

    def pointer(index: int, row: Any, width: Any, column: Any, kind: Any) -> Any:
        view = arrayobj.make_array(signature.args[index])(context, builder, values[index])
        place = builder.gep(view.data, [builder.add(builder.mul(row, width), column)])
        return builder.bitcast(place, kind.as_pointer())

    return pointer


def _pick(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    """Those lanes of two vectors laid side by side."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


# Stored elements to float32.


@intrinsic
def _half(context: Any, bits: Any) -> tuple[Any, Any]:
    """float32 of a float16 given as uint16, NaN and numbers without a leading 1 included."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


def _as_floats(builder: Any, codes: Any, kind: int) -> Any:
    """float32 of a vector of stored elements.

    float16 has 1 sign bit, 5 of exponent, 10 of mantissa; stored bits are moved where those are.
    E4M3: 1 + 4 + 3 bits; a magnitude of 0x7f, the only NaN, gets all of float16's exponent bits:
    bit 14, a copy of the sign, becomes what adding 1 to the magnitude carries into it.
    """
    lanes, bits = codes.type.count, getattr(codes.type.element, "width", 32)
    shorts, words = (ir.VectorType(ir.IntType(width), lanes) for width in (16, 32))
    halves, floats = (ir.VectorType(each, lanes) for each in (ir.HalfType(), ir.FloatType()))

    def all_of(kind: Any, number: int) -> Any:
        return ir.Constant(kind, [number] * lanes)

    if kind == FLOAT:
        return codes
    if kind == UPPER_HALF:
        wide = builder.shl(builder.zext(codes, words), all_of(words, 16))
        return builder.bitcast(wide, floats)
    if kind == INTEGER:
        return builder.sitofp(builder.sext(codes, words), floats)
    if kind == HALF and bits == 8:
        codes = builder.shl(builder.zext(codes, shorts), all_of(shorts, 8))
    elif kind == E4M3:
        codes = builder.shl(builder.sext(codes, shorts), all_of(shorts, 7))
        carried = builder.add(codes, all_of(shorts, 0x80))
        codes = builder.xor(codes, builder.and_(carried, all_of(shorts, 0x4000)))
    return builder.fpext(builder.bitcast(codes, halves), floats)


def _widener(kind: int, widths: tuple[int, ...]) -> Any:
    """A function for a kind whose elements have so many bits.

    It writes `size` of them, a multiple of 8, from source[at] on as float32 from block.flat[to] on;
    in vectors, as loops over single elements begin with tests that take as long as a row.
    """

    def widen(
        context: Any, source: Any, at: Any, size: Any, block: Any, to: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            stored = signature.args[0].dtype
            if stored.bitwidth not in widths:  # never called: another storage has this kind
                return context.get_dummy_value()
            pointer, whole = _pointers(context, builder, signature, values), ir.IntType(64)
            element, full = context.get_data_type(stored), builder.and_(values[2], whole(-WIDE))
            for begin, end, lanes in ((whole(0), full, WIDE), (full, values[2], 8)):
                with cgutils.for_range_slice(builder, begin, end, whole(lanes), whole) as (d, _):
                    place = pointer(0, values[1], whole(1), d, ir.VectorType(element, lanes))
                    codes = builder.load(place, align=stored.bitwidth // 8)
                    wide = _as_floats(builder, codes, kind)
                    place = pointer(3, values[4], whole(1), d, wide.type)
                    builder.store(wide, place, align=4)
            return context.get_dummy_value()

        return types.void(source, at, size, block, to), emit

    return intrinsic(widen)


_widen_float = _widener(FLOAT, (32,))
_widen_upper_half = _widener(UPPER_HALF, (16,))
_widen_half = _widener(HALF, (8, 16))
_widen_e4m3 = _widener(E4M3, (8,))
_widen_integer = _widener(INTEGER, (8,))


@_lean_jit
def _widen(source, at, size, kind, block, b):
    """Stored elements at, at + 1, … as float32 in row b of `block`; numbers are uint64."""
    to = b * _u64(block.shape[1])
    if kind == FLOAT:
        _widen_float(source, at, size, block, to)
    elif kind == UPPER_HALF:
        _widen_upper_half(source, at, size, block, to)
    elif kind == HALF:
        _widen_half(source, at, size, block, to)
    elif kind == E4M3:
        _widen_e4m3(source, at, size, block, to)
    else:
        _widen_integer(source, at, size, block, to)


@intrinsic
def _widen_pairs(
    context: Any, source: Any, at: Any, low: Any, high: Any, block: Any, even: Any, odd: Any
) -> tuple[Any, Any]:
    """16 bytes of E2M1 pairs from source[at] on: float32 from block.flat[even] and [odd] on.

    The first eight bytes are multiplied by `low`, the others by `high`. Written in vectors, as no
    loop over single elements becomes them.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def pointer(index: int, offset: int, kind: Any) -> Any:
            view = arrayobj.make_array(signature.args[index])(context, builder, values[index])
            place = builder.gep(view.data, [values[offset]])
            return builder.bitcast(place, ir.VectorType(kind, 16).as_pointer())

        def move(bits: int, shift: int) -> Any:
            some = builder.and_(pairs, ir.Constant(shorts, [bits] * 16))
            return builder.shl(some, ir.Constant(shorts, [shift] * 16))

        shorts, floats = ir.VectorType(ir.IntType(16), 16), ir.VectorType(ir.FloatType(), 16)
        pairs = builder.zext(builder.load(pointer(0, 1, ir.IntType(8)), align=1), shorts)
        scale: Any = ir.Constant(floats, ir.Undefined)
        for place, value in enumerate(values[2:4]):
            scale = builder.insert_element(scale, value, ir.IntType(32)(place))
        scale = _pick(builder, scale, scale, [0] * 8 + [1] * 8)
        for target, magnitude, sign in ((5, (0x07, 9), (0x08, 12)), (6, (0x70, 5), (0x80, 8))):
            halves = builder.or_(move(*magnitude), move(*sign))
            halves = builder.bitcast(halves, ir.VectorType(ir.HalfType(), 16))
            wide = builder.fmul(builder.fpext(halves, floats), scale)
            builder.store(wide, pointer(4, target, ir.FloatType()), align=4)
        return context.get_dummy_value()

    return types.void(source, at, low, high, block, even, odd), emit


@_lean_jit
def _widen_blocks(source, at, size, scales, scale_at, steps, table, block, b):
    """E2M1 pairs times their blocks' scales, bytes at scale_at + steps[0], scale_at + steps[1], …

    Two elements a byte, eight bytes a scale; elements 0, 2, 4, … come first in row b of `block`,
    then 1, 3, 5, … All numbers are uint64.
    """
    full, row = size >> _u64(4), b * _u64(block.shape[1])
    for pair in range(full):
        first, s = pair << _u64(4), pair << _u64(1)
        low = table[scales[scale_at + steps[s]]]
        high = table[scales[scale_at + steps[s + _u64(1)]]]
        _widen_pairs(source, at + first, low, high, block, row + first, row + size + first)
    for d in range(full << _u64(4), size):
        pair = _u32(source[at + d])
        factor = table[scales[scale_at + steps[d >> _u64(3)]]]
        even = _u16(_u16(_u16(pair & 0x07) << 9) | _u16(_u16(pair & 0x08) << 12))
        odd = _u16(_u16(_u16(pair & 0x70) << 5) | _u16(_u16(pair & 0x80) << 8))
        block[b, d] = _half(even) * factor
        block[b, size + d] = _half(odd) * factor


# Blocks: a few rows of one head, in the order in which they lie in memory.


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
def _fetch_block(stored, places, i, steps):
    """Start loading the rows that step i will widen: a processor does not guess jumps of pages."""
    source, _, block_scales, _, _, numbers = stored
    if i < steps[0] * steps[1]:
        at, head = _step(i, steps)
        for b in range(BLOCK):
            place = places[0, at + b]
            if place >= 0:
                for d in range(0, numbers[0], 64 // source.itemsize):
                    _prefetch(source, place + head * numbers[2] + d)
                if len(block_scales) > 0:
                    _prefetch(block_scales, places[1, at + b] + head * numbers[3])


@_lean_jit
def _widen_block(stored, places, first, head, block):
    """BLOCK rows of one head into `block` [BLOCK, padded].

    Place -1 is a key nobody sees: zeros.
    """
    source, _, block_scales, table, steps, numbers = stored
    size, kind, head_stride, scale_stride = numbers[0], numbers[1], numbers[2], numbers[3]
    for b in range(BLOCK):
        at = places[0, first + b]
        if at < 0:
            block[b, :] = _f32(0)
            continue
        scale_at = places[1, first + b] + head * scale_stride
        at = _u64(at + head * head_stride)
        if source.itemsize == 1 and kind == E2M1:
            _widen_blocks(
                source, at, _u64(size), block_scales, _u64(scale_at), steps, table, block, _u64(b)
            )
        else:
            _widen(source, at, _u64(size), kind, block, _u64(b))


@_lean_jit
def _gather_scales(stored, places, count, factors):
    """factors [heads, KEY_TILE]: the scale stored for each row of the tile; 0 where nobody sees."""
    row_scales, stride = stored[1], _u64(stored[5][3])
    for c in range(count):
        at, seen = _u64(places[1, c]), places[0, c] >= 0
        for head in range(len(factors)):
            factors[head, c] = row_scales[at] if seen else _f32(0)
            at += stride


# The two products: queries times keys, weights times values.


def _dots(num_rows: int) -> Any:
    """A function of num_rows rows from q[r] on: their scores from `at` on with BLOCK rows of keys.

    A sum of LANES lanes for each score; halves of pairs of them are added until all are lanes of
    one vector, in a third of the steps of one at a time.
    """

    def dots(
        context: Any, q: Any, r: Any, block: Any, padded: Any, scores: Any, at: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            def halve(first: Any, second: Any, n: int) -> Any:
                """Sums of n lanes, side by side in two vectors, as sums of n / 2 lanes in one."""
                low = [lane for lane in range(2 * first.type.count) if lane % n < n // 2]
                high = [lane + n // 2 for lane in low]
                return builder.fadd(
                    _pick(builder, first, second, low), _pick(builder, first, second, high)
                )

            pointer = _pointers(context, builder, signature, values)
            whole, size = ir.IntType(64), values[3]
            rows = [builder.add(values[1], whole(i)) for i in range(num_rows)]
            slots = [
                cgutils.alloca_once_value(builder, _VECTOR([0.0] * LANES))
                for _ in range(num_rows * BLOCK)
            ]
            with cgutils.for_range_slice(builder, whole(0), size, whole(LANES), whole) as (d, _):
                keys = [
                    builder.load(pointer(2, whole(b), size, d, _VECTOR), align=4)
                    for b in range(BLOCK)
                ]
                for i, row in enumerate(rows):
                    x = builder.load(pointer(0, row, size, d, _VECTOR), align=4)
                    for key, slot in zip(keys, slots[i * BLOCK :], strict=False):
                        product = builder.fmul(x, key, flags=_FUSED)
                        builder.store(builder.fadd(builder.load(slot), product, flags=_FUSED), slot)
            sums, n = [builder.load(slot) for slot in slots], LANES
            while len(sums) > 1:
                pairs = zip(sums[::2], sums[1::2], strict=True)
                sums, n = [halve(first, second, n) for first, second in pairs], n // 2
            (found,) = sums
            while n > 1:
                nothing = ir.Constant(found.type, ir.Undefined)
                found, n = halve(found, nothing, n), n // 2
            for i, row in enumerate(rows):
                four = _pick(builder, found, found, list(range(i * BLOCK, i * BLOCK + BLOCK)))
                place = pointer(4, row, whole(KEY_TILE), values[5], four.type)
                builder.store(four, place, align=4)
            return context.get_dummy_value()

        return types.void(q, r, block, padded, scores, at), emit

    return intrinsic(dots)


def _adds(num_rows: int) -> Any:
    """The same for values: acc[r] and so on += their weights from `at` on times BLOCK rows."""

    def adds(
        context: Any, acc: Any, r: Any, block: Any, padded: Any, weights: Any, at: Any
    ) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointers(context, builder, signature, values)
            whole, size = ir.IntType(64), values[3]

            def spread(row: Any, b: int) -> Any:
                column = builder.add(values[5], whole(b))
                weight = builder.load(pointer(4, row, whole(KEY_TILE), column, ir.FloatType()))
                nothing = ir.Constant(_VECTOR, ir.Undefined)
                first = builder.insert_element(nothing, weight, ir.IntType(32)(0))
                return _pick(builder, first, nothing, [0] * LANES)

            rows = [builder.add(values[1], whole(i)) for i in range(num_rows)]
            factors = [[spread(row, b) for b in range(BLOCK)] for row in rows]
            with cgutils.for_range_slice(builder, whole(0), size, whole(LANES), whole) as (d, _):
                block_rows = [
                    builder.load(pointer(2, whole(b), size, d, _VECTOR), align=4)
                    for b in range(BLOCK)
                ]
                for row, row_factors in zip(rows, factors, strict=True):
                    place = pointer(0, row, size, d, _VECTOR)
                    total = builder.load(place, align=4)
                    for factor, value in zip(row_factors, block_rows, strict=True):
                        product = builder.fmul(factor, value, flags=_FUSED)
                        total = builder.fadd(total, product, flags=_FUSED)
                    builder.store(total, place, align=4)
            return context.get_dummy_value()

        return types.void(acc, r, block, padded, weights, at), emit

    return intrinsic(adds)


_dot_two, _dot_four, _add_two, _add_four = _dots(2), _dots(4), _adds(2), _adds(4)


@_lean_jit
def _multiply(stored, places, steps, block, rows, scores, weigh):
    """scores [R, KEY_TILE] = rows [R, padded] . each key of the tile; R go by heads.

    With `weigh` the stored rows are values: rows += scores times each value.
    """
    blocks, heads, _ = steps
    count, padded = len(rows) // heads, block.shape[1]
    for i in range(blocks * heads):
        at, head = _step(i, steps)
        _fetch_block(stored, places, i + AHEAD, steps)
        _widen_block(stored, places, at, head, block)
        r, end = head * count, head * count + count
        while r + 4 <= end:  # rows together share a block's loads
            if weigh:
                _add_four(rows, r, block, padded, scores, at)
            else:
                _dot_four(rows, r, block, padded, scores, at)
            r += 4
        if r < end:
            if weigh:
                _add_two(rows, r, block, padded, scores, at)
            else:
                _dot_two(rows, r, block, padded, scores, at)


# Scores to weights, and sums to results.


@intrinsic
def _largest(context: Any, scores: Any) -> tuple[Any, Any]:
    """The largest of KEY_TILE scores, by halves; one that is NaN need not be seen."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        def larger(first: Any, second: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", first, second), first, second)

        pointer, whole = _pointers(context, builder, signature, values), ir.IntType(64)
        columns = range(0, KEY_TILE, LANES)
        places = [pointer(0, whole(0), whole(0), whole(c), _VECTOR) for c in columns]
        parts = [builder.load(place, align=4) for place in places]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [larger(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        (best,), n = parts, LANES
        while n > 1:
            n //= 2
            halves = (list(range(n)), list(range(n, 2 * n)))
            best = larger(*(_pick(builder, best, best, lanes) for lanes in halves))
        return builder.extract_element(best, ir.IntType(32)(0))

    return types.float32(scores), emit


@_lean_jit
def _soften(s, first, last, away, near, cap, slope, hidden, k_scales, v_scales, peak):
    """Scores s [KEY_TILE] of one row become weights e^(s - peak); returns peak and their sum.

    Keys first to last of the tile are seen, except where `hidden`; key c's j - p is away + near[c].
    Scales of rows, if not empty, multiply scores first, and weights when they have been summed.
    """
    if len(k_scales) > 0:
        for c in range(KEY_TILE):
            s[c] *= k_scales[c]
    if cap > 0:
        for c in range(KEY_TILE):
            s[c] = cap * _tanh(s[c] / cap)
    if slope != 0:
        for c in range(KEY_TILE):
            s[c] += slope * _f32(away + near[c])
    if first > 0:
        s[:first] = _HIDDEN
    if last < KEY_TILE:
        s[last:] = _HIDDEN
    if len(hidden) > 0:
        for c in range(KEY_TILE):
            if hidden[c]:
                s[c] = _HIDDEN
    largest = _largest(s)
    peak = largest if largest > peak else peak
    total = _f32(0)
    base = peak if peak > _HIDDEN else _f32(0)  # nothing finite so far: -inf - -inf is NaN
    for c in range(KEY_TILE):
        w = _exp(s[c] - base)
        s[c] = w
        total += w
    if len(v_scales) > 0:
        for c in range(KEY_TILE):
            s[c] *= v_scales[c]
    return peak, total


@_lean_jit
def _finish(acc, order, total, peak, factor, sink, out):
    """Write one row, acc over its sum of weights, and return its lse (without the sink).

    order: int64 [Dv], where `acc` holds each element.
    """
    if total == 0:
        out[:] = _f32(0)
        return _HIDDEN
    whole = total + math.exp(np.float64(sink) - peak)
    scale = factor / whole
    for d in range(len(out)):
        out[d] = acc[order[d]] * scale
    return _f32(peak + math.log(total))


@_lean_jit
def _hide(mask, row, column, near, hidden):
    """hidden [KEY_TILE]: keys a draft row's mask refuses; key c is column `column` + near[c]."""
    for c in range(KEY_TILE):
        at = column + near[c]
        hidden[c] = 0 <= at < mask.shape[1] and not mask[row, at]


# Where rows and keys stand.


@_lean_jit
def _row(i, head, rows, group):
    """Where row i of a query head stands in buffers: the `rows` of one kv head lie together."""
    return head // group * rows + i * group + head % group


@_lean_jit
def _count(tokens, shard):
    """ContextParallel.count, and 0 for negative numbers."""
    rank, world, interleave = shard
    if world == 1:
        return max(tokens, 0)
    rounds = max(tokens, 0) // (interleave * world) * interleave
    rest = tokens - rounds * world - rank * interleave
    return rounds + min(max(rest, 0), interleave)


@_lean_jit
def _position(held, shard):
    """ContextParallel.position."""
    rank, world, interleave = shard
    if world == 1:
        return held
    return (held // interleave * world + rank) * interleave + held % interleave


@_lean_jit
def _locate(page, row, head, geometry, places, c):
    """Where a head's row `row` of a page lies: elements in places[0], its scales in places[1]."""
    places[0, c] = page * geometry[0] + row * geometry[1] + head * geometry[5]
    inside = row % 4 if geometry[4] else 0  # swizzled: four rows' scales are transposed
    places[1, c] = page * geometry[2] + (row - inside) * geometry[3] + inside + head * geometry[6]


@_jit
def _aligned(rows, columns):
    """float32 zeros [rows, columns] that begin a cache line: vectors should not cross lines."""
    room = np.zeros(rows * columns + LANES, _f32)
    first = -(room.ctypes.data // 4) % LANES
    return room[first : first + rows * columns].reshape(rows, columns)


# What `attention.py` calls.


@_jit
def walk(  # budget: what a call holds, unpacked for compiled code
    share, first_token, key_lens, table, geometry, k, v, q, causal, mask, numbers, slopes, sinks,
    out, lse, partial_out, partial_lse,
):  # fmt: skip
    """Attend to every item (a row of the work list) of a share: (items, first kv head, last).

    `attention.py` makes the arguments and says what they hold; here are those it passes on:
    key_lens int32 [R], table flat int32, causal bool [R], mask bool [T, M] or empty, slopes and
    sinks float32 [Hq] or empty, numbers float32 (score scale, value scale, cap).
    """
    items, first_head, last_head = share
    all_heads, page_size, table_stride, window, heads_inside, aligned = geometry[:6]
    shard = (geometry[6], geometry[7], geometry[8])
    k_geometry, k_order, k_stored = k
    v_geometry, v_order, v_stored = v
    size, v_size, q_heads = q.shape[2], out.shape[2], q.shape[1]
    heads, group = last_head - first_head, q_heads // all_heads
    first_query, drafted = first_head * group, mask.size > 0
    k_block = _aligned(BLOCK, -(-size // LANES) * LANES)
    v_block = _aligned(BLOCK, -(-v_size // LANES) * LANES)
    k_at, v_at = np.empty((2, KEY_TILE), np.int64), np.empty((2, KEY_TILE), np.int64)
    hidden, nothing = np.empty(KEY_TILE, np.bool_), np.empty(0, np.bool_)
    near = np.empty(KEY_TILE, np.int64)
    no_scales, scaled = np.empty(0, _f32), len(k_stored[1]) > 0
    k_scales, v_scales = _aligned(heads, KEY_TILE), _aligned(heads, KEY_TILE)
    for index in range(len(items)):
        request, partial = items[index, REQUEST], items[index, PARTIAL]
        begin, rows = items[index, QUERY_BEGIN], items[index, QUERY_END] - items[index, QUERY_BEGIN]
        token = first_token[request] + begin
        n = np.int64(key_lens[request])
        first_new = n - (first_token[request + 1] - first_token[request])
        position = first_new + begin
        ahead = drafted or not causal[request]  # rows may see keys after their own
        first_held = _count(first_new, shard)
        low = max(items[index, KEY_BEGIN], _count(position - window + 1, shard))
        high = min(items[index, KEY_END], _count(n if ahead else position + rows, shard))

        padded = rows * group + rows * group % 2  # rows go by in pairs
        total_rows = padded * heads
        queries = _aligned(total_rows, k_block.shape[1])
        acc = _aligned(total_rows, v_block.shape[1])
        scores = _aligned(total_rows, KEY_TILE)
        peak, total = np.full(total_rows, _HIDDEN), np.zeros(total_rows, _f32)
        for head in range(heads * group):
            for i in range(rows):
                r = _row(i, head, padded, group)
                for d in range(size):
                    queries[r, k_order[d]] = q[token + i, first_query + head, d] * numbers[0]

        for tile in range(low - low % KEY_TILE if aligned else low, high, KEY_TILE):
            count = min(KEY_TILE, high - tile)
            blocks = -(-count // BLOCK)
            masked = drafted and tile + count > first_held
            start = _position(tile, shard)
            for c in range(KEY_TILE):
                near[c] = _position(tile + c, shard) - start
            for c in range(blocks * BLOCK):
                key = tile + c
                seen = c < count and key >= low
                if seen and masked and key >= first_held:
                    seen, at = False, start + near[c]
                    for i in range(rows):
                        if at > position + i - window and mask[token + i, at - first_new]:
                            seen = True
                k_at[:, c] = v_at[:, c] = -1
                if seen:
                    row = key % page_size
                    page = np.int64(table[request * table_stride + key // page_size])
                    _locate(page, row, first_head, k_geometry, k_at, c)
                    _locate(page, row, first_head, v_geometry, v_at, c)
            steps = (blocks, heads, heads_inside)
            if scaled:
                _gather_scales(k_stored, k_at, blocks * BLOCK, k_scales)
                _gather_scales(v_stored, v_at, blocks * BLOCK, v_scales)
            _multiply(k_stored, k_at, steps, k_block, queries, scores, False)
            for i in range(rows):
                first = max(_count(position + i - window + 1, shard) - tile, 0)
                last = min(count, count if ahead else _count(position + i + 1, shard) - tile)
                concealed = hidden if masked else nothing
                if masked:
                    _hide(mask, token + i, start - first_new, near, hidden)
                for head in range(heads):
                    tile_k_scales = k_scales[head] if scaled else no_scales
                    tile_v_scales = v_scales[head] if scaled else no_scales
                    for g in range(group):
                        r = head * padded + i * group + g
                        slope = _f32(0)
                        if slopes.size > 0:
                            slope = slopes[first_query + head * group + g]
                        old = peak[r]
                        peak[r], added = _soften(
                            scores[r], min(first, KEY_TILE), max(last, 0),
                            start - position - i, near,
                            numbers[2], slope, concealed, tile_k_scales, tile_v_scales, old,
                        )  # fmt: skip
                        if peak[r] > old and total[r] != 0:
                            shrink = _exp(old - peak[r])
                            total[r] *= shrink
                            for d in range(acc.shape[1]):
                                acc[r, d] *= shrink
                        total[r] += added
            _multiply(v_stored, v_at, steps, v_block, acc, scores, True)

        for i in range(rows):
            for head in range(first_query, last_head * group):
                r = _row(i, head - first_query, padded, group)
                if partial < 0:
                    sink = sinks[head] if sinks.size > 0 else _HIDDEN
                    row, row_lse = out[token + i], lse[token + i]
                else:
                    sink = _HIDDEN
                    row, row_lse = partial_out[partial, begin + i], partial_lse[partial, begin + i]
                row_lse[head] = _finish(
                    acc[r], v_order, total[r], peak[r], numbers[1], sink, row[head]
                )


@_jit
def merge(groups, first_token, partial_out, partial_lse, sinks, out, lse):
    """Fold each request's parts s: out = sum e^(lse_s - max) out_s / sum e^(lse_s - max)."""
    order = np.arange(out.shape[2])
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
                lse[token + i, head] = _finish(acc, order, total, peak, _f32(1), sink, row)
