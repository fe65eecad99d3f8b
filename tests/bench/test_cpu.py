"""Every contender computes the same attention, and claims are judged by their ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pageant.api import Attention
from pageant.bench import cpu
from pageant.bench.cases import CPU_CASES, CPU_CLAIMS, Case, Claim
from pageant.bench.cpu import contenders, formats_for, measure
from pageant.bench.peers import PEERS
from pageant.bench.problem import Problem
from pageant.bench.results import Result, judge
from pageant.cache.formats import FORMATS, OF_DTYPE
from pageant.plan.batch import Batch
from pageant.plan.build import Plan

SIZES: dict[str, Any] = {"q_heads": 6, "kv_heads": 2, "head_dim": 16, "page_size": 4}
SMALL = (
    Case(name="decode", lengths=((1, 21),) * 3, **SIZES),
    Case(name="ragged", lengths=((1, 1), (1, 30), (1, 7)), **SIZES),
    Case(name="samples", lengths=((1, 261), (1, 300)) * 4, shared=256, **SIZES),
    Case(name="prefill", lengths=((9, 9),) * 2, **SIZES),
    Case(name="chunk", lengths=((5, 19),) * 2, dtype=torch.float32, **SIZES),
)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention as it is, without the seconds that compiling takes."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_contenders_agree_with_the_reference(case: Case) -> None:
    results = {each.contender: each for each in measure(case, rounds=1)}
    assert list(results) == [
        *(f"pageant {name}" for name in formats_for(case)),
        f"pageant {OF_DTYPE[case.dtype]} invariant",
        *[f"pageant {OF_DTYPE[case.dtype]} without sharing"] * (case.shared > 0),
        *PEERS,
    ]
    bound = 1e-5 if case.dtype == torch.float32 else 4e-3
    for name, each in results.items():
        if each.why is None:
            assert each.error is not None, name
            assert each.error < bound, name
            assert each.median_ms is not None, name
            assert each.fastest_ms is not None, name
            assert 0 < each.fastest_ms <= each.median_ms, name
    refused = {name for name, each in results.items() if each.why is not None}
    assert (
        refused
        == {
            "decode": {"sdpa is_causal"},
            "ragged": {"sdpa is_causal", "flex_attention"},
            "samples": {"sdpa is_causal", "flex_attention"},
            "prefill": set(),
            "chunk": {"sdpa is_causal"},
        }[case.name]
    )


def test_error_of_a_wrong_contender_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem) -> Any:
        right = PEERS["sdpa"](problem)
        return lambda: 1.1 * right()

    monkeypatch.setitem(cpu.PEERS, "wrong", wrong)
    (result,) = measure(SMALL[4], rounds=1, only=["wrong"])
    assert result.error == pytest.approx(0.1, rel=1e-3)


def test_a_format_reads_its_own_cache() -> None:
    """Coarse formats lie far from the values that they were given, yet have small errors."""
    case = SMALL[4]
    problem = Problem.of(case)
    exact = problem.attention("fp32")().clone()
    coarse = problem.attention("fp8_e5m2")()
    assert (coarse - exact).norm() / exact.norm() > 1e-2
    (result,) = measure(case, rounds=1, only=["pageant fp8_e5m2"])
    assert result.error is not None
    assert result.error < 1e-5


def test_without_a_compiler_flex_attention_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(function: object, **_: object) -> Any:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("\nNo working C++ compiler found\nmore")

        return fail

    monkeypatch.setattr(torch, "compile", compile)
    (result,) = measure(SMALL[0], rounds=1, only=["flex_attention"])
    assert result == Result(
        case="decode", contender="flex_attention", why="No working C++ compiler found"
    )


def test_pages_lie_shuffled_and_none_twice() -> None:
    problem = Problem.of(CPU_CASES[0])
    pages = [page for row in problem.page_table for page in row]
    assert sorted(pages) == list(range(len(pages)))
    assert pages != sorted(pages)


def test_requests_share_their_first_pages_and_no_others() -> None:
    case = next(case for case in SMALL if case.shared)
    problem = Problem.of(case)
    common = case.shared // case.page_size
    first, *others = problem.page_table
    assert all(row[:common] == first[:common] for row in others)
    pages = first[:common] + [page for row in problem.page_table for page in row[common:]]
    assert sorted(pages) == list(range(problem.num_pages))
    for rows in (problem.keys, problem.values):
        assert all(torch.equal(one[: case.shared], rows[0][: case.shared]) for one in rows)
        assert not torch.equal(rows[1][case.shared : 261], rows[2][case.shared : 261])


def test_one_contender_alone_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, planned = next(case for case in SMALL if case.shared), []
    plan = Attention.plan

    def noted(self: Attention, batch: Batch) -> Plan:
        planned.append(plan(self, batch))
        return planned[-1]

    monkeypatch.setattr(Attention, "plan", noted)
    shared = {}
    for name in ("pageant bf16", "pageant bf16 without sharing"):
        contenders(case)[name](Problem.of(case))
        shared[name] = [group.num_keys for group in planned[-1].shared[None]]
    assert shared == {"pageant bf16": [case.shared], "pageant bf16 without sharing": []}


def test_every_format_below_16_bits_is_timed_beside_the_models_own() -> None:
    small = {name for name, row in FORMATS.items() if row.bits <= 8}
    for dtype, own in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        assert set(formats_for(replace(SMALL[0], dtype=dtype))) == {own, *small}


def test_claims_are_about_cases_and_contenders() -> None:
    cases = {case.name: case for case in CPU_CASES}
    assert len(cases) == len(CPU_CASES)
    for claim in CPU_CLAIMS:
        assert claim.other in contenders(cases[claim.case])
        assert claim.ours in contenders(cases[claim.case])
        assert claim.ours.startswith("pageant ")


def test_judges_only_what_was_measured() -> None:
    def claim(**fields: Any) -> Claim:
        return Claim(**{"case": "x", "ours": "one", "other": "two", "most": 0.5, **fields})

    results = [
        Result(case="x", contender="one", median_ms=2.0),
        Result(case="x", contender="two", median_ms=4.0),
        Result(case="x", contender="three", why="cannot"),
    ]
    claims = [
        claim(),
        claim(most=0.49),
        claim(ours="three"),
        claim(other="four"),
        claim(case="y"),
    ]
    verdicts = judge(results, claims)
    assert [each.claim for each in verdicts] == claims[:4]
    assert [(each.ratio, each.holds) for each in verdicts] == [
        (0.5, True),
        (0.5, False),
        (None, None),
        (None, None),
    ]
