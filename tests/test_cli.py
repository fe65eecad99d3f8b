"""The command line: answers on stdout; a mistake is one line on stderr and exit code 2."""

import errno
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pageant import __main__, __version__
from pageant.cli import main
from pageant.select.cases import DEFAULTS, answer_case

Capture = pytest.CaptureFixture[str]


def answer(capsys: Capture, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def mistake(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


def test_explain_text(capsys: Capture) -> None:
    assert main(["explain", "--sm", "90", "--cache", "fp8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("device  sm90 (H200)\n")
    assert "decode   triton.decode" in captured.out
    assert "is not built yet; would run once " in captured.out
    assert captured.err == ""


def test_explain_json(capsys: Capture) -> None:
    arguments = ["--sm", "cpu", "--cache", "fp8", "--sinks", "--window", "128", "--soft-cap", "30"]
    said = answer(capsys, "explain", *arguments, "--alibi", "--spec", "3", "--no-q-quant")
    assert said["decode"] == {"kernel": "cpu.decode", "q_dtype": "bfloat16"}
    assert said["decode_threshold"] == 4


def test_every_option_reaches_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    explain_case = Mock(return_value="")
    monkeypatch.setattr("pageant.select.explain_command.explain_case", explain_case)
    case = {
        "sm": "90", "q_heads": 12, "kv_heads": 4, "head_dim": 64, "v_head_dim": 32,
        "page_size": 48, "dtype": "float16", "cache": "fp8", "layout": "BHLNC", "dcp": 2,
        "window": 7, "soft_cap": 30.0, "spec": 3, "table_kernels": "off", "kernels": "reference",
    }  # fmt: skip
    valued = [f"--{key.replace('_', '-')}={value}" for key, value in case.items()]
    positive = ["sinks", "alibi", "non_causal_drafts", "adaptive", "invariant"]
    flags = [f"--{key.replace('_', '-')}" for key in positive]
    assert main(["explain", *valued, *flags, "--no-q-quant", "--no-cubins"]) == 0
    case |= dict.fromkeys(positive, True) | {"q_quant": False, "cubins": False}
    explain_case.assert_called_once_with(case)
    assert main(["explain"]) == 0
    explain_case.assert_called_with(DEFAULTS)


def test_explain_json_of_a_gpu_elsewhere(capsys: Capture) -> None:
    said = answer(capsys, "explain", "--sm", "90", "--dtype", "float16", "--adaptive")
    assert said["prefill"] == {"kernel": "triton.prefill", "q_dtype": "float16"}


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (["--invariant", "--kernels", "reference"], "invariant"),
        (["--sm", "90", "--kernels", "flashinfer", "--sinks", "--dcp", "2"], "sinks"),
        (["--sm", "90", "--kernels", "cpu.decode"], "sm"),
        (["--kernels", "flashinfer"], "sm"),
    ],
)
def test_configuration_nobody_serves_is_an_answer(
    capsys: Capture, arguments: list[str], argument: str
) -> None:
    said = answer(capsys, "explain", "--sm", "cpu", *arguments)
    assert (said["ok"], said["argument"]) == (False, argument)
    assert main(["explain", "--sm", "cpu", *arguments]) == 0
    assert f"refused: {said['reason']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--head-dim", "20"], "head_dim is 20; allowed: a multiple of 8 from 16 to 512"),
        (["--sm", "77"], "sm is '77'; allowed: cpu, sm75"),
        (["--dtype", "fp8"], "dtype is 'fp8'; allowed: float32, float16, bfloat16"),
        (["--cache", "fp7"], "cache is 'fp7'; allowed: auto, fp8, fp32"),
        (["--layout", "NHD"], "layout is 'NHD'; allowed: LBHNC"),
        (["--q-heads", "12"], "num_q_heads is 12; allowed: a positive multiple"),
        (["--dcp", "0"], "world is 0; allowed"),
        (["--soft-cap", "-1"], "soft_cap is -1.0; allowed"),
        (["--window", "-1"], "windows is (-1,); allowed"),
        (["--table-kernels", "maybe"], "table_kernels is 'maybe'; allowed: auto, on, off"),
        (["--kernels", "best"], "kernels is 'best'; allowed: auto, pageant"),
        (["--head-dim", "wide"], "Invalid value for '--head-dim'"),
        (["--frobnicate"], "--frobnicate"),
        (["--cases", "/nowhere/cases.jsonl"], "cannot be read"),
    ],
)
def test_mistake_is_one_line(capsys: Capture, arguments: list[str], words: str) -> None:
    assert words in mistake(capsys, "explain", *arguments)


def test_mistake_in_json_is_also_an_answer(capsys: Capture) -> None:
    assert main(["explain", "--head-dim", "20", "--json"]) == 2
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert (said["ok"], said["argument"]) == (False, "head_dim")
    assert captured.err == f"error: {said['reason']}\n"


def test_unknown_command_is_one_line(capsys: Capture) -> None:
    assert "frobnicate" in mistake(capsys, "frobnicate")


def test_cases_are_answered_in_order(capsys: Capture, tmp_path: Path) -> None:
    cases = [{"sm": "cpu", "spec": 3}, {"sm": 90}, {"sm": "cpu", "head_dim": 20}, {}]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, cases)) + "\n\n")
    assert main(["explain", "--cases", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [answer_case(case) for case in cases]


def test_options_are_what_cases_leave_out(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"sm": "90"}\n{"sm": "90", "kernels": "auto", "spec": 0}\n')
    assert main(["explain", "--kernels", "flashinfer", "--spec", "3", "--cases", str(path)]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["decode"]["kernel"] for answer in said] == ["flashinfer.xqa", "triton.decode"]
    assert [answer["decode_threshold"] for answer in said] == [4, 1]


def test_line_that_is_no_case_is_one_line_after_the_answers(
    capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "two\nlines.jsonl"
    path.write_text('{"sm": "cpu"}\n{"head_size": 64}\n')
    assert main(["explain", "--cases", str(path)]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"]
    assert captured.err.startswith(f"error: {tmp_path}/two lines.jsonl line 2: unknown key")
    assert captured.err.count("\n") == 1


def test_cases_are_quick(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    cases = itertools.product(
        range(70),
        ("80", "90", "100", "120"),
        ("auto", "fp8", "nvfp4"),
        (16, 128, 7),
        (64, 128, 512),
        (False, True),
        (0, 30.0),
    )
    keys = ("spec", "sm", "cache", "page_size", "head_dim", "sinks", "soft_cap")
    lines = [json.dumps(dict(zip(keys, case, strict=True))) for case in cases][:10_000]
    path.write_text("\n".join(lines))
    start = time.process_time()
    assert main(["explain", "--kernels", "flashinfer", "--cases", str(path)]) == 0
    assert time.process_time() - start < 6  # CPU seconds; about 2
    assert capsys.readouterr().out.count("\n") == 10_000


def test_reader_that_leaves_is_no_unreadable_file(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("{}\n")
    left = BrokenPipeError(errno.EPIPE, "Broken pipe")
    monkeypatch.setattr("typer.echo", Mock(side_effect=left))
    with pytest.raises(SystemExit):
        main(["explain", "--cases", str(path)])
    assert "cannot be read" not in capsys.readouterr().err


def test_help_names_every_command(capsys: Capture) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        text = capsys.readouterr().out
        for command in ("explain", "layout", "generate", "bench", "doctor"):
            assert command in text


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pageant {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--version"], 0, rf"pageant {re.escape(__version__)}\n", ""),
        (["explain", "--sm", "77"], 2, "", r"error: sm is '77'; allowed: cpu, .*\n"),
    ],
)
def test_module_runs_the_same_commands(arguments: list[str], code: int, out: str, err: str) -> None:
    command = [sys.executable, "-m", "pageant", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert re.fullmatch(out, done.stdout)
    assert re.fullmatch(err, done.stderr)


def test_explain_starts_quickly_and_needs_no_heavy_package() -> None:
    program = """if True:
        import sys, time, torch
        start = time.process_time()
        from pageant.__main__ import main
        code = main(["explain", "--sm", "90"])
        print("seconds", time.process_time() - start)
        print("heavy", {"transformers", "numba", "triton", "gguf", "flashinfer"} & {*sys.modules})
        sys.exit(code)
    """
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *_, seconds, heavy = done.stdout.splitlines()
    assert heavy == "heavy set()"
    assert float(seconds.split()[1]) < 2  # CPU seconds; about 0.5


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_missing_package_is_one_line(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert __main__.main(["explain"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: the command line needs {name}; pip install 'pageant[engine]'\n"
