"""What a format stores, by its definition: numpy in float32, one row at a time, by brute force.

Nothing here is shared with the package: element tables are worked out bit by bit, and a value is
stored as the nearest of all of them, ties to the even code.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
QUIET = {"divide": "ignore", "over": "ignore", "under": "ignore", "invalid": "ignore"}
TOPS = {"nvfp4": (6.0,), "nvfp4_4over6": (6.0, 4.0)}


def float_table(exponent_bits: int, mantissa_bits: int, specials: str) -> np.ndarray:
    """float64 value of every code of a small float.

    Args:
        exponent_bits, mantissa_bits: of the code, beside its sign.
        specials: "none"; "nan" if all ones is the only NaN; "ieee" if the top exponent is theirs.
    """
    values = []
    bias, top = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    for code in range(1 << (1 + exponent_bits + mantissa_bits)):
        sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
        exponent, mantissa = code >> mantissa_bits & top, code & ((1 << mantissa_bits) - 1)
        is_last = exponent == top and mantissa == (1 << mantissa_bits) - 1
        if specials == "ieee" and exponent == top:
            values.append(sign * np.inf if mantissa == 0 else np.nan)
        elif specials == "nan" and is_last:
            values.append(np.nan)
        elif exponent == 0:
            values.append(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            fraction = 1 + mantissa / (1 << mantissa_bits)
            values.append(sign * fraction * 2.0 ** (exponent - bias))
    return np.array(values)


E2M1 = float_table(2, 1, "none")
TABLES = {"fp8_e4m3": float_table(4, 3, "nan"), "fp8_e5m2": float_table(5, 2, "ieee")}
TABLES["fp8_e4m3_token_head"] = TABLES["fp8_e4m3"]


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """uint8 code of the finite value nearest to each x; ties to even, NaN to the highest code."""
    half = len(table) // 2
    sizes = np.where(np.isfinite(table[:half]), table[:half], np.nan)
    distance = np.abs(np.minimum(np.abs(x), np.nanmax(sizes)).astype(np.float64)[:, None] - sizes)
    # Of two neighbours at the same distance one code is even; a half step can only favour it.
    order = np.lexsort((np.arange(half)[None] % 2 + 0 * distance, distance))
    code = order[:, 0] + half * np.signbit(x)
    return np.where(np.isnan(x), half - 1, code).astype(np.uint8)


def stored(x: np.ndarray, name: str, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of one row's elements, and bytes of its scales.

    Args:
        x: float32 [D].
        name: a quantised format.
        scale: the layer's.
    """
    scale = F32(scale)
    with np.errstate(**QUIET):
        if name in TOPS:
            return _nvfp4(x, name, scale)
        if name in ("fp8_e4m3", "fp8_e5m2"):
            return nearest(x / scale, TABLES[name]), np.empty(0, np.uint8)
        top = F32(127.0 if name == "int8" else 448.0)
        own = np.abs(x).max() / top
        values = x / own if own != 0 else np.zeros_like(x)
        if name == "int8":
            # numpy rounds halves to even too.
            codes = np.nan_to_num(np.rint(np.clip(values, -127, 127))).astype(np.int8)
            return codes.view(np.uint8), own[None].view(np.uint8)
        return nearest(values, TABLES[name]), own[None].view(np.uint8)


def _nvfp4(x: np.ndarray, name: str, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = [], []
    for first in range(0, len(x), 16):
        code, factor = _block(x[first : first + 16], TOPS[name], scale)
        codes.append(code)
        scales.append(factor)
    flat = np.concatenate(codes)
    return flat[0::2] | flat[1::2] << 4, np.array(scales, np.uint8)


def _block(
    x: np.ndarray, tops: tuple[float, ...], scale: np.float32
) -> tuple[np.ndarray, np.uint8]:
    """Elements and scale of one block; of several tops the first whose error is not beaten."""
    best, best_error = None, None
    for top in tops:
        factor = nearest((np.abs(x).max() / F32(top) / scale)[None], TABLES["fp8_e4m3"])[0]
        step = F32(TABLES["fp8_e4m3"][factor]) * scale
        code = np.zeros(len(x), np.uint8)
        if step != 0 and not np.isnan(step):
            code = np.where(np.isnan(x), 0, nearest(x / step, E2M1)).astype(np.uint8)
        error = _error(x - E2M1[code].astype(F32) * step)
        if best is None or error < best_error:
            best, best_error = (code, factor), error
    assert best is not None
    return best


def _error(difference: np.ndarray) -> np.float32:
    squares = np.zeros(16, F32)
    squares[: len(difference)] = difference * difference
    while len(squares) > 1:
        half = len(squares) // 2
        squares = squares[:half] + squares[half:]
    return squares[0]
