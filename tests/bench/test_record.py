"""Where and when, beside the results; a file that cannot be written is found out at once."""

import json
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import numpy
import pytest
import torch

import pageant
from pageant.bench import record as module
from pageant.bench.record import check_writable, record, save


def test_says_what_a_reader_needs(tmp_path: Path) -> None:
    result = record("cpu", torch.device("cpu"), rounds=3, results=[{"ms": 1.5}])
    assert result["bench"] == "cpu"
    assert abs(datetime.now(timezone.utc) - datetime.fromisoformat(result["date"])).days == 0
    assert result["device"]["family"] == "cpu"
    assert result["device"]["name"]
    assert result["device"]["threads"] == torch.get_num_threads()
    assert result["versions"]["pageant"] == pageant.__version__
    assert result["versions"]["numpy"] == numpy.__version__
    assert (result["rounds"], result["results"]) == (3, [{"ms": 1.5}])
    path = tmp_path / "new" / "folder" / "cpu.json"
    check_writable("out", path)
    save(path, result)
    assert json.loads(path.read_text()) == result


def test_commit_of_the_checkout_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(root: Path) -> object:
        monkeypatch.setattr(module, "ROOT", root)
        return record("x", torch.device("cpu"))["commit"]

    assert commit(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--no-verify", "-m", "one")
    head = git("rev-parse", "HEAD")[:12]
    assert commit(tmp_path) == head
    (tmp_path / "inside").mkdir()
    assert commit(tmp_path / "inside") is None  # a package installed below some other checkout
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{head}+"


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below.json"):
        with pytest.raises(pageant.ArgumentError, match=r"^out is .*a file that can be written"):
            check_writable("out", path)
