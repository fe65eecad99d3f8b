"""Threads of our own after a fork, and errors in them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pageant.kernels.cpu.common import run_shares


@pytest.mark.parametrize("failing", range(3))
def test_an_error_in_any_share_is_raised(failing: int) -> None:
    done = []

    def work(share: int) -> None:
        if share == failing:
            raise ArithmeticError
        done.append(share)

    with pytest.raises(ArithmeticError):
        run_shares(work, range(3), 2)
    assert failing not in done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    script = (
        "import os; from pageant.kernels.cpu.common import run_shares\n"
        "run_shares(print, [1, 2], 2)\n"
        "child = os.fork()\n"
        "run_shares(print, [3, 4], 2)\n"
        "child and os._exit(os.waitpid(child, 0)[1])"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
