"""Plans by compiled loops: what the plain planner writes, which also says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import pageant
from pageant import ArgumentError, Batch
from pageant.plan import prefix
from pageant.plan.build import Planner
from pageant.plan.compiled_plan import CompiledPlanner
from tests.inputs import NO_SUCH_PAGE

PAGE = 4
LIMITS = pageant.Limits(max_requests=9, max_tokens=200, max_seq_len=3000, max_cached_tokens=9000)
SHAPE = pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)


def attention(windows: tuple[int | None, ...] = (None,), **options: Any) -> pageant.Attention:
    features = pageant.Features(windows=windows, non_causal=True)
    spec = pageant.CacheSpec(page_size=PAGE)
    return pageant.Attention(SHAPE, spec, LIMITS, features, pageant.Options(**options))


def batch_of(lens: list[tuple[int, int]], padding: int = 0, **changes: Any) -> Batch:
    """Requests with their own pages, in a wider table; unused entries are poisoned."""
    width = max([-(-n // PAGE) for _, n in lens], default=0)
    storage = torch.full((len(lens), width + 3), NO_SUCH_PAGE, dtype=torch.int32)
    for row, (_, n) in enumerate(lens):
        pages = -(-n // PAGE)
        storage[row, :pages] = torch.arange(pages) * len(lens) + row
    tokens = sum(m for m, _ in lens)
    fields: dict[str, Any] = {
        "query_start_loc": torch.tensor(np.cumsum([0, *[m for m, _ in lens]]), dtype=torch.int32),
        "seq_lens": torch.tensor([n for _, n in lens], dtype=torch.int32),
        "page_table": storage[:, : width + 1],
        "slot_mapping": torch.arange(tokens + padding) * 3,
        "num_requests": len(lens),
        "num_tokens": tokens + padding,
        "max_query_len": max([m for m, _ in lens], default=0),
        "max_seq_len": max([n for _, n in lens], default=0),
    }
    return Batch(**{**fields, **changes})


def written(plan: Any) -> dict[str, Any]:
    """All that planning wrote, as plain lists."""
    buffers = plan.buffers
    copy = buffers.batch
    found: dict[str, Any] = {
        "split": buffers.split,
        "tokens": (buffers.real_tokens, buffers.known_tokens),
        "pages": buffers.pages,
        "shared": list(buffers.shared),
        "lens": [copy.query_start_loc.tolist(), copy.key_lens.tolist()],
        "table": [
            line[: -(-n // PAGE)]
            for line, n in zip(copy.page_table.tolist(), copy.key_lens.tolist(), strict=True)
        ],
        "causal": (copy.causal, copy.draft_mask),
    }
    if copy.writes is not None:
        parts = copy.writes.tokens, copy.writes.pages, copy.writes.rows
        found["writes"] = [None if x is None else x.tolist() for x in parts]
        found["slots"] = copy.writes.num_tokens, copy.writes.largest_slot
    for key, work in buffers.work.items():
        items, groups = work.counts.tolist()
        found[f"work {key}"] = (
            work.items[:items].tolist(), work.share_start.tolist(), work.groups[:groups].tolist()
        )  # fmt: skip
    return found


def plain(attn: pageant.Attention, batch: Batch) -> dict[str, Any]:
    """What the plain planner writes into the same attention's buffers."""
    planner = attn._planner
    buffers = planner.slots[0]
    Planner._write(planner, buffers, batch)  # type: ignore[arg-type]
    return written(pageant.plan.build.Plan(batch, buffers, buffers.generation, planner))


lengths = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 2999)),
        st.tuples(st.integers(0, 20), st.integers(0, 300)),
    ),
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(
    lengths,
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([(None,), (5,), (None, 70), (1, 900)]),
    st.sampled_from([{}, {"speculative_tokens": 3}, {"invariant": True}]),
    st.sampled_from(["all", "some"]),
    st.integers(1, 5),
)
def test_the_plan_is_the_plain_one(
    lens: list[tuple[int, int]],
    padding: int,
    causal: bool,
    windows: tuple[int | None, ...],
    options: dict[str, Any],
    slots: str,
    workers: int,
) -> None:
    total = 0
    kept = []
    for m, n in lens:
        if (total := total + n) <= LIMITS.max_cached_tokens:
            kept.append((m, n))
    with mock.patch("torch.get_num_threads", return_value=workers):
        attn = attention(windows, **options)
    batch = batch_of(kept, padding, causal=causal)
    if slots == "some" and batch.num_tokens:
        batch.slot_mapping[torch.arange(batch.num_tokens) % 3 == 1] = -1
    planner = attn._planner
    assert isinstance(planner, CompiledPlanner)
    assert planner.fill_ordinary(planner.slots[0], batch)
    got = written(pageant.plan.build.Plan(batch, planner.slots[0], -1, planner))
    event("some decodes are cut" if any("decode" in k and got[k][2] for k in got if "work" in k)
          else "no decode is cut")  # fmt: skip
    assert got == plain(attn, batch)


FAULTS: dict[str, tuple[str, int]] = {
    "query_start_loc[0]": ("query_start_loc", 0),
    "query_start_loc[1]": ("query_start_loc", 1),
    "query_start_loc[2]": ("query_start_loc", 2),
    "seq_lens[0]": ("seq_lens", 0),
    "seq_lens[1]": ("seq_lens", 1),
}


@pytest.mark.parametrize("value", [-5, 13, 40, 2**31 - 1])
@pytest.mark.parametrize("place", FAULTS)
def test_faults_are_left_to_the_plain_planner(place: str, value: int) -> None:
    attn = attention()
    planner = attn._planner
    before = attn.plan(batch_of([(1, 5)]))
    want = written(before)
    batch = batch_of([(2, 9), (3, 12)])
    name, index = FAULTS[place]
    getattr(batch, name)[index] = value
    assert not planner.fill_ordinary(planner.slots[0], batch)
    with pytest.raises(ArgumentError):
        attn.plan(batch)
    assert written(before) == want
    before.require_current()


def test_what_is_rarer_is_left_too() -> None:
    planner = attention()._planner
    batch = batch_of([(2, 9), (3, 12)])
    assert planner.fill_ordinary(planner.slots[0], batch)
    int64 = batch.seq_lens.long()
    for changes in (
        {"num_requests": True},
        {"num_tokens": 4},
        {"num_tokens": 201},
        {"max_query_len": 2},
        {"max_seq_len": 11},
        {"max_seq_len": 3001},
        {"seq_lens": int64},
        {"seq_lens": batch.seq_lens[:1]},
        {"seq_lens": torch.tensor([9, 0, 12, 0], dtype=torch.int32)[::2]},
        {"page_table": batch.page_table[:1]},
        {"page_table": batch.page_table[:, :2]},
        {"page_table": batch.page_table.T.contiguous().T},
        {"page_table": torch.full_like(batch.page_table, -1)},
        {"slot_mapping": None},
        {"slot_mapping": batch.slot_mapping[:4]},
        {"slot_mapping": torch.arange(6)},
        {"slot_mapping": torch.arange(5, dtype=torch.int32)},
        {"causal": torch.tensor([True, False])},
        {"causal": 1},
        {"draft_parents": torch.full((5,), -1, dtype=torch.int32)},
        {"encoder_seq_lens": batch.seq_lens},
        {"shared_prefix_lens": torch.zeros(2, dtype=torch.int32)},
        {"seq_lens_cpu": batch.seq_lens},
    ):
        assert not planner.fill_ordinary(planner.slots[0], replace(batch, **changes)), changes


def test_requests_that_may_share_pages_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only decodes, and only with enough keys for some rule."""
    attn = attention()
    planner = attn._planner
    batch = batch_of([(1, 40), (1, 60), (9, 40)])
    batch.page_table[2, 0] = batch.page_table[0, 0]
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=40, because="a test"),))
    assert planner.fill_ordinary(planner.slots[0], batch)
    batch.page_table[1, :10] = batch.page_table[0, :10]
    assert not planner.fill_ordinary(planner.slots[0], batch)
    assert attn.plan(batch).shared[None] == ()  # the last key's page is not whole for request 0
    batch.seq_lens[0] = 39
    assert planner.fill_ordinary(planner.slots[0], batch)
    batch.seq_lens[0] = 44
    batch.page_table[:2, 10] = 7
    assert attn.plan(batch).shared[None][0].num_keys == 40
