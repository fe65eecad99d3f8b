"""On a GPU, keys that decodes share are computed once, and the results are as without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import pageant
from pageant import Layer, graphs
from pageant.plan import device_groups
from tests.gpu.scene import PAGE, SHAPE, attention, batch, no_waiting, noise, rows, seconds
from tests.inputs import BOUNDS, Case, assert_close, build
from tests.kernels.test_cascade import families

pytestmark = pytest.mark.gpu

LAYERS = (Layer(), Layer(window=3000, soft_cap=20.0))
SEEDS = (0, 1, 3)  # each draws some cases that share, of every type
EXAMPLES = 14  # drawn with each seed; most compile kernels of their own
BOUND = 2 * BOUNDS[SHAPE.dtype]


def hinted(step: pageant.Batch) -> pageant.Batch:
    """With a hint, which is not true."""
    return replace(step, shared_prefix_lens=torch.zeros_like(step.seq_lens))


def samples(groups, members, common, own, rng, **others):
    """Groups of decodes with the full pages of `common` keys, and 1 to `own` more keys each."""
    ids, pages, lens = iter(rng.permutation(20_000).tolist()), [], []
    for _ in range(groups):
        first = [next(ids) for _ in range(common // PAGE)]
        for _ in range(members):
            alone = int(rng.integers(1, own + 1))
            lens.append(common + alone)
            count = -(-lens[-1] // PAGE) - len(first)
            pages += first + [next(ids) for _ in range(count)]
    return batch([1] * len(lens), lens, pages, **others)


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize(
    ("dtype", "most_keys"),
    [(torch.bfloat16, 330), (torch.bfloat16, 1300), (torch.float16, 1300), (torch.float32, 330)],
    ids=str,
)
def test_as_the_reference(monkeypatch, dtype, most_keys, number):
    monkeypatch.setattr(device_groups, "LEAST_SHARED", 4)
    seen: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(families(dtype, most_keys))
    def equal(case: Case) -> None:
        problem = build(case)
        problem = replace(problem, batch=hinted(problem.batch)).on("cuda")
        out, lse = problem.run()
        assert_close(out, problem.expected_out, BOUNDS[dtype])
        assert_close(lse, problem.expected_lse, BOUNDS[dtype])
        shared = problem.attn._planner.slots[0].shared
        if shared:  # not where the reference serves the case
            skips = shared[case.window].skips[: len(case.lengths)]
            seen.update(["served"], shared=int(skips.max()) > 0)

    equal()
    assert seen["shared"] > 0, seen


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize(
    ("groups", "members", "common"), [(1, 32, 2048), (4, 8, 1200), (16, 2, 4000), (1, 200, 500)]
)
def test_samples_of_prompts(cache, groups, members, common):
    limits = pageant.Limits(max_requests=256, max_tokens=256, max_seq_len=8192)
    spec = pageant.CacheSpec(format=cache, page_size=PAGE)
    attn = attention(limits, LAYERS, cache=spec)
    kv = attn.new_cache(num_layers=1, num_pages=20_000)[0]
    step = samples(groups, members, common, 300, np.random.default_rng(3))
    count = step.num_tokens
    fill = pageant.Batch(
        query_start_loc=torch.tensor([0, 0], dtype=torch.int32, device="cuda"),
        seq_lens=torch.zeros(1, dtype=torch.int32, device="cuda"),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.randperm(20_000 * PAGE, device="cuda")[: limits.max_tokens],
        num_requests=1,
        num_tokens=limits.max_tokens,
        max_query_len=1,
        max_seq_len=1,
    )
    for first in range(0, 20_000 * PAGE, limits.max_tokens):
        fill.slot_mapping.copy_(torch.arange(first, first + limits.max_tokens, device="cuda"))
        k, v = (rows(limits.max_tokens, 2, 64, first + i) for i in range(2))
        attn.write(attn.plan(fill), kv, k, v)
    q = rows(count, 8, 64)
    for layer in LAYERS:
        want, want_lse = attn.run(attn.plan(step), q, kv, layer, return_lse=True)
        plan = attn.plan(hinted(step))
        got, lse = attn.run(plan, q, kv, layer, return_lse=True)
        assert_close(got, want, BOUND)
        assert_close(lse, want_lse, BOUND)
        skips = plan.buffers.shared[layer.window].skips[:count]
        visible = step.seq_lens <= (layer.window or 1 << 30)
        assert (skips[visible] > common - PAGE - 128).all()
        assert (skips[~visible] == 0).all()


def test_nothing_waits():
    limits = pageant.Limits(max_requests=64, max_tokens=64, max_seq_len=8192)
    attn = attention(limits, LAYERS)
    kv = noise(attn, 20_000)[0]
    q, out = rows(64, 8, 64), torch.empty(64, 8, 64, dtype=SHAPE.dtype, device="cuda")
    given_ = [hinted(samples(2, n, 1000, 200, np.random.default_rng(n))) for n in (5, 32)]
    attn.run(attn.plan(given_[0]), q[:10], kv, LAYERS[0], out=out)
    with no_waiting():
        for step in given_:
            attn.run(attn.plan(step), q, kv, LAYERS[0], out=out)


def test_a_graph_replays_other_groups_and_lengths():
    limits = pageant.Limits(max_requests=64, max_tokens=64, max_seq_len=8192)
    attn = attention(limits, LAYERS)
    kv = noise(attn, 20_000)[0]
    q, outs = rows(64, 8, 64), [torch.empty_like(rows(64, 8, 64)) for _ in LAYERS]

    def run(plan):
        count = plan.batch.num_tokens
        for layer, out in zip(LAYERS, outs, strict=True):
            attn.run(plan, q[:count], kv, layer, out=out[:count])

    graph = graphs.capture(attn, run, tokens=64, shares=True)
    rng = np.random.default_rng(8)
    for groups, members, common in (
        (1, 64, 5000),
        (8, 8, 800),
        (3, 2, 2900),
        (9, 7, 96),
        (1, 1, 0),
    ):
        for own in (17, 400):
            step = samples(groups, members, common, own, rng)
            run(attn.plan(step))
            want = [out[: step.num_tokens].clone() for out in outs]
            for out in outs:
                out.fill_(torch.nan)
            graph.replay(step)
            for out, expected in zip(outs, want, strict=True):
                assert_close(out[: step.num_tokens], expected, BOUND)
                assert out[step.num_tokens :].isnan().all()


def test_it_takes_less_time():
    """32 samples of a prompt of 8,000 tokens."""
    limits = pageant.Limits(max_requests=32, max_tokens=32, max_seq_len=16384)
    shape = pageant.Shape(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    attn = attention(limits, shape=shape)
    kv = noise(attn, 20_000)[0]
    step = samples(1, 32, 8000, 100, np.random.default_rng(1))
    q, out = rows(32, 32, 128), torch.empty(32, 32, 128, dtype=torch.bfloat16, device="cuda")
    spans = []
    for given_ in (step, hinted(step)):
        plan = attn.plan(given_)
        spans.append(seconds(lambda plan=plan: attn.run(plan, q, kv, out=out), times=30))
    assert spans[1] < 0.7 * spans[0], spans
