"""Whether a value is a tensor that kernels can take, and which memory it lies in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pageant.types import bad

# What read or merged values may be: everything the package computes with.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str,
    x: object,
    dtypes: tuple[torch.dtype, ...],
    *,
    dims: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless `x` is a strided tensor of one of the types, that requires no grad.

    >>> check_tensor("q", [1.0], (torch.float32,))
    Traceback (most recent call last):
    pageant.types.ArgumentError: q is [1.0]; allowed: a tensor of torch.float32
    """
    if not isinstance(x, torch.Tensor):
        raise bad(name, _shown(x), f"a tensor of {_either(dtypes)}")
    if x.layout != torch.strided or x.is_nested:
        raise bad(name, "nested" if x.is_nested else x.layout, "a strided tensor")
    if x.dtype not in dtypes:
        raise bad(name, x.dtype, _either(dtypes))
    if dims is not None and x.dim() != dims:
        raise bad(name, f"a tensor of shape {list(x.shape)}", f"one of {dims} dimensions")
    if device is not None and x.device != device:
        raise bad(name, str(x.device), f"a tensor on {device}")
    if x.requires_grad:
        raise bad(name, "a tensor that requires grad", "one that does not: there is no backward")


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def _shown(x: object) -> object:
    """The value itself where that is short, otherwise what it is."""
    plain = x is None or isinstance(x, bool | int | float | str | list | tuple)
    return x if plain and len(repr(x)) <= 80 else f"a {type(x).__name__}"


def check_writable(name: str, x: torch.Tensor) -> None:
    """Raise for a tensor that torch would not let us write to."""
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise bad(name, "an inference tensor", "a normal one, or a call in torch.inference_mode()")


def span(x: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte a tensor's elements take, and of the byte after the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def spans_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory from first to last byte of one tensor meets the other's.

    >>> x = torch.zeros(4, 6)
    >>> spans_meet(x[:2], x[2:]), spans_meet(x[:, :3], x[:, 3:])
    (False, True)
    """
    (a_start, a_end), (b_start, b_end) = span(a), span(b)
    return a_start < b_end and b_start < a_end


def rows_meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether tensors of any strides share an element.

    >>> x = torch.zeros(4, 6)
    >>> rows_meet(x[:, :3], x[:, 3:]), rows_meet(x[:, :4], x[:, 3:])
    (False, True)
    """
    if not spans_meet(a, b):
        return False
    (a_starts, a_bytes), (b_starts, b_bytes) = _rows(a), _rows(b)
    before = np.searchsorted(b_starts, a_starts + a_bytes) - 1  # the last row that could reach in
    return bool(((before >= 0) & (b_starts[before] + b_bytes > a_starts)).any())


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two elements of a tensor are one in memory.

    >>> overlaps_itself(torch.zeros(1, 3).expand(2, 3)), overlaps_itself(torch.zeros(2, 4)[:, :3])
    (True, False)
    """
    if x.numel() == 0 or x.is_contiguous():
        return False
    starts, num_bytes = _rows(x)
    return bool((np.diff(starts) < num_bytes).any())


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether equal indices mean the same element in both, as far as both have them.

    >>> x = torch.zeros(4, 2, 6)
    >>> same_memory(x, x[:3]), same_memory(x, x[1:]), same_memory(x[:, :, :3], x)
    (True, False, False)
    """
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
        return False
    sizes = zip(a.shape, b.shape, a.stride(), b.stride(), strict=True)
    return all(max(m, n) <= 1 or step == other for m, n, step, other in sizes)


def _rows(x: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
    """Ascending addresses of the contiguous rows of a tensor, and the bytes of each."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.unsqueeze(-1)
    starts = np.array([x.data_ptr()], np.int64)
    for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        starts = (starts[:, None] + np.arange(size) * (step * x.element_size())).ravel()
    return np.sort(starts), x.shape[-1] * x.element_size()
