"""Shared prefixes in Triton, interpreted: equal to the float64 reference, whatever is shared.

What is shared is a multiple of the blocks of both passes: of 128 keys in float16, 32 in float32.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings

import pageant
from pageant.device import Device
from pageant.plan import device_groups
from tests.inputs import BOUNDS, Case, Problem, assert_close, build
from tests.kernels.test_cascade import families
from tests.kernels.triton.test_attention import FEW_SHARES, is_served


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an A100 of two multiprocessors, and groups of any size are found."""
    monkeypatch.setattr(Device, "detect", lambda _device: FEW_SHARES)
    monkeypatch.setattr(device_groups, "LEAST_SHARED", 4)


def hinted(problem: Problem) -> Problem:
    """With a hint, which is not true."""
    hint = torch.zeros_like(problem.batch.seq_lens)
    return replace(problem, batch=replace(problem.batch, shared_prefix_lens=hint))


def shared_keys(problem: Problem) -> list[int]:
    """How many keys of each request are computed for its group, by the newest plan."""
    groups = problem.attn._planner.slots[0].shared[problem.case.window]
    return groups.skips[: len(problem.case.lengths)].tolist()


def prove(dtype: torch.dtype, examples: int, most_keys: int) -> None:
    """Compare on every drawn case, and see that many share something."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(families(dtype, most_keys).filter(is_served))
    def equal(case: Case) -> None:
        problem = hinted(build(case))
        problem.check()
        shared = max(shared_keys(problem))
        event(f"shared: {shared}")
        seen.update(["all"], shared=shared > 0, features=shared > 0 and case.count_features() > 3)

    equal()
    assert seen["features"] > 0, seen


def test_float16() -> None:
    prove(torch.float16, 10, most_keys=330)


def test_float32() -> None:
    prove(torch.float32, 10, most_keys=100)


def family(**changes: Any) -> Case:
    """Five decodes that begin with the same 148 keys, in pages of 4."""
    lengths = ((1, 160), (1, 200), (1, 151), (1, 160), (1, 190))
    case = Case(seed=1, lengths=lengths, prefixes=((0, 148),) * 5, kv_heads=1)
    return replace(case, **changes)


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, [128] * 5),
        ({"window": 160}, [128, 0, 128, 128, 0]),  # hides the first key of the longest
        ({"window": 150}, [0] * 5),
        ({"lengths": ((1, 128),) * 5}, [96] * 5),  # the last block holds each row's own key
        ({"lengths": ((1, 129),) * 5, "causal": False}, [128] * 5),
        ({"lengths": ((1, 129),) * 5, "causal": (True, False, True, True, False)}, [128] * 5),
        ({"lengths": ((1, 129),) * 5, "cross": True}, [128] * 5),
        ({"lengths": ((3, 131),) * 5, "speculative": 2, "drafts": "mask"}, [128] * 5),
        ({"lengths": ((3, 130),) * 5, "speculative": 2, "drafts": "parents"}, [96] * 5),
        ({"lengths": ((2, 160),) * 5}, [0] * 5),  # prefills
        ({"lengths": ((2, 160), (1, 160), (0, 160), (1, 160), (0, 9))}, [0, 128, 0, 128, 0]),
        ({"prefixes": ((0, 148), (0, 148), (0, 40), (0, 31), (0, 148))}, [128, 128, 0, 0, 128]),
        ({"prefixes": ((0, 148), (0, 148), (2, 148), (2, 148), (0, 0))}, [128] * 4 + [0]),
        ({"soft_cap": 2.0, "alibi": True, "sinks": True, "splits": 3, "padding": 3}, [128] * 5),
    ],
)
def test_what_is_shared(changes: dict[str, Any], shared: list[int]) -> None:
    problem = hinted(build(family(**changes)))
    problem.check()
    assert shared_keys(problem) == shared


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "nvfp4", "fp8_e4m3_token_head"])
def test_formats(name: str) -> None:
    case = family(
        lengths=((1, 300), (2, 280), (1, 290), (1, 300)),
        prefixes=((0, 200),) * 4,
        dtype=torch.float16,
        format=name,
        scales=True,
        speculative=1,
        sinks=True,
    )
    problem = hinted(build(case))
    problem.check()
    assert shared_keys(problem) == [128] * 4


def test_layers_of_several_windows_share_what_each_can() -> None:
    problem = hinted(build(family(lengths=((1, 160), (2, 200), (1, 151), (1, 160), (3, 190)))))
    mine, cache = problem.attn, problem.cache
    features = replace(mine.features, windows=(None, 195, 155))
    options = pageant.Options(speculative_tokens=2)
    attn = pageant.Attention(mine.shape, mine.cache, mine.limits, features, options)
    plain = pageant.Attention(mine.shape, mine.cache, mine.limits, features, options)
    plan = attn.plan(problem.batch)
    without = plain.plan(replace(problem.batch, shared_prefix_lens=None))
    for window, shared in (
        (None, [128] * 5),
        (195, [128, 0, 128, 128, 128]),
        (155, [0] * 5),
    ):
        assert plan.buffers.shared[window].skips[:5].tolist() == shared
        layer = pageant.Layer(window=window)
        got, lse = attn.run(plan, problem.q, cache, layer, return_lse=True)
        want, want_lse = plain.run(without, problem.q, cache, layer, return_lse=True)
        assert_close(got, want, BOUNDS[torch.float32])
        assert_close(lse, want_lse, BOUNDS[torch.float32])


def test_shared_keys_are_read_by_the_group_alone() -> None:
    """Where the others' tables name a poisoned page for what is shared, nothing changes."""
    problem = hinted(build(family()))
    attn, cache, table = problem.attn, problem.cache, problem.batch.page_table
    plan = attn.plan(problem.batch)
    for view in (cache.k, cache.v):
        view[-1] = torch.nan
    assert not (table == len(cache.k) - 1).any()
    table[1:, :32] = len(cache.k) - 1
    out = attn.run(plan, problem.q, cache, problem.layer)
    assert_close(out, problem.expected_out, BOUNDS[torch.float32])


def test_batches_without_a_hint_share_nothing() -> None:
    problem = build(family())
    plan = problem.attn.plan(problem.batch)
    assert plan.buffers.shared == {}
    assert plan.shared == {None: ()}
    with_hint = problem.attn.plan(hinted(problem).batch)
    assert set(with_hint.buffers.shared) == {None}
    assert with_hint.shared == {None: ()}  # as far as the host knows
    problem.check()


@pytest.mark.parametrize(
    "options",
    [
        pageant.Options(cascade=False),
        pageant.Options(invariant=True),
        pageant.Options(context_parallel=pageant.ContextParallel(rank=0, world=2)),
    ],
)
def test_off_by_choice_and_where_there_is_no_sharing(options: pageant.Options) -> None:
    problem = hinted(build(family()))
    mine = problem.attn
    attn = pageant.Attention(mine.shape, mine.cache, mine.limits, mine.features, options)
    assert mine.explain().shares_prefixes
    assert not attn.explain().shares_prefixes
    assert attn.workspace_bytes < mine.workspace_bytes
    assert attn.plan(problem.batch).buffers.shared == {}


def test_a_change_in_place_is_seen() -> None:
    problem = hinted(build(family()))
    plan = problem.attn.plan(problem.batch)
    assert shared_keys(problem) == [128] * 5
    problem.batch.page_table.add_(torch.arange(5, dtype=torch.int32)[:, None] * 1000)
    problem.attn.update(plan)
    assert shared_keys(problem) == [0] * 5


def test_lengths_on_the_device_are_kept_within_the_limits() -> None:
    """What the host cannot see makes no kernel write past a buffer."""
    problem = hinted(build(family(speculative=3)))
    plan = problem.attn.plan(problem.batch)
    problem.batch.seq_lens[:] = 1 << 30
    problem.batch.query_start_loc[:] = torch.tensor([0, 1 << 30, 0, 1 << 30, 0, 1 << 30])
    problem.attn.update(plan)
    groups = plan.buffers.shared[None]
    assert groups.starts[:6].tolist() == sorted(groups.starts[:6].tolist())
    assert groups.starts[5] <= len(groups.tokens)
