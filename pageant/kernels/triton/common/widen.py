"""Stored elements into numbers a product can take, exactly, on every architecture.

A format is known here by its bits: see `kind_of`. Scales that are stored with a row multiply
afterwards, where that is cheaper; scales of blocks multiply here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pageant.cache.formats import Format

PLAIN, E4M3, E5M2, INTEGER, E2M1 = (tl.constexpr(kind) for kind in range(5))
BLOCK = tl.constexpr(16)  # elements that share a scale in nvfp4


def kind_of(fmt: Format) -> int:
    """How `widen` reads the format.

    >>> from pageant.cache.formats import FORMATS
    >>> [kind_of(FORMATS[name]) for name in ("bf16", "fp8_e4m3_token_head", "int8", "nvfp4")]
    [0, 1, 3, 4]
    """
    if fmt.bits > 8:
        return int(PLAIN.value)
    by_exponent = {4: E4M3, 5: E5M2, 0: INTEGER, 2: E2M1}
    return int(by_exponent[fmt.exponent_bits].value)


@triton.jit
def widen(codes, KIND: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """Elements as DTYPE, without any scale.

    Args:
        codes: [...], numbers, int8, or bytes; of e2m1, one element a byte in its low half.
        KIND: of the format.
        NATIVE: whether the device converts fp8 itself.
        DTYPE: of the result.
    """
    if KIND == E4M3:
        if NATIVE:
            values = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
        else:
            values = e4m3_to_float32(codes).to(DTYPE)
    elif KIND == E5M2:
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    elif KIND == E2M1:
        # Exponent and mantissa land where float16's lowest are: 2 ** -14 of the value.
        bits = ((codes & 7).to(tl.uint16) << 9) | ((codes & 8).to(tl.uint16) << 12)
        values = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(DTYPE)
    else:
        values = codes.to(DTYPE)
    return values


@triton.jit
def e4m3_to_float32(codes):
    """The value of each byte; 0x7f and 0xff are NaN."""
    # Exponent and mantissa land where float16's lowest are: 2 ** -8 of the value.
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def widen_blocks(codes, scales, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """nvfp4 rows: value of each element times its block's scale, exact in DTYPE.

    Args:
        codes: uint8 [rows, SIZE / 2], two elements a byte, the even one low.
        scales: uint8 [rows, SIZE / 16], e4m3.
        SIZE: elements a row.
        DTYPE: of the result [rows, SIZE].
    """
    ROWS: tl.constexpr = codes.shape[0]
    elements = tl.interleave(codes & 15, codes >> 4)
    values = tl.reshape(widen(elements, E2M1, False, tl.float32), [ROWS, SIZE // BLOCK, BLOCK])
    values = values * e4m3_to_float32(scales)[:, :, None]
    return tl.reshape(values, [ROWS, SIZE]).to(DTYPE)
