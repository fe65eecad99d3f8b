"""Whether a row's kernel can be had: its module exists, and the packages it needs are installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pageant.select.row import Row

ROOT = Path(__file__).parents[2]

# Names of packages on the index where they differ from the name to import.
INSTALL = {"flashinfer": "flashinfer-python"}


def missing_here(row: Row) -> str | None:
    """What keeps the row from running on this machine, as a refusal says it; None if nothing.

    >>> from pageant.select.rows import ROWS
    >>> missing_here(ROWS[-1])
    """
    absent = next((package for package in row.packages if not is_installed(package)), None)
    if not is_built(row):
        return missing_anywhere(row)
    if absent is None:
        return None
    package = INSTALL.get(absent, absent)
    return f"needs {absent}, which is not installed; would run after `pip install {package}`"


def missing_elsewhere(row: Row) -> str | None:
    """The same for a machine we cannot look at: own kernels find there what they need.

    Another library counts as installed there if it is here.
    """
    return missing_anywhere(row) if row.owner in ("pageant", "reference") else missing_here(row)


def missing_anywhere(row: Row) -> str | None:
    """The same whatever is installed: only kernels that do not exist yet are missing."""
    if is_built(row):
        return None
    return f"is not built yet; would run once {row.kernel.partition(':')[0]} exists"


def never_missing(row: Row) -> str | None:
    """For what another library would choose, wherever it may be installed."""
    return None if row.owner == "flashinfer" else missing_anywhere(row)


@cache
def is_built(row: Row) -> bool:
    """Whether the module of the row's kernel exists; it is not imported."""
    module = ROOT.joinpath(*row.kernel.partition(":")[0].split("."))
    return module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()


@cache
def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return find_spec(package) is not None
