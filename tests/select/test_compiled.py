import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numba
import pytest

from pageant.select.compiled import Compiled, compiled, compiled_in
from pageant.select.rows import ROWS

SOURCE = """
import numba

@numba.njit(cache=True)
def double(x):
    return 2 * x

@numba.njit(cache=True)
def half(x):
    return x / 2
"""


def module_at(path: Path) -> ModuleType:
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module


def test_numba_functions_are_on_disk_once_called(tmp_path: Path) -> None:
    path = tmp_path / "arithmetic.py"
    path.write_text(SOURCE)
    module = module_at(path)
    before = compiled_in(module)
    assert (before.functions, before.on_disk) == (2, 0)
    assert str(before) == f"will be compiled at first use, into {before.folder}"
    assert module.double(2) == 4
    assert compiled_in(module).on_disk == 1
    assert str(compiled_in(module)).startswith("1 of 2 functions compiled, in ")
    assert module.half(2) == 1
    assert str(compiled_in(module)) == f"compiled, in {before.folder}"
    changed = path.stat().st_mtime + 10
    os.utime(path, (changed, changed))
    assert compiled_in(module).on_disk == 0


def test_functions_without_a_cache_are_compiled_anew() -> None:
    module = ModuleType("uncached")
    module.__file__ = __file__
    module.double = numba.njit(lambda x: 2 * x)  # type: ignore[attr-defined]
    assert str(compiled_in(module)) == ("compiled anew by each process: no folder to keep it in")


def test_triton_kernels_are_looked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("kernels")
    module.__file__ = __file__
    kernel = SimpleNamespace(fn=test_functions_without_a_cache_are_compiled_anew, cache_key="x")
    module.kernel = kernel  # type: ignore[attr-defined]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled_in(module) == Compiled(functions=1, on_disk=0, folder=str(tmp_path))
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / f"{kernel.fn.__name__}.json").write_text("{}")
    assert compiled_in(module).on_disk == 1


def test_kernels_in_plain_torch_have_nothing_to_compile() -> None:
    reference = next(row for row in ROWS if row.name == "reference.attention")
    assert str(compiled(reference)) == "nothing to compile"


def test_the_decode_kernel_of_the_cpu_is_compiled() -> None:
    decode = next(row for row in ROWS if row.name == "cpu.decode")
    assert compiled(decode).functions > 0
