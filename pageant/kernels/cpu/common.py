"""What launchers of compiled code share: tensors as arrays it takes, and threads it runs in.

The threads are our own, for code that lets go of Python's lock. Numba's must not be entered by two
callers at once, and torch's run torch only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

STORAGE = {1: torch.uint8, 2: torch.uint16, 4: torch.float32}
PLAIN = (torch.float32, torch.int32)
SERIAL_COPY = 32767  # elements; torch shares larger copies among its threads


def flat(view: torch.Tensor) -> Array:
    """From the first element of a strided view to its last, in its storage type.

    >>> flat(torch.arange(12, dtype=torch.int32).view(3, 4)[:2, 1:3])
    array([1, 2, 3, 4, 5, 6], dtype=int32)
    """
    size = 0
    if view.numel() > 0:
        size = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    if view.dtype not in PLAIN:
        view = view.view(STORAGE[view.element_size()])
    array: Array = view.as_strided((size,), (1,)).numpy()
    return array


def as_float32(source: torch.Tensor) -> torch.Tensor:
    """The same numbers, contiguous."""
    if source.dtype == torch.float32 and source.is_contiguous():
        return source
    target = torch.empty(source.shape, dtype=torch.float32)
    copy(target, source)
    return target


def float32_rows(target: torch.Tensor, num_rows: int) -> torch.Tensor:
    """`target` itself if compiled code can write it, else room for rows to be copied there."""
    if target.dtype == torch.float32 and target.is_contiguous():
        return target
    return torch.empty(num_rows, *target.shape[1:], dtype=torch.float32)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[:] = source, in this thread alone.

    Torch's threads spin for a while after work, on the cores that ours are to use next.
    """
    rows = max(1, SERIAL_COPY // max(1, source[:1].numel()))
    for into, piece in zip(target.split(rows), source.split(rows), strict=True):
        into.copy_(piece)


def run_shares(
    function: Callable[..., Any], shares: Iterable[Any], workers: int, *arguments: Any
) -> None:
    """function(share, *arguments) for every share, in this thread and workers - 1 beside it.

    Whoever is free takes the next share: torch's threads may be spinning on any core.

    >>> done = []
    >>> run_shares(lambda share, factor: done.append(share * factor), [1, 2, 3], 2, 10)
    >>> sorted(done)
    [10, 20, 30]
    """
    waiting = deque(shares)

    def work() -> None:
        while True:
            try:
                share = waiting.popleft()
            except IndexError:
                return
            function(share, *arguments)

    helpers = [_pool().submit(work) for _ in range(min(workers, len(waiting)) - 1)]
    try:
        work()
    finally:
        for helper in helpers:
            if not helper.cancel():  # it has begun
                helper.result()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """One for the process, made when first needed."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pageant")


if hasattr(os, "register_at_fork"):  # a forked process has the pool, but none of its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
