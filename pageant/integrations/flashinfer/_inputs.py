"""What FlashInfer's callers hand over, in Pageant's words: names, layouts, caches, scales."""

from __future__ import annotations

import math

import torch

from pageant.integrations.flashinfer.absent import refuse
from pageant.types import Scalar

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]
DType = str | torch.dtype

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
LAYOUTS = ("NHD", "HND")
POS_MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FORMATS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.uint8: "nvfp4",
}


def dtype_of(given: DType) -> torch.dtype:
    """A type, named or itself.

    >>> dtype_of("float16"), dtype_of(torch.bfloat16)
    (torch.float16, torch.bfloat16)
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"data type is {given!r}; allowed: a torch.dtype or its name")
    return dtype


def format_of(kv_dtype: torch.dtype) -> str:
    """The cache format that a type of stored elements stands for; uint8 is packed nvfp4."""
    if kv_dtype not in FORMATS:
        allowed = ", ".join(map(str, FORMATS))
        raise ValueError(f"kv_data_type is {kv_dtype}; allowed: {allowed}")
    return FORMATS[kv_dtype]


def check_layout(kv_layout: str) -> str:
    """The layout's name; KeyError for others, as FlashInfer raises."""
    if kv_layout not in LAYOUTS:
        raise KeyError(f"kv_layout is {kv_layout!r}; allowed: {', '.join(LAYOUTS)}")
    return kv_layout


def check_pos_mode(mode: str) -> str:
    """The position mode's name; KeyError for others, as FlashInfer raises."""
    if mode not in POS_MODES:
        raise KeyError(f"pos_encoding_mode is {mode!r}; allowed: {', '.join(POS_MODES)}")
    return mode


def check_no_rope(mode: str) -> bool:
    """Whether ALiBi is on, for keys in pages, which cannot be rotated."""
    if check_pos_mode(mode) == "ROPE_LLAMA":
        refuse("pos_encoding_mode='ROPE_LLAMA' over pages")
    return mode == "ALIBI"


def sides(cache: Cache, kv_layout: str) -> Pair:
    """Keys and values [P, N, Hkv, ..] of a paged cache, or of its scales, as views.

    Args:
        cache: two tensors [P, N, Hkv, ..] (HND: [P, Hkv, N, ..]), or one [P, 2, ..] of both; for
            pages of one token the axis N may be left out.
        kv_layout: "NHD" or "HND".

    Raises:
        KeyError: for anything else.

    >>> k, v = sides(torch.zeros(5, 2, 3, 16, 64), "HND")
    >>> k.shape, k.stride()
    (torch.Size([5, 16, 3, 64]), (6144, 64, 1024, 1))
    """
    axis = 1 if check_layout(kv_layout) == "NHD" else 2
    if isinstance(cache, torch.Tensor):
        if cache.dim() not in (4, 5) or cache.shape[1] != 2:
            raise KeyError(f"paged_kv_cache has shape {list(cache.shape)}; allowed: [pages, 2, ..]")
        k, v = cache.unbind(1)
    elif isinstance(cache, tuple | list) and len(cache) == 2:
        k, v = cache
    else:
        raise KeyError(f"paged_kv_cache is a {type(cache).__name__}; allowed: a tensor or a pair")
    if k.dim() == v.dim() == 3:
        k, v = k.unsqueeze(axis), v.unsqueeze(axis)
    if k.dim() != 4 or v.dim() != 4:
        raise KeyError(f"paged_kv_cache has {k.dim()} axes a side; allowed: 4, or 3 without N")
    return (k, v) if axis == 1 else (k.transpose(1, 2), v.transpose(1, 2))


def rows(x: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """Contiguous keys or values as [n, Hkv, D], from [Hkv, n, D] if HND."""
    return x if check_layout(kv_layout) == "NHD" else x.transpose(0, 1)


def product(first: Scalar | None, second: Scalar | None) -> Scalar:
    """The product of two scales; None is 1. No tensor on a GPU is read."""
    if first is None or second is None:
        return second if first is None and second is not None else 1.0 if first is None else first
    return first * second


def to_number(scale: Scalar) -> Scalar:
    """A scale as a float, unless it lies on a GPU."""
    if isinstance(scale, torch.Tensor) and not scale.is_cpu:
        return scale
    return float(scale)


def window_of(window_left: int) -> int | None:
    """Pageant's window, which counts the token itself; None for -1, which means none.

    >>> window_of(-1), window_of(0), window_of(127)
    (None, 1, 128)
    """
    return None if window_left < 0 or window_left >= 2**31 - 1 else window_left + 1


def cap_of(logits_soft_cap: float | None) -> float | None:
    """Pageant's soft cap: None where FlashInfer has None or 0."""
    return logits_soft_cap if logits_soft_cap is not None and logits_soft_cap > 0 else None


def scale_of(sm_scale: float | None, head_dim: int) -> float:
    """The factor on q·k; None means one over the root of the head size."""
    return head_dim**-0.5 if sm_scale is None else float(sm_scale)


def check_rows(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless a tensor has this shape, type and place."""
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}; allowed: {list(shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} is of {x.dtype}; allowed: {dtype}, as planned")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; allowed: {device}")


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """float32 [H]: 2^(-8 k / n) for the power of two n within H; odd steps of 2n for the rest.

    >>> alibi_slopes(3, torch.device("cpu")).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    whole = 2 ** int(math.log2(num_heads))
    steps = torch.arange(num_heads, dtype=torch.float32, device=device)
    first = -8.0 / whole * (steps + 1)
    rest = -4.0 / whole * (2 * (steps - whole) + 1)
    return torch.exp2(torch.where(steps < whole, first, rest))


def rotated(x: torch.Tensor, positions: torch.Tensor, scale: float, theta: float) -> torch.Tensor:
    """Rows [T, H, D] turned by RoPE, LLaMA's halves: element i pairs with i + D / 2.

    Args:
        x: rows, of any floating type; computed in float32.
        positions: int [T].
        scale: positions are divided by it.
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float32, device=x.device)
    angles = positions.to(x.device)[:, None] / scale * theta ** (-steps / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.float().split(half, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)
