"""Every variant of the Gluon decode compiles within a program's shared memory.

The golden file says what each takes: a change of it is to be looked at, and written down by

    python tests/kernels/gluon/compiled.py > tests/golden/compiled_gluon.txt
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
GOLDEN = (ROOT / "tests/golden/compiled_gluon.txt").read_text(encoding="utf-8").splitlines()
MANY_COLUMNS = (
    "drafts",
    "64 a head",
)  # of which some do not fit into registers beside their queries


@pytest.mark.slow
def test_compiles() -> None:
    """In a process of its own: an unsupported instruction may abort the compiler's."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "tests/kernels/gluon/compiled.py"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    for line in lines[1:]:
        name, took = line[:18], line[18:].split()
        assert int(took[3]) <= Device.of("sm90").shared_memory_bytes, line
        if not any(word in name for word in MANY_COLUMNS):
            assert int(took[2]) <= 64, line  # none of it in the loop over keys
        if took[0] == "join_parts":
            continue
        assert all(int(part.partition(":")[2]) > 0 for part in took[6:]), line
    if GOLDEN[0].startswith(f"triton {triton.__version__};"):
        assert lines == GOLDEN
