"""Every rank of a group in one process: parts of all ranks, merged, are the whole answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import pageant
from pageant import ArgumentError, ContextParallel
from pageant.plan import prefix
from tests.inputs import Case, Problem, assert_close, build, cases
from tests.kernels.test_cascade import families
from tests.parallel.sharded import on_rank


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever can be shared."""
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=1, because="a test"),))


def merged(problem: Problem, world: int, interleave: int, kernels: str = "auto") -> None:
    """Compare the merged parts of all ranks with the answer of one."""
    before = problem.batch.seq_lens.clone()
    real = problem.expected_out.shape[0]
    outs, lses, shared = [], [], 0
    for rank in range(world):
        ranks = ContextParallel(rank=rank, world=world, interleave=interleave)
        mine = on_rank(problem, ranks, kernels)
        out, lse = mine.run()
        outs.append(out)
        lses.append(lse)
        shared += sum(map(len, mine.attn.plan(mine.batch).shared.values()))
    assert torch.equal(problem.batch.seq_lens, before)
    event(f"prefixes shared: {shared > 0}")
    out, lse = pageant.ops.merge_states(outs, lses, problem.layer.sinks)
    assert out.shape[0] == real
    assert_close(out, problem.expected_out, 1e-5)
    assert_close(lse, problem.expected_lse, 1e-5)


@pytest.mark.usefixtures("_always")
@settings(max_examples=2000)
@given(
    st.one_of(cases(torch.float32), families(torch.float32)),
    st.integers(1, 8),
    st.sampled_from((1, 2, 3, 4, 16)),
)
def test_parts_make_the_whole(case: Case, world: int, interleave: int) -> None:
    merged(build(replace(case, swizzled=False)), world, interleave)


@given(cases(torch.float32, max_len=30), st.integers(2, 4))
def test_the_reference_too(case: Case, world: int) -> None:
    problem = build(replace(case, swizzled=False, splits=None))
    merged(problem, world, 1, kernels="reference")


def small() -> Problem:
    return build(Case(seed=0, kv_heads=1, lengths=((2, 9), (1, 1), (6, 6))))


def test_invariant_rows_have_the_same_bits_on_a_rank() -> None:
    problem, ranks = small(), ContextParallel(rank=1, world=2)
    mine = on_rank(problem, ranks)
    options = replace(mine.attn.options, invariant=True)
    attn = pageant.Attention(
        mine.attn.shape, mine.attn.cache, mine.attn.limits, mine.attn.features, options
    )
    mine = replace(mine, attn=attn)
    out, lse = mine.run()
    alone = replace(
        mine.batch,
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=mine.batch.seq_lens[:1],
        page_table=mine.batch.page_table[:1],
        num_requests=1,
        num_tokens=2,
    )
    again, lse_again = attn.run(
        attn.plan(alone), mine.q[:2], mine.cache, mine.layer, return_lse=True
    )
    assert torch.equal(out[:2], again)
    assert torch.equal(lse[:2], lse_again)


def test_a_part_without_its_lse_is_refused() -> None:
    mine = on_rank(small(), ContextParallel(rank=0, world=2))
    plan = mine.attn.plan(mine.batch)
    with pytest.raises(ArgumentError, match="return_lse is False; allowed: True: without a group"):
        mine.attn.run(plan, mine.q, mine.cache, mine.layer)


def test_a_table_too_narrow_for_the_ranks_own_keys() -> None:
    mine = on_rank(small(), ContextParallel(rank=0, world=2))
    narrow = replace(mine.batch, page_table=mine.batch.page_table[:, :1].contiguous())
    with pytest.raises(ArgumentError, match=r"seq_lens\[0\] is 9; allowed: at most 4, .* one of 2"):
        mine.attn.plan(narrow)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rank": 2}, "rank is 2; allowed: a whole number from 0 to 1"),
        ({"interleave": 0}, "interleave is 0; allowed"),
        ({"comm": "ring"}, "comm is 'ring'; allowed: ag_rs, a2a"),
        ({"heads": "none"}, "heads is 'none'; allowed: all, split"),
        ({"heads": "split"}, "heads is 'split'; allowed: all, without a group"),
        ({"group": "world"}, "group is 'world'; allowed: None, or a torch.distributed"),
    ],
)
def test_mistakes(fields: dict[str, Any], words: str) -> None:
    ranks = ContextParallel(**{"rank": 0, "world": 2, **fields})
    shape = pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16)
    options = pageant.Options(context_parallel=ranks)
    with pytest.raises(ArgumentError, match=words):
        pageant.Attention(shape, options=options)
    support = pageant.supports(shape, options=options)
    assert (support.ok, support.argument) == (False, "dcp")
