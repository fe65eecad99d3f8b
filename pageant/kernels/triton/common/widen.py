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
BLOCKS_FACTOR = tl.constexpr(128.0)  # makes values of what `widen_blocks` returns


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
        codes: [...], numbers, int8, or bytes.
        KIND: of the format; of e2m1, see `widen_blocks`.
        NATIVE: whether the device converts fp8 itself.
        DTYPE: of the result.
    """
    if KIND == E4M3:
        if NATIVE:
            values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            values = e4m3_to_float16(codes)
        if tl.bfloat16 == DTYPE:  # at once it takes the slowest of instructions
            values = values.to(tl.float32)
        values = values.to(DTYPE)
    elif KIND == E5M2:
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        values = codes.to(DTYPE)
    return values


@triton.jit
def e4m3_to_float16(codes):
    """The value of each byte; 0x7f and 0xff are NaN."""
    # Exponent and mantissa land where float16's lowest are: 2 ** -8 of the value.
    bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
    values = bits.to(tl.float16, bitcast=True) * tl.full([], 256.0, tl.float16)
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def widen_blocks(codes, scales, SIZE: tl.constexpr):
    """nvfp4 rows, 2 ** -7 of the values: each element times its block's scale, exact in float16.

    Args:
        codes: uint8 [rows, SIZE / 2], two elements a byte, the even one low.
        scales: uint8 [rows, SIZE / 16], e4m3.
        SIZE: elements a row.

    Returns:
        float16 [rows, SIZE]; see `BLOCKS_FACTOR`.
    """
    ROWS: tl.constexpr = codes.shape[0]
    # Exponent and mantissa land where float16's lowest are: 2 ** -14 of the value. A scale, up to
    # 448, can be multiplied by half of that and stay in range.
    wide = codes.to(tl.uint16)
    low = ((wide & 0x07) << 9) | ((wide & 0x08) << 12)
    high = ((wide & 0x70) << 5) | ((wide & 0x80) << 8)
    values = tl.interleave(low, high).to(tl.float16, bitcast=True)
    values = tl.reshape(values, [ROWS, SIZE // BLOCK, BLOCK])
    scales = e4m3_to_float16(scales) * tl.full([], 128.0, tl.float16)
    return tl.reshape(values * scales[:, :, None], [ROWS, SIZE])
