"""Warming up goes through everything that an Attention may be asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import pageant
from pageant.device import Device
from pageant.kernels import warmup
from pageant.plan.batch import Batch

CPU = torch.device("cpu")


def attention(**others: object) -> pageant.Attention:
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32),
        pageant.CacheSpec(page_size=4),
        pageant.Limits(max_requests=2, max_tokens=8, max_seq_len=64),
        **others,  # type: ignore[arg-type]
    )


def test_every_kind_of_layer_and_batch() -> None:
    features = pageant.Features(
        windows=(None, 16),
        sinks=True,
        soft_cap=True,
        alibi=True,
        non_causal=True,
        draft_masks=True,
        out_formats=("model", "nvfp4"),
    )
    layers = warmup.layers_of(features, 4, CPU)
    assert len(layers) == len({(one.window, one.out_format) for one in layers}) * 8 == 32
    batches = list(warmup.batches_of(features, 3, CPU))
    kinds = {(type(one.causal), one.causal is True, one.draft_parents is None) for one in batches}
    assert len(batches) == len(kinds) == 6
    hinted = list(warmup.batches_of(features, 3, CPU, shares=True))
    assert [one.shared_prefix_lens is None for one in hinted] == [True, False] * 6


def test_a_step_after_it_is_right() -> None:
    """On the CPU everything is run, once, on a cache that nothing is written to."""
    features = pageant.Features(lse=True, non_causal=True, sinks=True)
    attn = attention(features=features)
    kv = attn.new_cache(num_layers=1, num_pages=2)
    attn.warmup(cache=kv[0])
    assert not kv.storage.any()
    plan = attn.plan(Batch.from_lengths([2], [2], [[1]], page_size=4))
    v = torch.tensor([1.0, 3.0])[:, None, None].expand(2, 2, 32)
    attn.write(plan, kv[0], torch.ones(2, 2, 32), v)
    assert attn.run(plan, torch.zeros(2, 4, 32), kv[0])[:, 0, 0].tolist() == [1.0, 2.0]


def test_a_mistake_in_a_layer_is_named() -> None:
    with pytest.raises(pageant.ArgumentError, match="sinks"):
        attention().warmup([pageant.Layer(sinks=torch.zeros(4))])
    with pytest.raises(pageant.ArgumentError, match="layers is 7"):
        attention().warmup([7])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "others",
    [
        {"options": pageant.Options(context_parallel=pageant.ContextParallel(rank=0, world=2))},
        {"features": pageant.Features(lse=True, out_formats=("model", "fp8_e4m3"))},
    ],
)
def test_ranks_and_formats(others: dict[str, object]) -> None:
    attn = attention(**others)
    attn.warmup()
    assert not attn._calls.known


def test_caches_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = attention()
    assert [one.is_far for one in warmup.caches_of(attn)] == [False]
    monkeypatch.setattr(Device, "detect", lambda _device: Device.of("sm90"))
    small, large = warmup.caches_of(attention())
    assert [small.is_far, large.is_far] == [False, True]
    assert small.k is large.k


def test_few_cached_tokens() -> None:
    limits = pageant.Limits(max_requests=1, max_tokens=4, max_seq_len=8, max_cached_tokens=1)
    shape = pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    pageant.Attention(shape, pageant.CacheSpec(page_size=4), limits).warmup()


def test_within_compiling_only_nothing_is_launched() -> None:
    from pageant.plan.bound import Bound, compiling_only

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            return lambda *args, **options: calls.append((grid, args, options))

    calls: list[object] = []
    bound = Bound(Kernel(), (1,), CPU, num_warps=4)
    with ThreadPoolExecutor(1) as pool, compiling_only(pool):
        bound((1, 1, 1), 5)
    assert calls == []
    bound((1, 1, 1), 5)
    assert calls == [((1, 1, 1), (5,), {"num_warps": 4})]
