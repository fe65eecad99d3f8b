"""A Triton kernel bound to one kind of arguments: launched again, they are not looked at again.

Triton's own call finds out of every argument its type, and whether its value or address is a
multiple of 16, to look for the code that was compiled for such ones. For those of a decode that
takes five times as long as the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import JITFunction, driver

Grid = tuple[int, int, int]


class Bound:
    """One kernel, compiled for arguments of certain kinds.

    Of later calls every argument has the type it had at first; numbers that were 1, and numbers
    and addresses that were multiples of 16, are so again, unless the kernel declares that it does
    not care. Where Triton interprets, nothing is compiled and all is passed on.

    Args:
        kernel: the kernel.
        args: its arguments: tensors, numbers, None, or tuples of such; constants last.
        device: where it runs.
        **options: of the compiler (num_warps ..).

    Attributes:
        raw: makes of an argument what calls take: of tensors, where code was compiled, addresses.
    """

    raw: Callable[[Any], Any]

    def __init__(
        self, kernel: Any, args: tuple[Any, ...], device: torch.device, **options: Any
    ) -> None:
        self._kernel, self._options = kernel, options
        self._code, self.raw = None, unchanged
        if isinstance(kernel, JITFunction):
            with torch.cuda.device(device):
                self._code = code = kernel.warmup(*args, grid=(1,), **options)
                self._run = code.run
            self._function, self._metadata = code.function, code.packed_metadata
            self._stream, self._index = driver.active.get_current_stream, device.index
            self._current = driver.active.get_current_device
            self.raw = _addresses

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch, with what `raw` makes of the arguments, on the device's current stream."""
        if self._code is None:
            self._kernel[grid](*args, **self._options)
            return
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                self(grid, *args)
            return
        about = (self._function, self._metadata, None, None, None)  # no hooks
        self._run(*grid, self._stream(self._index), *about, *args)


def unchanged(value: Any) -> Any:
    """An argument as Triton's own call takes it."""
    return value


def _addresses(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple([_addresses(part) for part in value]) if isinstance(value, tuple) else value
