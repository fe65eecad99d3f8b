"""Ranks as processes that talk through gloo, and one that ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(world: int, store: Path, action: str) -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.worker", str(rank), str(world), store, action],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        ended = [worker.communicate(timeout=150)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, ended, strict=True)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_agree_with_the_reference_and_each_other(world: int, tmp_path: Path) -> None:
    for rank, (code, text) in enumerate(start(world, tmp_path / "store", "check")):
        assert code == 0, text
        assert f"rank {rank} of {world}: all equal" in text


def test_a_rank_that_ends_is_missed(tmp_path: Path) -> None:
    *others, (last, _) = start(3, tmp_path / "store", "die")
    assert last == 0
    for rank, (code, text) in enumerate(others):
        assert code == 0, text
        opening = f"rank {rank} of 3 got no answer from the others: "
        (said,) = [line for line in text.splitlines() if line.startswith(opening)]
        # One sentence, which names no line of the library's source.
        assert not re.search(r"\.cc|\. |\.$", said)
