"""What may be given for a scale: checked without reading a tensor's memory."""

from __future__ import annotations

import ctypes
import math
from numbers import Real

import torch

from pageant.types import Scalar, bad

# Types of a scale in a tensor that kernels load as they are.
LOADED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_finite(number: object) -> bool:
    """Whether a value is a real number (no bool) that float32 holds.

    >>> is_finite(2), is_finite(float("inf")), is_finite(1e39), is_finite(10**400), is_finite("2")
    (True, False, False, False, False)
    """
    if isinstance(number, bool) or not isinstance(number, Real):  # numpy's numbers are Real too
        return False
    try:
        return math.isfinite(_in_float32(float(number)))
    except OverflowError:
        return False


def check_scale(name: str, scale: Scalar) -> None:
    """Raise unless the scale is one real number, and if it is no tensor, above 0 in float32."""
    if not isinstance(scale, torch.Tensor):
        if not is_finite(scale) or not 0 < _in_float32(scale) < math.inf:
            allowed = "a number above 0 that float32 holds, or a tensor of one element"
            raise bad(name, scale, allowed)
        return
    if scale.layout != torch.strided or scale.is_meta or scale.is_complex():
        have = "a meta tensor" if scale.is_meta else f"a tensor of {scale.dtype}, {scale.layout}"
        raise bad(name, have, "a float, or a strided tensor that holds a real number")
    if scale.numel() != 1:
        raise bad(name, list(scale.shape), "a float, or a tensor of one element")
    if scale.dtype == torch.bool:
        raise bad(name, scale.dtype, "a float, or a tensor that holds a real number")
    if scale.requires_grad:
        raise bad(name, "a tensor that requires grad", "one that does not: detach it")


def _in_float32(scale: float) -> float:
    return ctypes.c_float(scale).value  # as numpy's, without setting what it warns of
