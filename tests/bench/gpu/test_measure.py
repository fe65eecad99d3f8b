"""All contenders of GPU benchmarks compute the same; who cannot is listed with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pageant.bench.cases import Case
from pageant.bench.gpu import measure as module
from pageant.bench.gpu.cases import DECODE_CASES, PREFILL_CASES
from pageant.bench.gpu.measure import contenders, measure, num_calls
from pageant.bench.gpu.peers import PEERS
from pageant.bench.gpu.setting import L2_BYTES, MOST_COPIES, Contender, Setting
from pageant.bench.results import Result
from tests.bench.gpu import libraries

SIZES: dict[str, Any] = {"q_heads": 8, "kv_heads": 2, "head_dim": 16, "page_size": 4}
CPU = torch.device("cpu")
DECODES = (
    Case(name="dec plain", lengths=((1, 21),) * 3, **SIZES),
    Case(name="dec ragged", lengths=((1, 1), (1, 30), (1, 8)), **SIZES),
    Case(name="dec drafts", lengths=((4, 21),) * 2, drafts=3, **SIZES),
    Case(name="dec fp8", lengths=((1, 21), (1, 8)), format="fp8_e4m3", **SIZES),
    Case(name="dec int8", lengths=((1, 21),), format="int8", **SIZES),
    Case(name="dec nvfp4", lengths=((1, 21),), format="nvfp4", **SIZES),
)
PREFILLS = (
    Case(name="pre plain", lengths=((19, 19),) * 2, **SIZES),
    Case(name="pre ragged", lengths=((19, 19), (7, 7)), **SIZES),
    Case(name="pre chunk", lengths=((9, 30),), **SIZES),
    Case(name="pre free", lengths=((19, 19),), causal=False, **SIZES),
    Case(name="pre window", lengths=((19, 19),), window=5, **SIZES),
    Case(name="pre cap", lengths=((19, 19),), soft_cap=2.0, **SIZES),
)
REFUSED = {
    "dec plain": {"flashinfer-fa2"},
    "dec ragged": {"flashinfer-fa2"},
    "dec drafts": {"flashinfer-decode-tc"},
    "dec fp8": {"flashinfer-fa2"},
    "dec int8": {"fa3", "flashinfer-decode-tc", "flashinfer-xqa", "flashinfer-fa2"},
    "dec nvfp4": {"fa3", "flashinfer-xqa", "flashinfer-fa2"},
    "pre plain": set(),
    "pre ragged": {"sdpa-flash2"},
    "pre chunk": {"sdpa-flash2"},
    "pre free": set(),
    "pre window": {"sdpa-flash2"},
    "pre cap": {"fa3", "sdpa-flash2"},
}


@pytest.mark.parametrize("case", [*DECODES, *PREFILLS], ids=lambda case: case.name)
def test_contenders_agree_with_the_truth(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)
    monkeypatch.setattr(module, "MOST_CALLS", 1)
    bench = "decode" if case in DECODES else "prefill"
    results = {each.contender: each for each in measure(bench, case, 1, (), CPU)}
    assert list(results) == [f"pageant {case.own_format}", *PEERS[bench]]
    refused = {name for name, each in results.items() if each.why is not None}
    assert refused - {"sdpa-cudnn"} == REFUSED[case.name]
    for name, each in results.items():
        if each.why is None:
            assert each.error is not None, name
            assert each.error < (5e-2 if (name, case.name) == ("fa3", "dec fp8") else 4e-3), name
            assert each.median_ms is not None, name
            assert each.planned_ms is not None, name
            plans = not name.startswith(("fa3", "sdpa", "flashinfer-xqa"))
            # Of one replay on a busy machine: which takes longer is chance, not what was timed.
            assert (each.planned_ms != each.median_ms) == plans, name


def test_missing_libraries_are_listed() -> None:
    results = {each.contender: each.why for each in measure("decode", DECODES[0], 1, (), CPU)}
    assert results["pageant bf16"] is None
    for name in ("fa3", "flashinfer-decode-tc", "flashinfer-xqa"):
        assert "cannot be imported" in str(results[name])


def scaled(factors: list[float]) -> Callable[[Setting], Contender]:
    """Right results times a factor of each copy."""

    def make(setting: Setting) -> Contender:
        run = setting.pageant().run
        return Contender(lambda copy: run(copy) * factors[copy % len(factors)])

    return make


@pytest.mark.parametrize("factors", [[1.2], [1.0, 1.2], [1.0, float("nan")], [float("nan"), 1.0]])
def test_wrong_results_have_no_time(monkeypatch: pytest.MonkeyPatch, factors: list[float]) -> None:
    monkeypatch.setitem(PEERS["decode"], "fa3", scaled(factors))
    (result,) = measure("decode", DECODES[0], 1, ["fa3"], CPU)
    assert result.median_ms is None
    assert str(result.why).startswith("wrong results: a relative error of ")


def test_a_peers_failure_is_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)
    (result,) = measure("prefill", PREFILLS[5], 1, ["fa3"], CPU)
    said = "RuntimeError: This flash attention build does not support tanh softcapping."
    assert result == Result(case="pre cap", contender="fa3", why=said)


def test_a_bug_of_ours_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Setting) -> Contender:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Setting, "pageant", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        measure("decode", DECODES[0], 1, (), CPU)


def test_every_copy_is_run_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def make(setting: Setting) -> Contender:
        run = setting.pageant().run
        return Contender(lambda copy: (seen.append(copy), run(copy))[1])

    monkeypatch.setitem(PEERS["decode"], "fa3", make)
    measure("decode", DECODES[0], 1, ["fa3"], CPU)
    counts = {seen.count(copy) for copy in range(MOST_COPIES)}
    assert len(counts) == 1


@pytest.mark.parametrize("case", [*DECODE_CASES, *PREFILL_CASES], ids=lambda case: case.name)
def test_replays_pass_the_l2_cache_and_stay_short(case: Case) -> None:
    copies = min(MOST_COPIES, max(2, -(-int(L2_BYTES) // case.kv_bytes)))
    calls = num_calls(case, copies)
    assert copies >= 2
    assert calls % copies == 0
    assert copies == MOST_COPIES or copies * case.kv_bytes >= L2_BYTES
    assert calls <= module.MOST_CALLS
    milliseconds = calls * (case.kv_bytes / 4e9 + case.flops / 4e11)
    assert 0.1 < milliseconds < 25


def test_contenders_are_named_by_format() -> None:
    assert list(contenders("decode", DECODES[3])) == ["pageant fp8_e4m3", *PEERS["decode"]]
