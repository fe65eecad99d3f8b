"""A call like an earlier one is checked no less: what differs is seen."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

import pageant
from pageant.plan import calls

PAGES = [[0, 1]]


@pytest.fixture
def attn() -> pageant.Attention:
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(format="fp8", page_size=4),
        pageant.Limits(max_requests=2, max_tokens=8, max_seq_len=8),
    )


@pytest.fixture
def kv(attn: pageant.Attention) -> pageant.PagedCache:
    return attn.new_cache(num_layers=2, num_pages=4)


def plan(attn: pageant.Attention, tokens: int = 2) -> pageant.Plan:
    return attn.plan(pageant.Batch.from_lengths([tokens], [tokens], PAGES, page_size=4))


def test_an_output_that_meets_the_query_is_seen_after_one_that_does_not(
    attn: pageant.Attention, kv: pageant.PagedCache
) -> None:
    memory, step = torch.zeros(8, 2, 16), plan(attn)
    attn.run(step, memory[:2], kv[0], out=memory[4:6])
    attn.run(step, memory[:2], kv[0], out=memory[4:6])
    with pytest.raises(pageant.ArgumentError, match="a part of q's memory"):
        attn.run(step, memory[:2], kv[0], out=memory[1:3])


def test_rows_that_overlap_are_seen_after_one_that_cannot(
    attn: pageant.Attention, kv: pageant.PagedCache
) -> None:
    memory = torch.zeros(64).as_strided((2, 2, 16), (8, 16, 1))
    attn.run(plan(attn, tokens=1), torch.zeros(1, 2, 16), kv[0], out=memory[:1])
    with pytest.raises(pageant.ArgumentError, match="rows that do not overlap"):
        attn.run(plan(attn), torch.zeros(2, 2, 16), kv[0], out=memory)


def test_too_few_rows_are_seen_after_a_batch_that_needed_fewer(
    attn: pageant.Attention, kv: pageant.PagedCache
) -> None:
    q = k = torch.zeros(2, 2, 16)
    step = plan(attn)
    attn.write(step, kv[0], k, k)
    attn.run(step, q, kv[0])
    step = plan(attn, tokens=3)
    with pytest.raises(pageant.ArgumentError, match=r"q is \[2, 2, 16\]"):
        attn.run(step, q, kv[0])
    with pytest.raises(pageant.ArgumentError, match=r"k is \[2, 2, 16\]"):
        attn.write(step, kv[0], k, k)


def test_a_write_is_not_taken_for_a_run(attn: pageant.Attention, kv: pageant.PagedCache) -> None:
    """Keys and values may be one tensor; a query and its output too, but not a frozen one."""
    frozen = torch.zeros(2, 2, 16)[:1].expand(2, 2, 16)
    step = plan(attn)
    attn.write(step, kv[0], frozen, frozen)
    with pytest.raises(pageant.ArgumentError, match="rows that do not overlap"):
        attn.run(step, frozen, kv[0], out=frozen)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scale_in_a_tensor_is_read_each_time(
    attn: pageant.Attention, kv: pageant.PagedCache, as_tensor: bool
) -> None:
    scale = torch.tensor([1.0])
    layer = pageant.Layer(v_scale=scale if as_tensor else 1.0)
    k = torch.ones(2, 2, 16)
    step = plan(attn)
    attn.write(step, kv[0], k, k, layer)
    first = attn.run(step, k, kv[0], layer)
    scale.fill_(3.0)
    second = attn.run(step, k, kv[0], layer)
    assert torch.equal(second, first * (3.0 if as_tensor else 1.0))


def test_layers_and_caches_are_told_apart(attn: pageant.Attention, kv: pageant.PagedCache) -> None:
    step, k = plan(attn), torch.ones(2, 2, 16)
    for layer, value in enumerate((1.0, 2.0)):
        attn.write(step, kv[layer], k, k * value)
    for _ in range(2):
        assert attn.run(step, k, kv[0]).unique().tolist() == [1.0]
        assert attn.run(step, k, kv[1]).unique().tolist() == [2.0]
        twice = attn.run(step, k, kv[0], pageant.Layer(v_scale=2.0))
        assert twice.unique().tolist() == [2.0]
    with pytest.raises(pageant.ArgumentError, match="soft_cap"):
        attn.run(step, k, kv[0], pageant.Layer(soft_cap=5.0))
    with pytest.raises(pageant.ArgumentError, match="requires grad"):
        attn.run(step, k.clone().requires_grad_(), kv[0])
    other = dataclasses.replace(kv[0], v=kv[0].v[:3])
    with pytest.raises(pageant.ArgumentError, match="3 pages of v"):
        attn.run(step, k, other)


def test_a_cache_is_not_kept_alive(attn: pageant.Attention) -> None:
    kv = attn.new_cache(num_layers=1, num_pages=4)
    attn.run(plan(attn), torch.zeros(2, 2, 16), kv[0])
    alive = weakref.ref(kv[0].k)
    del kv
    gc.collect()
    assert alive() is None
    assert not attn._calls.known


def test_tensors_that_moved_or_shrank_are_looked_at_again(attn: pageant.Attention) -> None:
    memory = [torch.zeros(4, 4, 2, 16, dtype=torch.uint8) for _ in range(2)]
    cache = attn.wrap_cache(*(one.view(torch.float8_e4m3fn) for one in memory))
    step, q = plan(attn), torch.zeros(2, 2, 16)
    assert not attn.run(step, q, cache).any()
    cache.v.data = torch.ones(4, 4, 2, 16).to(torch.float8_e4m3fn)
    assert attn.run(step, q, cache).unique().tolist() == [1.0]
    cache.v.data = cache.v.data[:3]
    with pytest.raises(pageant.ArgumentError, match="3 pages of v"):
        attn.run(step, q, cache)


def test_heads_that_overlap_are_seen_after_an_output_without_rows(
    attn: pageant.Attention, kv: pageant.PagedCache
) -> None:
    memory = torch.zeros(128)
    none = attn.plan(pageant.Batch.from_lengths([], [], [], page_size=4))
    out = memory.as_strided((0, 2, 16), (64, 0, 1))
    attn.run(none, torch.zeros(0, 2, 16), kv[0], out=out)
    with pytest.raises(pageant.ArgumentError, match="rows that do not overlap"):
        attn.run(
            plan(attn), torch.zeros(2, 2, 16), kv[0], out=memory.as_strided((2, 2, 16), (64, 0, 1))
        )


def test_what_is_remembered_stays_bounded(
    attn: pageant.Attention, kv: pageant.PagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST", 3)
    monkeypatch.setattr(calls, "MOST_PLACES", 2)
    step, memory = plan(attn), torch.zeros(40, 2, 20)
    kinds, places = 0, 0
    for width in range(16, 20):
        for row in range(0, 40, 8):
            q = torch.zeros(2, 2, width)[:, :, :16]
            attn.run(step, q, kv[0], out=memory[row : row + 2, :, :16])
            kinds = max(kinds, len(attn._calls.known))
            places = max(places, *(len(one.places) for one in attn._calls.known.values()))
    assert (kinds, places) == (3, 2)
