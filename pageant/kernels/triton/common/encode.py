"""float32 values to stored elements, bit for bit what ``cache/quantize.py`` defines.

Integer arithmetic on the bits of a float: the same on every architecture, with or without
instructions for eight-bit floats, and in Triton's interpreter. A kernel that calls these must be
launched with ``enable_fp_fusion=False``: the definition rounds every product before it is added.
"""

import triton
import triton.language as tl

NAN_CODE = tl.constexpr(0x7F)  # of both eight-bit floats, whatever the sign
_INFINITY = tl.constexpr(0x7F800000)  # bits of float32; those of every NaN are above
_RINT = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no room for a fraction


@triton.jit
def _is_nan(x):
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > _INFINITY


@triton.jit
def small_float(
    x,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
):
    """int32 codes of float32 `x`: to nearest, ties to even, saturating at MAX; NaN becomes NAN."""
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    LEAST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # The float whose last place is the code's smallest step.
    STEP: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    bits = x.to(tl.int32, bitcast=True)
    bounded = tl.minimum(tl.abs(x), MAX)
    kept = bounded.to(tl.int32, bitcast=True)
    half = ((1 << (SHIFT - 1)) - 1) + ((kept >> SHIFT) & 1)
    normal = ((kept + half) >> SHIFT) - ((127 - BIAS) << MANTISSA_BITS)
    step = tl.full([], STEP, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (bounded + step).to(tl.int32, bitcast=True) - STEP
    code = tl.where(kept < LEAST_NORMAL, subnormal, normal)
    sign = (bits >> (31 - EXPONENT_BITS - MANTISSA_BITS)) & (1 << (EXPONENT_BITS + MANTISSA_BITS))
    return tl.where(_is_nan(x), NAN, code | sign)


@triton.jit
def to_e4m3(x):
    """int32 codes of float32 `x`, saturating at 448."""
    return small_float(x, 4, 3, 448.0, NAN_CODE)


@triton.jit
def to_e5m2(x):
    """int32 codes of float32 `x`, saturating at 57344."""
    return small_float(x, 5, 2, 57344.0, NAN_CODE)


@triton.jit
def to_e2m1(x):
    """int32 codes of float32 `x`, saturating at 6; NaN becomes 0."""
    return small_float(x, 2, 1, 6.0, 0)


@triton.jit
def to_int8(x):
    """int32 of float32 `x`: to nearest, ties to even, from -127 to 127; NaN becomes 0."""
    bounded = tl.minimum(tl.maximum(x, -127.0), 127.0)
    code = (bounded + _RINT).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(_is_nan(x), 0, code)


@triton.jit
def to_bf16(x):
    """uint16 bits of float32 `x` as bf16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(_is_nan(x), 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def cast(values, dtype: tl.constexpr):
    """Floats to another type of float, to nearest, ties to even."""
    if values.dtype == dtype:
        return values
    elif dtype == tl.bfloat16:
        return to_bf16(values.to(tl.float32)).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(tl.float32).to(dtype)


@triton.jit
def from_e4m3(code):
    """float32 values of int32 codes."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return _with_sign(value, code >> 7)


@triton.jit
def from_e2m1(code):
    """float32 values of int32 codes."""
    size = code & 7
    normal = ((size + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return _with_sign(value, code >> 3)


@triton.jit
def _with_sign(size, sign):
    """A magnitude and its sign, of which bit 0 counts; Triton's own minus loses that of zero."""
    return (size.to(tl.int32, bitcast=True) | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def absmax(x, AXIS: tl.constexpr):
    """Largest magnitude along an axis, NaN where there is one: as integers, NaN is the largest."""
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(size, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(scale):
    """float32 of a number, of what a pointer points to, or of None, which is 1."""
    if scale is None:
        return tl.full([], 1.0, tl.float32)
    else:
        given = scale  # the interpreter makes a tensor of a number where it is assigned
        if given.dtype.is_ptr():
            given = tl.load(given)
        return given.to(tl.float32)


@triton.jit
def encode_plain(
    x, scale, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX: tl.constexpr
):
    """int32 codes of x / scale in an eight-bit float; the scale as `load_scale` takes it."""
    if scale is not None:
        x = tl.div_rn(x, load_scale(scale))
    return small_float(x, EXPONENT_BITS, MANTISSA_BITS, MAX, NAN_CODE)


@triton.jit
def encode_rows(x, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr, MAX: tl.constexpr):
    """Rows with a scale each, absmax / MAX; without exponent bits, integers.

    Args:
        x: float32 [R, D], zeros past the row's end.

    Returns:
        int32 codes [R, D], float32 scales [R].
    """
    top = absmax(x, 1)
    scales = tl.div_rn(top, MAX)
    divisor = tl.broadcast_to(scales[:, None], x.shape)
    x = tl.where(divisor == 0.0, 0.0, tl.div_rn(x, divisor))
    if EXPONENT_BITS == 0:
        codes = to_int8(x)
    else:
        codes = small_float(x, EXPONENT_BITS, MANTISSA_BITS, MAX, NAN_CODE)
    return codes, scales


@triton.jit
def encode_blocks(x, factor, TOP: tl.constexpr, OTHER_TOP: tl.constexpr):
    """Blocks of nvfp4: scale s = e4m3((absmax / TOP) / factor), codes e2m1(x / (s * factor)).

    Args:
        x: float32 [R, B, 16], zeros past the row's end.
        factor: float32.
        OTHER_TOP: also tried, and kept where a block's squared error is smaller; 0 for none.

    Returns:
        int32 codes of elements [R, B, 16] and of scales [R, B].
    """
    top = absmax(x, 2)
    codes, scales, stored = _try_top(x, top, factor, TOP)
    if OTHER_TOP > 0.0:
        codes_2, scales_2, stored_2 = _try_top(x, top, factor, OTHER_TOP)
        keep = _squared_error(x, stored_2) < _squared_error(x, stored)
        codes = tl.where(tl.broadcast_to(keep[:, :, None], x.shape), codes_2, codes)
        scales = tl.where(keep, scales_2, scales)
    return codes, scales


@triton.jit
def _try_top(x, top, factor, TOP: tl.constexpr):
    """Codes of elements and of scales for a block's top, and the values that are stored."""
    scales = to_e4m3(tl.div_rn(tl.div_rn(top, TOP), factor))
    step = tl.broadcast_to((from_e4m3(scales) * factor)[:, :, None], x.shape)
    is_zero = tl.broadcast_to(((scales & 0x7F) == 0)[:, :, None], x.shape)
    codes = tl.where(is_zero, 0, to_e2m1(tl.div_rn(x, step)))
    return codes, scales, from_e2m1(codes) * step


@triton.jit
def _squared_error(x, stored):
    """float32 [R, B]: squares rounded, then halves added, 8 and 8 to 1 and 1."""
    R: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    difference = x - stored
    squares = tl.reshape(difference * difference, [R, B, 2, 8])
    squares = tl.reshape(tl.sum(squares, 2), [R, B, 2, 4])
    squares = tl.reshape(tl.sum(squares, 2), [R, B, 2, 2])
    return tl.sum(tl.sum(squares, 2), 2)


@triton.jit
def pack(codes, R: tl.constexpr, BYTES: tl.constexpr):
    """Four-bit codes two a byte, the even one low: uint8 [R, BYTES] of int32 [.., 2 R BYTES]."""
    low, high = tl.split(tl.reshape(codes, [R, BYTES, 2]))
    return (low | (high << 4)).to(tl.uint8)
