"""Tests that say "cuda", on the CPU: devices are replaced; what has no counterpart is skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
NOT_RUN = "not run: needs a GPU"


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class OnCpu(TorchFunctionMode):
    """Calls of torch with every CUDA device replaced."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        named = {k: CPU if _is_gpu(v) else v for k, v in (kwargs or {}).items()}
        given = [CPU if _is_gpu(value) else value for value in args]
        if name == "to" and len(given) > 1 and type(given[1]) is int:
            given[1] = CPU
        if name == "to" and type(named.get("device")) is int:
            named["device"] = CPU
        if name == "cuda":
            return given[0]
        return func(*given, **named)


def _skip(*_: Any, **__: Any) -> Any:
    pytest.skip(NOT_RUN)


_generator = torch.Generator


class _Generator:
    """A CPU generator, whatever device it is asked for; a class, as annotations need."""

    def __new__(cls, device: Any = None) -> Any:
        return _generator()


def enter() -> None:
    """From now on this process computes on the CPU what is asked of a GPU."""
    OnCpu().__enter__()
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed"):
        setattr(cuda, name, lambda *_, **__: None)
    absent = ("CUDAGraph", "Stream", "Event", "graph", "current_stream", "get_device_properties")
    for name in absent:
        setattr(cuda, name, _skip)
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.is_available = lambda: True
    torch.Generator = _Generator  # type: ignore[misc]
    torch.compile = _skip
