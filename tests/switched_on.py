"""The Gluon decode, for tests, before its rows are switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pageant.select import choose
from pageant.select.built import is_built
from pageant.select.rows import ROWS

KERNEL = "pageant.kernels.gluon.decode:run_decode"


@contextmanager
def gluon_decode() -> Iterator[None]:
    """Within it the rows of the Gluon decode name their kernel."""
    mine = [row for row in ROWS if row.name.startswith("gluon_sm90.decode")]
    before = [row.kernel for row in mine]
    try:
        _name(mine, [KERNEL] * len(mine))
        yield
    finally:
        _name(mine, before)


def _name(rows: list[object], kernels: list[str]) -> None:
    for row, kernel in zip(rows, kernels, strict=True):
        object.__setattr__(row, "kernel", kernel)
    is_built.cache_clear()
    choose.has_kernels.cache_clear()
