"""The runner itself: what it says without a checkout; that every rule names a file it can take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.mark.parametrize(
    ("where", "files", "says"),
    [
        (None, [], "FLASHINFER_TESTS"),
        ("/nowhere", [], "FLASHINFER_TESTS"),
        ("checkout", ["attention/test_mla.py"], "attention/test_mla.py: unknown"),
    ],
)
def test_mistakes_exit_with_2(
    where: str | None, files: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "checkout/tests/attention").mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != "FLASHINFER_TESTS"}
    if where is not None:
        environment["FLASHINFER_TESTS"] = str(tmp_path / where)
    command = [sys.executable, str(RUN), *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stdout
