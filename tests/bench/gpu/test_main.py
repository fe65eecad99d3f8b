"""GPU benchmarks from end to end on the CPU: tables, files, pictures, and mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pageant.bench.cases import BEST, Case, Claim
from pageant.bench.gpu import cases, main, memory, planning, plot
from pageant.bench.gpu.ceilings import ceilings
from pageant.cli import main as command
from tests.bench.gpu import libraries

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
SIZES: dict[str, Any] = {"q_heads": 8, "kv_heads": 2, "head_dim": 16}
SMALL = {
    "decode": (
        Case(name="dec b64 4k", lengths=((1, 40),) * 2, **SIZES),
        Case(name="dec other", lengths=((1, 24),), **SIZES),
    ),
    "prefill": (Case(name="pre 1x16k", lengths=((24, 24),), **SIZES),),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "CASES", SMALL)
    monkeypatch.setattr(main, "ceilings", lambda device: ceilings(device, 1, 1 << 16, 32))
    monkeypatch.setattr(planning, "REQUESTS", (1, 3))
    monkeypatch.setattr(planning, "CALLS", 2)
    monkeypatch.setattr(memory, "WRITE_TOKENS", (5,))
    monkeypatch.setattr(memory, "MERGES", ((2, 5),))


def test_decode_in_a_file(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    path = tmp_path / "new" / "decode.json"
    answer = main.main("decode", path, rounds=1, device="cpu", commit="abc")
    assert json.loads(path.read_text()) == json.loads(json.dumps(answer))
    assert answer["bench"] == "decode"
    assert answer["command"] == "pageant bench decode --rounds 1"
    assert answer["commit"]
    assert set(answer["ceilings"]) == {"read_gbs", "bf16_tflops"}
    first, other = answer["cases"]
    assert (first["dtype"], first["format"], first["kv_bytes"]) == ("bfloat16", "bf16", 10240)
    assert first["measured_before"]["contender"] == "flashinfer-decode-tc"
    assert other["measured_before"] is None
    (claim,) = answer["claims"]
    assert claim["against"].startswith("flashinfer-")
    said = capsys.readouterr().out
    for words in ("GB/s read", "- fa3: flash_attn_interface cannot", "measured before (2026", "±"):
        assert words in said


def test_claims_without_peers_say_against_what(capsys: Capture) -> None:
    answer = main.main("decode", rounds=1, device="cpu", only=["pageant bf16"])
    (claim,) = answer["claims"]
    assert claim["against"] == "measured before"
    ratio = claim["ratio"] * answer["cases"][0]["measured_before"]["median_ms"]
    assert ratio == pytest.approx(answer["results"][0]["median_ms"])
    assert "| measured before |" in capsys.readouterr().out
    (claim,) = main.main("prefill", rounds=1, device="cpu", only=["pageant bf16"])["claims"]
    assert claim["against"] == "350 TFLOP/s"


def test_what_was_measured_before_a_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, path = main.measure, tmp_path / "decode.json"

    def fail(bench: str, case: Case, *others: Any) -> Any:
        if case.name == "dec other":
            raise RuntimeError("a bug")
        return measure(bench, case, *others)

    monkeypatch.setattr(main, "measure", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main.main("decode", path, rounds=1, device="cpu")
    assert [each["name"] for each in json.loads(path.read_text())["cases"]] == ["dec b64 4k"]


def test_the_other_benchmarks(tmp_path: Path, capsys: Capture) -> None:
    for bench in ("write", "merge", "plan"):
        arguments = ["bench", bench, "--device", "cpu", "--json", "--out", str(tmp_path / bench)]
        assert command(arguments) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer == json.loads((tmp_path / bench).read_text())
        ran = {each["contender"]: each for each in answer["results"] if each["why"] is None}
        missing = {each["contender"] for each in answer["results"] if each["why"] is not None}
        assert any(name.startswith("pageant") for name in ran)
        assert any(name.startswith("flashinfer") for name in missing)
        if bench == "write":
            assert set(ran) == {*(f"pageant {x}" for x in memory.WRITE_FORMATS), "index_copy_"}
            read = 2 * 5 * 8 * 128 * 2
            assert ran["index_copy_"]["num_bytes"] == 2 * read
            assert ran["pageant fp8_e4m3"]["num_bytes"] == read + read // 2
        if bench == "plan":
            names = ("plan_us", "plan_spread_us", "run_us", "run_spread_us", "device_us")
            for each in answer["results"]:
                assert all((each[name] is None) == (each["why"] is not None) for name in names)


def test_commands_take_cases_and_contenders(capsys: Capture) -> None:
    chosen = ["--case", "dec other", "--only", "pageant bf16", "--rounds", "1", "--device", "cpu"]
    assert command(["bench", "decode", "--json", *chosen]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    found = [(each["case"], each["contender"]) for each in answer["results"]]
    assert found == [("dec other", "pageant bf16")]
    assert "dec other" in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--device", "cpu", "--case", "x"], "case is 'x'; allowed: dec b64 4k, dec o"),
        (["prefill", "--device", "cpu", "--only", "x"], "only is 'x'; allowed: pageant bf16, fa3"),
        (["decode", "--device", "cpu", "--rounds", "0"], "rounds is 0"),
        (["write", "--device", "cpu", "--out", "/"], "out is '/'"),
        (["plan", "--device", "tpu9"], "device is 'tpu9'"),
        (["plot", "/no/such/file", "--out", "picture.png"], "result is '/no/such/file'"),
    ],
)
def test_a_mistake_is_one_line(capsys: Capture, arguments: list[str], said: str) -> None:
    assert command(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {said}")
    assert captured.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_it_says_so(capsys: Capture) -> None:
    assert command(["bench", "decode"]) == 2
    assert "no usable CUDA device" in capsys.readouterr().err


def test_without_the_command_lines_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'numba', 'matplotlib', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from pageant.bench.gpu.main import main\n"
        "try:\n    main('speed')\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    said = "bench is 'speed'; allowed: decode, prefill, write, merge, plan"
    assert done.stdout.strip() == said


ANSWER: dict[str, Any] = {
    "bench": "decode",
    "device": {"name": "H200"},
    "ceilings": {"read_gbs": 4000.0, "bf16_tflops": 700.0},
    "cases": [
        {"name": "dec x", "kv_bytes": 2e9, "num_bytes": 2.5e9, "flops": 5e9},
        {"name": "pre y", "kv_bytes": 2e9, "num_bytes": 2.5e9, "flops": 7e11},
        {"name": "dec z", "kv_bytes": 2e9, "num_bytes": 2.5e9, "flops": 5e9},
    ],
    "results": [
        {"case": "dec x", "contender": "pageant bf16", "median_ms": 1.0},
        {"case": "dec x", "contender": "slow", "median_ms": 4.0},
        {"case": "dec x", "contender": "fast", "median_ms": 2.0},
        {"case": "dec x", "contender": "absent", "median_ms": None},
        {"case": "pre y", "contender": "pageant bf16", "median_ms": 2.0},
        {"case": "dec z", "contender": "fast", "median_ms": 2.0},
    ],
}


def test_points_of_a_picture() -> None:
    found = {(point.case, point.contender): point for point in plot.points(ANSWER)}
    assert [*found] == [
        ("dec x", "pageant bf16"),
        ("dec x", "fast"),
        ("pre y", "pageant bf16"),
        ("dec z", "fast"),
    ]
    ours = found["dec x", "pageant bf16"]
    assert (ours.intensity, ours.tflops, ours.share, ours.is_ours) == (2.0, 5.0, 0.5, True)
    assert found["dec x", "fast"].share == 0.25
    assert found["pre y", "pageant bf16"].share == 0.5
    assert [plot.roof(x, ANSWER["ceilings"]) for x in (1.0, 1e4)] == [4.0, 700.0]


def test_without_matplotlib_a_picture_is_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    result = tmp_path / "decode.json"
    result.write_text(json.dumps(ANSWER))
    assert command(["bench", "plot", str(result), "--out", str(tmp_path / "x.png")]) == 2
    assert "matplotlib" in capsys.readouterr().err
    result.write_text('{"bench": "plan"}')
    assert command(["bench", "plot", str(result), "--out", str(tmp_path / "x.png")]) == 2
    assert "result is 'plan'" in capsys.readouterr().err


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    plot.draw(ANSWER, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_claims_of_the_cases_in_this_file_exist() -> None:
    names = {case.name for every in SMALL.values() for case in every}
    claims: list[Claim] = [one for every in cases.CLAIMS.values() for one in every]
    assert {claim.case for claim in claims} & names == {"dec b64 4k", "pre 1x16k"}
    assert {claim.other for claim in claims} == {BEST, "350 TFLOP/s"}


def test_a_picture_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^plot is .*nothing, for write"):
        main.main("write", plot=tmp_path / "x.png", device="cpu")
