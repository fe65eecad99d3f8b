"""Every kernel compiles for every architecture, within its shared memory; decode spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pageant.device import Device

ROOT = Path(__file__).parents[3]
# Widening costs registers; of 255, these bytes go to memory instead.
SPILLS = 64


@pytest.mark.parametrize("family", ["sm75", "sm80", "sm90", "sm100", "sm120"])
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
    said = [json.loads(line) for line in result.stdout.splitlines()]
    names = {"plan_step", "_decode", "_prefill", "write_kernel"}
    names |= {"merge_kernel", "list_pages", "dequantize_kernel"}
    assert {one["kernel"] for one in said} >= names
    for one in said:
        assert one["shared"] <= Device.of(family).shared_memory_bytes, one
        if one["kernel"] == "_decode" and family != "sm75":
            assert one["spilled"] <= (0 if one["case"] == "plain" else SPILLS), one
