"""Values to stored elements and back: the definition every write and read kernel must equal.

Plain PyTorch, float32, IEEE division; runs on any device, on a GPU without waiting for it.

>>> codes, _ = quantize(torch.tensor([1000.0, -465.0, 0.1]), "fp8_e4m3")
>>> dequantize(codes, None, "fp8_e4m3").tolist()
[448.0, -448.0, 0.1015625]

A row with a scale of its own, and four-bit elements with one for each block of 16:

>>> codes, scales = quantize(torch.tensor([254.0, -128.0, 63.0]), "int8")
>>> codes.tolist(), scales.item()
([127, -64, 32], 2.0)
>>> codes, scales = quantize(torch.tensor([3.0, 1.0, -0.3, 0.0] + [0.0] * 12), "nvfp4")
>>> [f"{byte:02x}" for byte in codes[:2].tolist()], scales.tolist()
(['47', '09'], [0.5])
"""

from __future__ import annotations

import torch

from pageant.cache.formats import FORMATS, Format, resolve
from pageant.cache.scales import check_scale
from pageant.cache.tensors import FLOATS, check_tensor
from pageant.types import ArgumentError, Scalar, bad

Stored = tuple[torch.Tensor, torch.Tensor | None]  # elements, and scales where there are any

# Magnitudes between neighbours of e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6). A tie goes to the even code:
# the lower one at _TIES_LOW, the upper one at _TIES_HIGH.
_TIES_LOW, _TIES_HIGH = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: torch.Tensor, fmt: Format, scale: Scalar = 1.0) -> Stored:
    """Rows of `x` as the format stores them; design: "Writing".

    - 16 and 32 bits: a cast; the scale is ignored.
    - fp8: sat(x / scale), rounded to nearest even; NaN stays NaN.
    - one scale a row: scale = absmax / max_value, then the same; a row of zeros has scale 0.
    - nvfp4: see `_encode_blocks`.

    Args:
        x: [..., D], floating point.
        fmt: the cache format.
        scale: what reading multiplies by; formats with a scale a row ignore it.

    Returns:
        Elements [..., D] (nvfp4: uint8 [..., D / 2]); scales [...] for one a row, [..., blocks]
        for one a block, None for others.
    """
    if not fmt.quantized:
        return x.to(fmt.element_dtype), None
    values = x.float()
    if fmt.scale_block:
        return _encode_blocks(values, fmt, _as_tensor(scale, x.device))
    if fmt.scale_dtype is None:
        if isinstance(scale, torch.Tensor) or scale != 1.0:
            values = values / _as_tensor(scale, x.device)
        return _round(values, fmt), None
    scales = values.abs().amax(-1) / _as_tensor(fmt.max_value, x.device)
    values = (values / scales[..., None]).masked_fill(scales[..., None] == 0, 0.0)
    return _round(values, fmt), scales


def _as_tensor(scale: Scalar, device: torch.device) -> torch.Tensor:
    """float32 [] on the device: by a number, GPUs would divide less exactly.

    What the host knows is filled in: a copy would wait.
    """
    if isinstance(scale, torch.Tensor) and scale.device == device:
        return scale.reshape(()).to(torch.float32)
    if isinstance(scale, torch.Tensor) and not scale.is_cpu:
        return scale.reshape(()).to(device=device, dtype=torch.float32)
    return torch.full((), float(scale), dtype=torch.float32, device=device)


def _round(values: torch.Tensor, fmt: Format) -> torch.Tensor:
    """To nearest, ties to even, saturating. A float's NaN is stored as 0x7f, as GPUs do."""
    bounded = values.clamp(-fmt.max_value, fmt.max_value)
    if fmt.exponent_bits == 0:  # of integers, a NaN is kept by the scale
        return bounded.round().nan_to_num(0.0).to(fmt.element_dtype)
    codes = bounded.to(fmt.element_dtype).view(torch.uint8)
    return codes.masked_fill_(values.isnan(), 0x7F).view(fmt.element_dtype)


def _encode_blocks(x: torch.Tensor, fmt: Format, factor: torch.Tensor) -> Stored:
    """nvfp4: scale s = e4m3((absmax / 6) / factor) a block, element e2m1(x / (s * factor)).

    A block of scale 0 is stored as zeros, one that holds a NaN gets a NaN for its scale. 4over6
    also tries absmax / 4 and keeps it where the block's squared error is strictly smaller. So that
    every device decides alike, that error has one definition in float32: d = x - value * (s *
    factor), each d * d rounded, then halves added: 8 and 8, 4 and 4, 2 and 2, 1 and 1.
    """
    scale_format = FORMATS["fp8_e4m3"]
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % fmt.scale_block))
    blocks = blocks.unflatten(-1, (-1, fmt.scale_block))
    absmax = blocks.abs().amax(-1)
    best: tuple[torch.Tensor, ...] = ()
    for top in fmt.block_tops:
        scales = _round(absmax / _as_tensor(top, x.device) / factor, scale_format)
        step = (scales.float() * factor)[..., None]
        codes = _e2m1_codes(blocks / step).masked_fill(scales.float()[..., None] == 0, 0)
        if len(fmt.block_tops) == 1:
            best = codes, scales
            break
        error = _squared_error(blocks, _e2m1_values(codes, torch.float32) * step)
        if best:
            keep = error < best[2]
            stored = torch.where(keep, scales.view(torch.uint8), best[1].view(torch.uint8))
            codes = torch.where(keep[..., None], codes, best[0])
            scales = stored.view(scales.dtype)
            error = torch.where(keep, error, best[2])
        best = codes, scales, error
    flat = best[0].flatten(-2)[..., : x.shape[-1]]
    return flat[..., 0::2] | (flat[..., 1::2] << 4), best[1]


def _e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """uint8: sign in bit 3, magnitude in bits 0 to 2; to nearest, ties to even, saturating."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for bound in _TIES_LOW:
        code += size > bound
    for bound in _TIES_HIGH:
        code += size >= bound
    return code.masked_fill(x.isnan(), 0)


def _e2m1_values(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    sizes = torch.zeros(8, dtype=dtype, device=codes.device)
    for code, size in enumerate(_E2M1):
        sizes[code].fill_(size)  # a copy from the host would wait
    return torch.cat([sizes, -sizes])[codes.int()]


def _squared_error(x: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    squares = (x - stored).square()
    while squares.shape[-1] > 1:
        low, high = squares.chunk(2, -1)
        squares = low + high
    return squares[..., 0]


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    fmt: Format,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Stored rows as values of `dtype`, stored scales applied, before any scale of the layer.

    Args:
        codes: elements as `encode` returns them, or the same bytes in another type.
        scales: what `encode` returned beside them.
        fmt: the cache format.
        dtype: type of the result [..., D]; products are rounded to it once.
    """
    if scales is None:
        return codes.view(fmt.element_dtype).to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    factors = scales.to(exact)
    if not fmt.scale_block:
        return (codes.view(fmt.element_dtype).to(exact) * factors[..., None]).to(dtype)
    codes = codes.view(torch.uint8)
    values = _e2m1_values(torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2), exact)
    factors = factors.repeat_interleave(fmt.scale_block, -1)[..., : values.shape[-1]]
    return (values * factors).to(dtype)


def quantize(x: torch.Tensor, format: str, scale: Scalar = 1.0) -> Stored:
    """Codes and scales as a cache of this format would hold them.

    Args:
        x: [..., D], floating point; nvfp4: D a multiple of 2.
        format: a cache format's name.
        scale: per-tensor factor that reading multiplies by.

    Returns:
        The stored elements ([..., D]; nvfp4 uint8 [..., D / 2]), and the stored scales: float32
        [...] for one a row, e4m3 [..., ceil(D / 16)] for nvfp4, None for formats without any.
    """
    check_tensor("x", x, (*FLOATS, torch.float64))
    check_scale("scale", scale)
    fmt = resolve(format, x.dtype)
    if fmt.scale_dtype is not None and (
        not x.shape or not x.shape[-1] or x.shape[-1] % fmt.per_byte
    ):
        raise bad("x", list(x.shape), f"[..., D], D a positive multiple of {fmt.per_byte}")
    return encode(x, fmt, scale)


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
    if not isinstance(codes, torch.Tensor) or codes.layout != torch.strided:
        raise bad("codes", type(codes).__name__, "a strided tensor of stored elements")
    check_scale("scale", scale)
    fmt = resolve(format, codes.dtype)
    if codes.element_size() != fmt.element_dtype.itemsize:
        raise bad("codes", codes.dtype, f"{fmt.element_dtype}, or bytes of the same size")
    if fmt.scale_dtype is None and scales is not None:
        raise ArgumentError(
            f"scales are given, but {fmt.name} stores none; allowed: None", "scales"
        )
    if fmt.scale_dtype is not None:
        if scales is None:
            raise bad("scales", None, f"the scales {fmt.name} stores beside its elements")
        size = codes.shape[-1] * fmt.per_byte if codes.dim() else 0
        want = [*codes.shape[:-1], *([fmt.num_scales(size)] if fmt.scale_block else [])]
        if list(scales.shape) != want or scales.element_size() != fmt.scale_dtype.itemsize:
            allowed = f"{fmt.scale_dtype} {want}"
            raise bad("scales", f"{scales.dtype} {list(scales.shape)}", allowed)
        scales = scales.view(fmt.scale_dtype)
    values = decode(codes, scales, fmt)
    return values * _as_tensor(scale, values.device) if fmt.uses_layer_scales else values
