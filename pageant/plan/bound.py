"""A Triton kernel bound to one kind of arguments: launched again, they are not looked at again.

Triton's own call finds out of every argument its type, and whether its value or address is a
multiple of 16, to look for the code that was compiled for such ones. For those of a decode that
takes five times as long as the launch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, driver

Grid = tuple[int, int, int]

Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Pool:
    """Where kernels are compiled while nothing is launched."""

    executor: Executor
    futures: dict[Key, Future[None]]


_POOL: ContextVar[_Pool | None] = ContextVar("pool", default=None)


@contextmanager
def compiling_only(executor: Executor) -> Iterator[dict[Key, Future[None]]]:
    """Within it nothing is launched; what would be is compiled by the executor.

    Gives the futures, one for each kernel and kind of arguments.
    """
    pool = _Pool(executor, {})
    before = _POOL.set(pool)
    try:
        yield pool.futures
    finally:
        _POOL.reset(before)


class Bound:
    """One kernel, compiled for arguments of certain kinds.

    Of later calls every argument has the type it had at first; numbers that were 1, and numbers
    and addresses that were multiples of 16, are so again, unless the kernel declares that it does
    not care (`do_not_specialize`, which reaches into no tuple). Where Triton interprets, nothing is
    compiled and all is passed on.

    Args:
        kernel: the kernel.
        args: its arguments: tensors, numbers, None, or tuples of such; constants last.
        device: where it runs.
        descriptors: of TMA, or None: what the kernel takes before `args`. They stay, so they are
            encoded once, and calls leave them out.
        **options: of the compiler (num_warps ..).

    Attributes:
        raw: makes of an argument what calls take: of tensors, where code was compiled, addresses.
    """

    raw: Callable[[Any], Any]
    _pending: tuple[Future[None], tuple[Any, ...]] | None

    def __init__(
        self,
        kernel: Any,
        args: tuple[Any, ...],
        device: torch.device,
        descriptors: tuple[TensorDescriptor | None, ...] = (),
        **options: Any,
    ) -> None:
        self._kernel, self._options, self._device = kernel, options, device
        self._descriptors = descriptors
        self.raw, self._pending = unchanged, None
        self._is_compiled = isinstance(kernel, JITFunction)
        if not self._is_compiled:
            return
        self.raw = _addresses
        pool = _POOL.get()
        if pool is None:
            self._compile(args)
            return
        key = (kernel, _kind((*descriptors, *args)), *options.items())
        if key not in pool.futures:
            pool.futures[key] = pool.executor.submit(self._compile, args)
        self._pending = pool.futures[key], args

    def _compile(self, args: tuple[Any, ...]) -> None:
        with torch.cuda.device(self._device):
            given = (*self._descriptors, *args)
            code = self._kernel.warmup(*given, grid=(1,), **self._options)
            self._run = code.run  # which loads the code
            encoded = self._descriptors
            if any(encoded):
                self._run, encoded = _encoded(code.run, encoded)
        about = code.function, code.packed_metadata
        self._before = (*about, None, None, None, *encoded)  # no hooks
        self._index = self._device.index
        self._current = driver.active.get_current_device
        self._stream = driver.active.get_current_stream

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Launch, with what `raw` makes of the arguments, on the device's current stream."""
        if _POOL.get() is not None:
            return
        if not self._is_compiled:
            self._kernel[grid](*self._descriptors, *args, **self._options)
            return
        if self._pending is not None:
            future, kinds = self._pending
            self._pending = None
            future.result()
            self._compile(kinds)
        if self._current() != self._index:
            with torch.cuda.device(self._index):
                self(grid, *args)
            return
        self._run(*grid, self._stream(self._index), *self._before, *args)


def _encoded(
    launcher: Any, descriptors: tuple[TensorDescriptor | None, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """A launcher that encodes no descriptors, and the arguments that these become.

    Triton wraps the function that launches in one that encodes them every time. A Triton that does
    it in another way is left to do so.
    """
    known = getclosurevars(launcher.launch) if isfunction(launcher.launch) else None
    if known is None or not {"launcher", "tensordesc_meta"} <= known.nonlocals.keys():
        return launcher, descriptors
    about = iter(known.nonlocals["tensordesc_meta"])
    encode = known.globals["make_tensordesc_arg"]
    lists = [[None] if one is None else encode(one, next(about)) for one in descriptors]
    launcher = copy.copy(launcher)
    launcher.launch = known.nonlocals["launcher"]
    return launcher, tuple([value for values in lists for value in values])


def unchanged(value: Any) -> Any:
    """An argument as Triton's own call takes it."""
    return value


def _addresses(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple([_addresses(part) for part in value]) if isinstance(value, tuple) else value


def _kind(value: Any) -> Any:
    """What of an argument decides about the code."""
    if isinstance(value, tuple):
        return tuple([_kind(part) for part in value])
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape, value.layout
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, value.bit_length() // 32
    return float if isinstance(value, float) else value
