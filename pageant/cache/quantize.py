"""Values to stored elements and back: the definition every write and read kernel must equal.

Plain PyTorch, float32, IEEE division; runs on any device.

>>> codes, _ = quantize(torch.tensor([1000.0, -465.0, 0.1]), "fp8_e4m3")
>>> dequantize(codes, None, "fp8_e4m3").tolist()
[448.0, -448.0, 0.1015625]
"""

from __future__ import annotations

import torch

from pageant.cache.formats import Format, resolve
from pageant.types import Scalar


def encode(x: torch.Tensor, fmt: Format, scale: Scalar = 1.0) -> torch.Tensor:
    """Elements of `x` as the format stores them.

    Quantised: sat(x / scale) in float32, rounded to nearest even; NaN stays NaN. Others: a cast,
    and the scale is ignored.

    Args:
        x: any shape, floating point.
        fmt: the cache format.
        scale: what reading multiplies by.
    """
    if not fmt.quantized:
        return x.to(fmt.element_dtype)
    scaled = x.float()
    if isinstance(scale, torch.Tensor):
        scaled = scaled / scale.reshape(()).to(device=x.device, dtype=torch.float32)
    elif scale != 1.0:
        scaled = scaled / torch.tensor(scale, dtype=torch.float32, device=x.device)
    return scaled.clamp(-fmt.max_value, fmt.max_value).to(fmt.element_dtype)


def decode(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Stored elements as values of `dtype`, before any scale."""
    return codes.view(fmt.element_dtype).to(dtype)


def quantize(
    x: torch.Tensor, format: str, scale: Scalar = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales as a cache of this format would hold them.

    Args:
        x: [..., D], floating point.
        format: a cache format's name.
        scale: per-tensor factor that reading multiplies by.

    Returns:
        The stored elements, and the stored scales (None for formats without any).
    """
    return encode(x, resolve(format, x.dtype), scale), None


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor | None, format: str, scale: Scalar = 1.0
) -> torch.Tensor:
    """float32 values of stored elements: the inverse of `quantize` up to rounding.

    Args:
        codes: stored elements, in the format's element dtype or as bytes of the same size.
        scales: what `quantize` returned beside them; None for formats without any.
        format: a cache format's name.
        scale: per-tensor factor.
    """
    fmt = resolve(format, codes.dtype)
    if scales is not None:
        raise ValueError(f"scales are given, but {fmt.name} stores none; allowed: None")
    values = decode(codes, fmt)
    return values * scale if fmt.quantized else values
