"""How the rows of a Gluon decode are left: as parts, as outputs, or joined of parts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-(2.0**100))  # below every score, and no sum with it is infinite


@gluon.jit
def _store(x, factor, at, exists, PLANE: gl.constexpr, C: gl.constexpr):
    """One plane of the output times a factor of each column, at pointers to each column's row."""
    LAYOUT: gl.constexpr = x.type.layout
    word = gl.arange(0, C.value_words, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    element = gl.expand_dims(gl.expand_dims(word, 0), 2) * C.planes + PLANE
    at = gl.expand_dims(at, 1) + element
    value = (x * gl.expand_dims(factor, 1)).to(at.dtype.element_ty)
    gl.store(at, value, mask=gl.expand_dims(exists, 1) & (element < C.value_dim))


@gluon.jit
def store_all(o0, o1, o2, o3, factor, at, exists, C: gl.constexpr):
    """All planes of the output; see `_store`."""
    _store(o0, factor, at, exists, 0, C)
    if C.planes >= 2:
        _store(o1, factor, at, exists, 1, C)
    if C.planes == 4:
        _store(o2, factor, at, exists, 2, C)
        _store(o3, factor, at, exists, 3, C)


@gluon.jit
def _load(like, at, exists, PLANE: gl.constexpr, C: gl.constexpr):
    """One plane of a part, as `_store` left it; `like` it is laid out."""
    LAYOUT: gl.constexpr = like.type.layout
    word = gl.arange(0, C.value_words, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    element = gl.expand_dims(gl.expand_dims(word, 0), 2) * C.planes + PLANE
    inside = gl.expand_dims(exists, 1) & (element < C.value_dim)
    return gl.load(gl.expand_dims(at, 1) + element, mask=inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def joined(o0, o1, o2, o3, line, exists, parts, opener, closer, C: gl.constexpr):
    """The rows of a tile whose parts some shares left, folded in ascending order.

    Other programs left them, so they are read past the first cache.

    Args:
        o0, o1, o2, o3: planes of any values, float32 [kv_heads, words, columns].
        line, exists: of each column [kv_heads, columns]: its line in a part, whether it is a row.
        parts: see ``decode_attend.attend_all``.
        opener, closer: first and last share.

    Returns:
        Planes, peak and total, as ``decode_attend.attend`` does.
    """
    peak = gl.full(line.shape, LOWEST, gl.float32, layout=line.type.layout)
    total = gl.full(line.shape, 0.0, gl.float32, layout=line.type.layout)
    o0 = gl.full(o0.shape, 0.0, gl.float32, layout=o0.type.layout)
    o1, o2, o3 = o0, o0, o0
    for share in range(opener, closer + 1):
        slot = 2 * share + (share == opener).to(gl.int32)
        at = line + slot.to(gl.int64) * (C.kv_heads * C.columns)
        lse = gl.load(parts[1] + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
        at = parts[0] + at * C.value_dim
        new_peak = gl.maximum(peak, lse)
        decay = gl.exp2(peak - new_peak)
        weight = gl.exp2(lse - new_peak)
        total = total * decay + weight
        peak = new_peak
        decay, weight = gl.expand_dims(decay, 1), gl.expand_dims(weight, 1)
        o0 = o0 * decay + _load(o0, at, exists, 0, C) * weight
        if C.planes >= 2:
            o1 = o1 * decay + _load(o0, at, exists, 1, C) * weight
        if C.planes == 4:
            o2 = o2 * decay + _load(o0, at, exists, 2, C) * weight
            o3 = o3 * decay + _load(o0, at, exists, 3, C) * weight
    return o0, o1, o2, o3, peak, total


@gluon.jit
def finish(
    o0, o1, o2, o3, factor, lse, token, query_head, exists, sinks, value_scale, value_factor,
    out_to, lse_to, C: gl.constexpr,
):  # fmt: skip
    """Write rows: planes times a factor of each column; others as `attend_all` takes them."""
    factor = factor * value_scale
    if value_factor is not None:
        factor *= gl.load(value_factor).to(gl.float32)
    if sinks is not None:
        sink = gl.load(sinks + query_head, mask=exists, other=0.0) * LOG2_E
        factor = factor / (1.0 + gl.exp2(sink - lse))
    at = out_to[0] + token * out_to[1] + query_head * out_to[2]
    store_all(o0, o1, o2, o3, factor, at, exists, C)
    if lse_to[0] is not None:
        lse_at = lse_to[0] + token * lse_to[1] + query_head * lse_to[2]
        gl.store(lse_at, lse * LN_2, mask=exists)
