"""Which functions of a kernel are compiled on this machine, and which lie on disk already."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pageant.select.row import Row


@dataclass(frozen=True)
class Compiled:
    """The functions of one kernel that are compiled at their first use.

    Attributes:
        functions: how many there are; 0 for kernels in plain PyTorch.
        on_disk: how many have code on disk that fits the source as it is now.
        folder: where the code lies or will; None where nothing is kept.
    """

    functions: int
    on_disk: int
    folder: str | None

    def __str__(self) -> str:
        if not self.functions:
            return "nothing to compile"
        if self.on_disk == self.functions:
            return f"compiled, in {self.folder}"
        if self.folder is None:
            return "compiled anew by each process: no folder to keep it in"
        if self.on_disk:
            return f"{self.on_disk} of {self.functions} functions compiled, in {self.folder}"
        return f"will be compiled at first use, into {self.folder}"


def compiled(row: Row) -> Compiled:
    """The state of a row's kernel; its module is imported, nothing is compiled.

    Code on disk may still lack a variant, such as that of a cache format not used before.
    """
    return compiled_in(import_module(row.kernel.partition(":")[0]))


def compiled_in(module: Any) -> Compiled:
    """The state of the numba and Triton functions of a kernel's module and of its parts."""
    folders: list[str] = []
    on_disk: list[bool] = []
    for part in (module, *_parts(module)):
        source = Path(part.__file__)
        values = list(vars(part).values())
        numba = [f for f in values if hasattr(f, "py_func") and hasattr(f, "stats")]
        triton = [f for f in values if hasattr(f, "fn") and hasattr(f, "cache_key")]
        folders += [f.stats.cache_path for f in numba] + [str(_triton_cache())] * bool(triton)
        on_disk += [_numba_has(f, source) for f in numba] + [_triton_has(f, source) for f in triton]
    return Compiled(
        functions=len(on_disk),
        on_disk=sum(on_disk),
        folder=next((folder for folder in folders if folder), None),
    )


def _parts(module: ModuleType) -> list[ModuleType]:
    """Modules a kernel imports that are named after it: ``attention_walk`` of ``attention``."""
    values = [value for value in vars(module).values() if isinstance(value, ModuleType)]
    return [value for value in values if value.__name__.startswith(f"{module.__name__}_")]


def _numba_has(function: Any, source: Path) -> bool:
    """Whether there is an index of a function's code that is newer than its source."""
    if not function.stats.cache_path:
        return False
    code = function.py_func.__code__
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"{source.stem}.{function.py_func.__qualname__}-{code.co_firstlineno}.{python}*.nbi"
    return _has_newer(Path(function.stats.cache_path).glob(name), source)


def _triton_has(function: Any, source: Path) -> bool:
    """Whether there is some variant of a kernel that is newer than its source."""
    return _has_newer(_triton_cache().glob(f"*/{function.fn.__name__}.json"), source)


def _triton_cache() -> Path:
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path.home() / ".triton" / "cache"


def _has_newer(files: Iterable[Path], source: Path) -> bool:
    return any(file.stat().st_mtime >= source.stat().st_mtime for file in files)
