"""A few threads of our own, for compiled code that lets go of Python's lock.

Not numba's: those must not be entered by two callers at once. Not torch's: they run torch only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any


def run_shares(function: Callable[..., Any], shares: Sequence[Any], *arguments: Any) -> None:
    """function(share, *arguments) for every share: the first in this thread, the others beside it.

    >>> done = []
    >>> run_shares(lambda share, factor: done.append(share * factor), [1, 2, 3], 10)
    >>> sorted(done)
    [10, 20, 30]
    """
    waiting = [_pool().submit(function, share, *arguments) for share in shares[1:]]
    try:
        function(shares[0], *arguments)
    finally:
        for other in waiting:
            other.result()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """One for the process. Its tasks wait for nothing, so callers cannot block each other."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="pageant")


if hasattr(os, "register_at_fork"):  # a forked process has the pool, but none of its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
