"""compute-sanitizer finds no access outside memory, in every format's decode, prefill and write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pageant.cache.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
FOUND = 17  # the exit status when accesses outside memory were found

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="no compute-sanitizer"),
]


def memcheck(what: str) -> subprocess.CompletedProcess[str]:
    """Run tests/gpu/memcheck.py under the tool; each tensor gets memory of its own."""
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND)]
    tool += ["--target-processes", "application-only", "--launch-timeout", "0"]
    done = subprocess.run(
        [*tool, sys.executable, "-m", "tests.gpu.memcheck", what],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("the tool does not support this device or its driver")
    return done


def test_a_planted_fault_is_found():
    done = memcheck("planted")
    assert done.returncode == FOUND, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Invalid __global__ write" in done.stdout


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_outside_memory_is_touched(format):
    done = memcheck(format)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
