"""Shared prefixes computed once: equal to the plain path and to the float64 reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import pageant
from pageant.cache.formats import FORMATS
from pageant.plan import prefix
from tests.inputs import BOUNDS, Case, Problem, assert_close, build, cases


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever can be shared."""
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=1, because="a test"),))


@st.composite
def families(draw: Any, dtype: torch.dtype, most_keys: int = 70) -> Case:
    """A Case whose requests begin with pages of earlier ones; most of them decode."""
    case = draw(cases(dtype))
    case = replace(
        case,
        group=min(case.group, 8),
        page_size=draw(st.sampled_from((1, 2, 3, 4, 5, 8, 16))),
        swizzled=False,
    )
    fmt = FORMATS[case.format]
    if fmt.scale_block and case.page_size % 4 == 0 and fmt.num_scales(case.v_head_dim) % 4 == 0:
        case = replace(case, swizzled=draw(st.booleans()))
    count = draw(st.integers(2, 7))
    rows = st.integers(1, 1 + case.speculative)
    keys = st.integers(min(most_keys, 2 * case.page_size), most_keys)
    lengths = [
        (draw(rows), draw(keys if draw(st.integers(0, 4)) else st.integers(1, 5)))
        for _ in range(count)
    ]
    if draw(st.integers(0, 3)) == 0:
        lengths.append((9, draw(keys)))  # prefills
    parents = [draw(st.integers(0, max(0, r - 1))) for r in range(len(lengths))]
    some = st.integers(most_keys // 4, most_keys)
    tokens = [draw(some) if draw(st.integers(0, 3)) else 0 for _ in lengths]
    causal = draw(
        st.one_of(st.just(True), st.booleans(), st.tuples(*[st.booleans()] * len(lengths)))
    )
    return replace(
        case,
        lengths=tuple(lengths),
        prefixes=tuple(zip(parents, tokens, strict=True)),
        causal=causal,
        window=draw(st.one_of(st.none(), st.none(), st.integers(most_keys // 2, most_keys + 20))),
    )


def without(problem: Problem) -> Problem:
    """The same problem on the plain path."""
    attn = problem.attn
    options = replace(attn.options, cascade=False)
    return replace(
        problem,
        attn=pageant.Attention(attn.shape, attn.cache, attn.limits, attn.features, options),
    )


def prove(dtype: torch.dtype, examples: int, most_keys: int = 70) -> None:
    """Compare on every drawn case, and see that most share something."""
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(families(dtype, most_keys))
    def equal(case: Case) -> None:
        problem = build(case)
        plain = without(problem)
        groups = problem.attn.plan(problem.batch).shared[case.window]
        assert plain.attn.plan(plain.batch).shared == {case.window: ()}
        out, lse = problem.run()
        want_out, want_lse = plain.run()
        for bound, answers in (
            (BOUNDS[dtype], (problem.expected_out, problem.expected_lse)),
            (2 * BOUNDS[dtype], (want_out, want_lse)),
        ):
            assert_close(out, answers[0], bound)
            assert_close(lse, answers[1], bound)
        levels = 1 + max((group.level for group in groups), default=-1)
        event(f"levels: {levels}")
        seen.update(["all"], shared=levels > 0, nested=levels > 1)
        seen.update(several=sum(group.level == 0 for group in groups) > 1)
        seen.update(combined=levels > 0 and case.count_features() >= 3)

    equal()
    assert seen["combined"] >= (seen["all"] / 5 if examples >= 300 else 1), seen
    if examples >= 300:
        assert min(seen[what] for what in ("nested", "several")) > 0, seen


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(
    ("dtype", "examples"), [(torch.float32, 300), (torch.bfloat16, 40), (torch.float16, 40)]
)
def test_as_without(dtype: torch.dtype, examples: int) -> None:
    prove(dtype, examples)


@pytest.fixture
def _three_workers() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_always", "_three_workers")
def test_cuts_between_shares() -> None:
    prove(torch.float32, 30, most_keys=1300)


def family(**changes: Any) -> Case:
    """Seven decodes of 40 keys or more that begin with the same 32, in pages of 4."""
    lengths = tuple((1, 40 + r) for r in range(7))
    return replace(Case(seed=1, lengths=lengths, prefixes=((0, 32),) * 7), **changes)


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(
    ("changes", "shared_keys"),
    [
        ({}, 32),
        ({"window": 46}, 32),
        ({"window": 45}, 32),  # the longest, 46 keys, no longer takes part
        ({"window": 40}, 0),  # one request alone still sees its first key
        ({"lengths": ((1, 33),) * 7}, 32),
        ({"lengths": ((1, 32),) * 7}, 28),  # the last key of the last page is each row's own
        ({"lengths": ((1, 32),) * 7, "causal": False}, 32),
        ({"lengths": ((1, 32),) * 7, "causal": (True,) * 6 + (False,)}, 28),
        ({"lengths": ((1, 32),) * 7, "cross": True}, 32),
        ({"lengths": ((3, 40),) * 7, "speculative": 2, "drafts": "mask"}, 32),
        ({"lengths": ((3, 34),) * 7, "speculative": 2, "drafts": "mask"}, 28),
        ({"lengths": ((3, 40),) * 7}, 0),  # prefills
    ],
)
def test_what_is_shared(changes: dict[str, Any], shared_keys: int) -> None:
    problem = build(family(**changes))
    groups = problem.attn.plan(problem.batch).shared[problem.case.window]
    assert [group.num_keys for group in groups] == [shared_keys] * bool(shared_keys)
    members = tuple(range(6 if changes == {"window": 45} else 7))
    assert all(group.requests == members for group in groups)
    problem.check()


@pytest.mark.usefixtures("_always")
def test_output_in_the_memory_of_the_queries() -> None:
    problem = build(family(sinks=True))
    q = problem.q.clone()
    problem.attn.run(problem.attn.plan(problem.batch), q, problem.cache, problem.layer, out=q)
    assert_close(q, problem.expected_out, 1e-5)


@pytest.mark.usefixtures("_always")
def test_shared_keys_are_read_by_the_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests' own tables name a poisoned page for what is shared, nothing changes."""
    from pageant.kernels import launch
    from pageant.kernels.cpu import shared as kernel_of_shared

    problem, seen = build(family()), []
    plain = kernel_of_shared.run

    def poisoned(kernel: Any, work: Any, call: Any) -> None:
        keys, values = (
            torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in (call.cache.k, call.cache.v)
        )
        table = call.page_table.clone()
        for group in work.prefixes:
            first = group.first_key // problem.case.page_size
            table[list(group.requests), first : first + len(group.pages)] = len(keys) - 1
            seen.append(group)
        cache = replace(call.cache, k=keys, v=values)
        plain(kernel, work, replace(call, cache=cache, page_table=table))

    monkeypatch.setattr(launch, "load_shared", lambda _row: poisoned)
    out, _ = problem.run()
    assert_close(out, problem.expected_out, 1e-5)
    assert seen


def test_off_by_choice_and_for_kernels_without_it() -> None:
    problem = build(family())
    assert problem.attn.explain().shares_prefixes
    assert not without(problem).attn.explain().shares_prefixes
    assert without(problem).attn.workspace_bytes < problem.attn.workspace_bytes
    assert not build(family(), "reference").attn.explain().shares_prefixes


@pytest.mark.usefixtures("_always")
def test_a_change_in_place_is_seen() -> None:
    problem = build(family())
    plan = problem.attn.plan(problem.batch)
    assert len(plan.shared[None]) == 1
    problem.batch.page_table[:, 0] = torch.arange(7, dtype=torch.int32)
    problem.attn.update(plan)
    assert plan.shared == {None: ()}
