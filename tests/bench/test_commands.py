"""The commands `pageant bench …`: JSON, files, exit codes, and one clear line for a mistake."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageant.bench import cases, commands, perplexity
from pageant.bench.cases import Case, Claim
from pageant.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = Case(name="small", lengths=((1, 9), (1, 9)), q_heads=2, kv_heads=1, head_dim=16)
SHORT = ("--tokens", "24", "--window", "16", "--calibrate", "8")


LOAD = functools.cache(commands.load)


@pytest.fixture(autouse=True)
def _small_cases_and_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "load", LOAD)
    claim = Claim(case="small", ours="pageant bf16", other="sdpa", most=1e9)
    monkeypatch.setattr(commands, "CPU_CASES", (SMALL, cases.CPU_CASES[0]))
    monkeypatch.setattr(commands, "CPU_CLAIMS", (claim, *cases.CPU_CLAIMS))


def test_cpu_as_json_and_in_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "results" / "cpu.json"
    only = ("--only", "sdpa", "--only", "pageant bf16", "--only", "sdpa is_causal")
    arguments = ["--case", "small", *only, "--rounds", "2", "--json", "--out", str(path)]
    assert main(["bench", "cpu", *arguments]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer == json.loads(path.read_text())
    assert (answer["bench"], answer["rounds"]) == ("cpu", 2)
    (case,) = answer["cases"]
    assert (case["name"], case["dtype"], case["lengths"]) == ("small", "bfloat16", [[1, 9]] * 2)
    found = {each["contender"]: each for each in answer["results"]}
    assert list(found) == ["pageant bf16", "sdpa", "sdpa is_causal"]
    assert found["sdpa is_causal"]["median_ms"] is None
    (claim,) = answer["claims"]
    ratio = found["pageant bf16"]["median_ms"] / found["sdpa"]["median_ms"]
    assert claim["ratio"] == pytest.approx(ratio)
    assert claim["holds"] is True
    for words in ("pageant bf16 / sdpa", "is_causal is another mask", "median ms"):
        assert words in captured.err


def test_perplexity_as_json_and_in_a_document(capsys: Capture, tmp_path: Path) -> None:
    document = tmp_path / "formats.md"
    document.write_text("# Formats\n")
    formats = ("--format", "fp8", "--format", "fp32", "--format", "fp8_e4m3")
    arguments = [*SHORT, *formats, "--check", "--json", "--write", str(document)]
    code = main(["bench", "perplexity", *arguments])
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert [each["format"] for each in answer["results"]] == ["fp8_e4m3", "fp32"]
    assert answer["text"] == {"tokens": 24, "window": 16, "calibrate": 8, "percentile": 100.0}
    for each in answer["results"]:
        assert each["difference"] < perplexity.SAME
    change = answer["results"][0]["change"]
    assert code == (1 if change > perplexity.BOUNDS["fp8_e4m3"] else 0)  # 24 tokens say little
    text = document.read_text()
    assert text.startswith("# Formats\n\n<!-- perplexity: ")
    assert f"\n| fp8_e4m3 | 11,520 | {answer['results'][0]['perplexity']:.3f} |" in text
    assert "over the first 24 tokens" in text
    assert "reference\n" not in text


@pytest.mark.parametrize(("bound", "code"), [(-1e9, 1), (1e9, 0)])
def test_check_exits_by_its_bounds(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, bound: float, code: int
) -> None:
    monkeypatch.setitem(perplexity.BOUNDS, "fp8_e4m3", bound)
    assert main(["bench", "perplexity", *SHORT, "--format", "fp8", "--check"]) == code
    assert ("of perplexity, at most" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cpu", "--case", "large"], "case is 'large'; allowed: small, decode 16x1k"),
        (["cpu", "--case", "small", "--only", "pageant"], "only is 'pageant'; allowed: pageant b"),
        (["cpu", "--rounds", "0"], "rounds is 0"),
        (["cpu", "--out", "/"], "out is '/'"),
        (["perplexity", "--tokens", "0"], "tokens is 0"),
        (["perplexity", "--window", "0"], "window is 0"),
        (["perplexity", "--calibrate", "-1"], "calibrate is -1"),
        (["perplexity", "--percentile", "0", *SHORT, "--format", "fp8"], "percentile is 0"),
        (["perplexity", "--format", "fp3"], "cache is 'fp3'"),
        (["perplexity", "--device", "tpu9"], "device is 'tpu9'"),
        (["perplexity", "--kernels", "fast", *SHORT], "kernels is 'fast'"),
        (["perplexity", "--model", "/no/such/model"], "model '/no/such/model' was not found"),
        (["perplexity", "--tokens", "99999999"], "tokens is 99999999"),
        (["perplexity", "--write", "/"], "write is '/'"),
        (["speed"], "No such command 'speed'"),
    ],
)
def test_a_mistake_is_one_line(capsys: Capture, arguments: list[str], said: str) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_help_imports_neither_transformers_nor_the_compiler() -> None:
    code = (
        "import sys; from pageant.cli import main\n"
        "assert main(['bench', 'perplexity', '--help']) == 0\n"
        "print([name for name in ('transformers', 'numba', 'torch._inductor') "
        "if name in sys.modules])"
    )
    root: Any = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
