"""R19: captured once, a graph replays other lengths and pages as an eager step computes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer, graphs
from tests.gpu.scene import SHAPE, attention, batch, no_waiting, noise, random_batch, rows
from tests.inputs import BOUNDS, assert_close

pytestmark = pytest.mark.gpu

LAYERS = (Layer(), Layer(window=100))
UNTOUCHED = 77.0
each_mode = pytest.mark.parametrize("invariant", [False, True])


class Step:
    """Writes and runs two layers into static outputs, as a model's step would."""

    def __init__(self, limits, pages, **options):
        self.attn = attention(limits, LAYERS, **options)
        self.kv, count = noise(self.attn, pages)[0], limits.max_tokens
        self.q = rows(count, 8, 64)
        self.k, self.v = (rows(count, 2, 64, seed) for seed in (2, 3))
        self.outs = [torch.empty_like(self.q) for _ in LAYERS]
        self.lses = [torch.empty(count, 8, device="cuda") for _ in LAYERS]
        self.clean = self.kv.k.clone(), self.kv.v.clone()

    def __call__(self, plan):
        count = plan.batch.num_tokens
        self.attn.write(plan, self.kv, self.k, self.v)
        for layer, out, lse in zip(LAYERS, self.outs, self.lses, strict=True):
            given = {"layer": layer, "out": out[:count], "return_lse": True}
            lse[:count] = self.attn.run(plan, self.q[:count], self.kv, **given)[1]

    def renew(self, step):
        """Outputs untouched; pages of the batch as they were, all others NaN."""
        for out in self.outs:
            out.fill_(UNTOUCHED)
        used = torch.zeros(self.kv.num_pages, dtype=torch.bool, device="cuda")
        counts = -(-step.seq_lens // self.kv.page_size)
        column = torch.arange(step.page_table.shape[1], device="cuda")
        used[step.page_table[column < counts[:, None]].long()] = True
        for view, clean in zip((self.kv.k, self.kv.v), self.clean, strict=True):
            view.copy_(torch.where(used[:, None, None, None], clean, torch.nan))

    def check(self, graph, step, invariant):
        real = int(step.query_start_loc[-1])
        self.renew(step)
        self(self.attn.plan(step))
        want = [x[:real].clone() for x in (*self.outs, *self.lses)]
        pages = [view.clone() for view in (self.kv.k, self.kv.v)]
        self.renew(step)
        graph.replay(step)
        got = [x[:real] for x in (*self.outs, *self.lses)]
        for one, other in zip(got, want, strict=True):
            assert not one.isnan().any()
            if invariant:
                assert torch.equal(one, other)
            else:
                assert_close(one, other, BOUNDS[SHAPE.dtype])
        for out in self.outs:
            assert (out[real:] == UNTOUCHED).all(), "a row of padding was written"
        for view, expected in zip((self.kv.k, self.kv.v), pages, strict=True):
            assert torch.equal(view.isnan(), expected.isnan())
            assert torch.equal(view.nan_to_num(), expected.nan_to_num())


@each_mode
def test_other_lengths_and_pages(invariant):
    """Captured for eight requests; then five of 1 to 5,000 keys, and so on, on other pages."""
    limits = pageant.Limits(max_requests=8, max_tokens=8, max_seq_len=5000)
    step = Step(limits, 1200, invariant=invariant)
    graph = graphs.capture(step.attn, step, tokens=8)
    rng = np.random.default_rng(19)
    for lens in ([1] * 8, [1, 5000, 99, 100, 101], [3, 700], [], [17] * 8, [4999]):
        given = batch([1] * len(lens), lens, rng.permutation(1200))
        step.check(graph, given, invariant)


def test_a_larger_batch_is_an_error():
    limits = pageant.Limits(max_requests=16, max_tokens=16, max_seq_len=500)
    step = Step(limits, 600, speculative_tokens=1)
    graph = graphs.capture(step.attn, step, tokens=8)
    for query_lens, name in (([1] * 9, "num_requests"), ([2] * 5, "num_tokens")):
        with pytest.raises(pageant.ArgumentError, match="at most 8, as captured") as caught:
            graph.replay(batch(query_lens, [30] * len(query_lens)))
        assert caught.value.argument == f"batch.{name}"
    with pytest.raises(pageant.ArgumentError) as caught:
        graph.replay(batch([3], [30]))
    assert caught.value.argument == "batch.max_query_len"


def test_a_replay_neither_waits_nor_allocates():
    limits = pageant.Limits(max_requests=8, max_tokens=8, max_seq_len=5000)
    step = Step(limits, 1200)
    graph = graphs.capture(step.attn, step, tokens=8)
    given = [batch([1] * count, [900] * count) for count in (1, 5, 8)]
    graph.replay(given[0])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting():
        for each in given:
            graph.replay(each)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_further_bucket_costs_less_than_a_megabyte():
    limits = pageant.Limits(max_requests=256, max_tokens=256, max_seq_len=32768)
    step = Step(limits, 600)
    buckets = graphs.Buckets(step.attn, step)
    buckets.replay(batch([1], [30]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for count in (2, 7, 60, 256):
        buckets.replay(batch([1] * count, [30] * count))
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert len(buckets.sizes) > 4
    for old, new in zip(before, after, strict=True):
        assert new - old < 4 << 20, "four buckets"


@each_mode
def test_a_thousand_random_batches(invariant):
    limits = pageant.Limits(max_requests=16, max_tokens=64, max_seq_len=1500)
    step = Step(limits, 16 * 94, invariant=invariant, speculative_tokens=3)
    graph = graphs.capture(step.attn, step, tokens=64, mixed=True)
    rng = np.random.default_rng(1)
    for _ in range(1000):
        given = random_batch(rng, limits, 16 * 94, longest=int(rng.choice([1, 4, 40])))
        step.check(graph, given, invariant)


@pytest.mark.parametrize("drafts", ["mask", "parents"])
def test_drafts_in_a_graph(drafts):
    """Trees drawn on the device within the graph: another one in each batch."""
    limits = pageant.Limits(max_requests=4, max_tokens=32, max_seq_len=300)
    step = Step(limits, 100, features={"draft_masks": True}, speculative_tokens=7)
    graph = graphs.capture(step.attn, step, tokens=32, drafts=drafts)
    rng = np.random.default_rng(21)
    for _ in range(50):
        query_lens = rng.integers(0, 9, 4).tolist()
        seq_lens = [int(rng.integers(m, 301)) for m in query_lens]
        if drafts == "mask":
            size = (sum(query_lens), max(query_lens))
            seen = rng.random(size) < 0.5
            own = [i for m in query_lens for i in range(m)]
            seen[np.arange(len(own)), own] = True
            given = {"draft_mask": torch.tensor(seen)}
        else:
            parents = [int(rng.integers(-1, i)) if i else -1 for m in query_lens for i in range(m)]
            given = {"draft_parents": torch.tensor(parents, dtype=torch.int32)}
        made = batch(query_lens, seq_lens, rng.permutation(100), **given)
        step.check(graph, made, invariant=False)


def test_ten_thousand_replays_are_the_same_bits():
    limits = pageant.Limits(max_requests=8, max_tokens=8, max_seq_len=5000)
    step = Step(limits, 1200)
    graph = graphs.capture(step.attn, step, tokens=8)
    given = batch([1] * 6, [5000, 1, 130, 2047, 600, 64])
    graph.replay(given)
    want = [out.clone() for out in step.outs]
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(10_000):
        graph.replay(given)
        for out, expected in zip(step.outs, want, strict=True):
            differs |= (out[:6] != expected[:6]).any()
    assert not differs
