"""Every kernel compiles for every architecture, within its shared memory; decode spills nothing.

The golden file says what each takes: a change of it is to be looked at, and written down by

    python tests/kernels/triton/compiled.py all > tests/golden/compiled.txt
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from pageant.device import Device

ROOT = Path(__file__).parents[3]
GOLDEN = (ROOT / "tests/golden/compiled.txt").read_text(encoding="utf-8").splitlines()
FAMILIES = sorted({line.split()[0] for line in GOLDEN[1:]})


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles(family: str) -> None:
    """In a process of its own: an unsupported instruction may abort the compiler's."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "tests/kernels/triton/compiled.py", family],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    names = {"plan_step", "_decode", "_prefill", "write_kernel"}
    names |= {"merge_kernel", "list_pages", "dequantize_kernel"}
    assert {kernel_of(line) for line in lines} >= names
    for line in lines:
        _registers, spilled, shared = map(int, line.split()[-3:])
        assert shared <= Device.of(family).shared_memory_bytes, line
        if kernel_of(line) == "_decode":
            assert spilled == 0, line
    if GOLDEN[0].startswith(f"triton {triton.__version__};"):
        assert lines == [line for line in GOLDEN if line.startswith(family)]


def test_every_family_is_there() -> None:
    assert len(FAMILIES) == 7


def kernel_of(line: str) -> str:
    return line.split()[-4]
