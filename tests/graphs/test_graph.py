"""A captured step replays any batch of its bucket. Here the step itself is called in its place.

Triton kernels are interpreted, so no graph is captured: what a replay does around one is tested.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer
from pageant.device import Device
from pageant.graphs import Graph, capture
from pageant.graphs.graph import bucket_of, memory_of
from pageant.plan import device_groups

PAGE, LONGEST = 4, 64
LAYERS = (Layer(), Layer(window=5))
FEW_SHARES = replace(Device.of("sm80"), num_sms=2)


@pytest.fixture(autouse=True)
def _pretend(monkeypatch):
    """The CPU passes for an A100 of two multiprocessors."""
    monkeypatch.setattr(Device, "detect", lambda _device: FEW_SHARES)
    with np.errstate(all="ignore"):  # numpy, which interprets, warns of what is meant
        yield


def attention(features=None, **options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=6, max_tokens=12, max_seq_len=LONGEST),
        pageant.Features.of(LAYERS, lse=True, **(features or {})),
        pageant.Options(**options),
    )


class Scene:
    """A cache, static inputs and outputs, and the step that a graph would hold."""

    def __init__(self, attn):
        self.attn = attn
        self.kv = attn.new_cache(num_layers=1, num_pages=40)[0]
        rng = torch.Generator().manual_seed(19)
        for view in (self.kv.k, self.kv.v):
            view.copy_(torch.randn(view.shape, generator=rng))
        self.q = torch.randn(12, 2, 16, generator=rng)
        self.rows = torch.randn(12, 1, 16, generator=rng)
        self.outs = [torch.full_like(self.q, 77.0) for _ in LAYERS]

    def step(self, plan):
        count = plan.batch.num_tokens
        self.attn.write(plan, self.kv, self.rows, self.rows)
        for layer, out in zip(LAYERS, self.outs, strict=True):
            self.attn.run(plan, self.q[:count], self.kv, layer, out=out[:count])
        return count

    def graph(self, tokens, **bucket):
        """What ``capture`` makes, but for the CUDA graph: its step is run instead."""
        found = bucket_of(
            self.attn,
            tokens,
            bucket.get("requests"),
            mixed=bucket.get("mixed", False),
            drafts=bucket.get("drafts"),
            shares=bucket.get("shares", False),
        )
        memory = memory_of(self.attn)
        batch, step = memory.open(found, self.step)
        return Graph(found, step(), batch, memory, Again(step))

    def check(self, graph, batch):
        """A replay does what an eager step does, and leaves the rest alone."""
        before = [view.clone() for view in (self.kv.k, self.kv.v)]
        real = int(batch.query_start_loc[-1])
        self.step(self.attn.plan(batch))
        want = [out[:real].clone() for out in self.outs]
        pages = [view.clone() for view in (self.kv.k, self.kv.v)]
        for view, old in zip((self.kv.k, self.kv.v), before, strict=True):
            view.copy_(old)
        for out in self.outs:
            out.fill_(77.0)
        assert graph.replay(batch) == graph.bucket.tokens
        for out, expected in zip(self.outs, want, strict=True):
            assert torch.equal(out[:real], expected)
            assert (out[real:] == 77.0).all()
        for view, expected in zip((self.kv.k, self.kv.v), pages, strict=True):
            assert torch.equal(view, expected)


class Again:
    def __init__(self, step):
        self.replay = step


def batch(query_lens, seq_lens, first_page=0, **others):
    table = [
        [(first_page + 7 * r + i) % 40 for i in range(-(-n // PAGE))]
        for r, n in enumerate(seq_lens)
    ]
    return pageant.Batch.from_lengths(query_lens, seq_lens, table, PAGE, **others)


@pytest.mark.parametrize("invariant", [False, True])
def test_decodes_with_other_lengths_and_pages(invariant):
    scene = Scene(attention(speculative_tokens=2, invariant=invariant))
    graph = scene.graph(6)
    scene.check(graph, batch([1, 3], [50, 9]))
    scene.check(graph, batch([1] * 6, [3, 1, 60, 5, 6, 7], first_page=5))
    scene.check(graph, batch([], []))
    scene.check(graph, batch([0, 2, 0], [12, 2, 5], first_page=30))


def test_decodes_that_share_keys_are_found_in_each_batch(monkeypatch):
    """Whatever the graph was captured with, and whether a batch says so or not."""
    monkeypatch.setattr(device_groups, "LEAST_SHARED", 4)
    scene = Scene(attention())
    graph = scene.graph(6, shares=True)
    work = memory_of(scene.attn)._slot.memory.groups.work[None]
    for seq_lens, kin, shared in (
        ([50, 60, 40], [0, 1], [32, 32, 0]),
        ([40] * 6, [1, 2, 3, 4, 5], [0, 32, 32, 32, 32, 32]),
        ([40, 3], [0], [0, 0]),
    ):
        given = batch([1] * len(seq_lens), seq_lens)
        given.page_table[kin, :9] = torch.arange(9, dtype=torch.int32) + 2
        scene.step(scene.attn.plan(given))
        want = [out[: len(seq_lens)].clone() for out in scene.outs]
        graph.replay(given)
        assert work.skips[: len(seq_lens)].tolist() == shared
        for out, expected in zip(scene.outs, want, strict=True):
            torch.testing.assert_close(out[: len(seq_lens)], expected)


def test_a_mixed_graph_takes_prefills():
    scene = Scene(attention())
    graph = scene.graph(12, mixed=True)
    scene.check(graph, batch([1, 9, 1], [30, 20, 5]))
    scene.check(graph, batch([12], [12]))
    scene.check(graph, batch([1, 1], [4, 44]))


def test_batches_say_what_is_causal():
    scene = Scene(attention({"non_causal": True}))
    graph = scene.graph(8, mixed=True)
    scene.check(graph, batch([3, 4], [9, 12], causal=torch.tensor([False, True])))
    scene.check(graph, batch([3, 4], [9, 12], causal=False))
    scene.check(graph, batch([3, 4], [9, 12]))


@pytest.mark.parametrize("drafts", ["mask", "parents"])
@pytest.mark.parametrize("mixed", [False, True])
def test_drafts(drafts, mixed):
    scene = Scene(attention({"draft_masks": True}, speculative_tokens=3))
    graph, other = (scene.graph(size, mixed=mixed, drafts=drafts) for size in (8, 12))
    rng = torch.Generator().manual_seed(3)
    for query_lens, seq_lens in (([4, 2], [20, 8]), ([1, 3, 3], [9, 3, 40])):
        tokens = sum(query_lens)
        if drafts == "mask":
            given = {"draft_mask": torch.rand(tokens, max(query_lens), generator=rng) < 0.5}
        else:
            own = [i for m in query_lens for i in range(m)]
            given = {"draft_parents": torch.tensor([i // 2 - 1 for i in own], dtype=torch.int32)}
        for each in (graph, other, graph):
            scene.check(each, batch(query_lens, seq_lens, **given))


def test_trees_stay_where_they_are():
    """A larger graph draws its trees elsewhere; a smaller one was captured with its own."""
    scene, seen = Scene(attention({"draft_masks": True}, speculative_tokens=3)), []
    scene.step = lambda plan: seen.append(plan.buffers.batch.draft_mask.data_ptr())
    small, large = (scene.graph(size, drafts="parents") for size in (4, 12))
    small.recorded.replay()
    large.recorded.replay()
    assert seen == seen[:2] * 2
    assert seen[0] != seen[1]


def test_padding_of_a_batch_stays_padding():
    """Fewer slots than tokens, or none at all; rows past the real tokens."""
    scene = Scene(attention())
    graph = scene.graph(6)
    step = batch([1, 1], [9, 20])
    scene.check(graph, replace(step, num_tokens=5))
    before = scene.kv.k.clone()
    graph.replay(replace(step, slot_mapping=None))
    assert torch.equal(scene.kv.k, before)
    graph.replay(replace(step, slot_mapping=step.slot_mapping[:1]))
    assert (scene.kv.k != before).any(-1).sum() <= 1


def test_graphs_take_no_plan_slot():
    """A plan made before a replay still stands; the plan a step was given does not."""
    scene = Scene(attention())
    first = batch([1, 1], [9, 20])
    plan, stashed = scene.attn.plan(first), []
    want = scene.attn.run(plan, scene.q[:2], scene.kv)
    scene.step = stashed.append
    scene.graph(4).replay(batch([1, 1, 1], [30, 2, 3]))
    assert torch.equal(scene.attn.run(plan, scene.q[:2], scene.kv), want)
    for old in stashed:
        with pytest.raises(pageant.ArgumentError) as caught:
            scene.attn.run(old, scene.q[:4], scene.kv)
        assert caught.value.argument == "plan"


def test_graphs_share_their_tensors():
    scene = Scene(attention())
    small, large = scene.graph(2), scene.graph(6)
    for name in ("query_start_loc", "seq_lens", "page_table", "slot_mapping"):
        assert getattr(small.batch, name).data_ptr() == getattr(large.batch, name).data_ptr()
    for each in (small, large, small):
        scene.check(each, batch([1, 1], [17, 8]))


@pytest.mark.parametrize(
    ("given", "changes", "name"),
    [
        (batch([1] * 5, [9] * 5), {}, "num_requests"),
        (batch([0] * 5, [9] * 5), {}, "num_requests"),
        (batch([1] * 4, [9] * 4), {"num_tokens": 5}, "num_tokens"),
        (batch([3, 1], [9, 9]), {}, "max_query_len"),
        (batch([1], [9]), {"slot_mapping": torch.zeros(5, dtype=torch.int64)}, "slot_mapping"),
        (batch([1], [9]), {"draft_mask": torch.ones(1, 1, dtype=torch.bool)}, "draft_mask"),
        (batch([1], [9]), {"draft_parents": torch.full((1,), -1).int()}, "draft_parents"),
        (batch([1], [9]), {"encoder_seq_lens": torch.ones(1).int()}, "encoder_seq_lens"),
        (batch([1], [9]), {"max_seq_len": LONGEST + 1}, "max_seq_len"),
    ],
)
def test_what_the_bucket_does_not_hold_is_an_error(given, changes, name):
    scene = Scene(attention({"draft_masks": True}, speculative_tokens=1))
    graph = scene.graph(4)
    held = [x.clone() for x in (graph.batch.query_start_loc, graph.batch.seq_lens)]
    with pytest.raises(pageant.ArgumentError) as caught:
        graph.replay(replace(given, **changes))
    assert caught.value.argument == f"batch.{name}"
    assert torch.equal(graph.batch.query_start_loc, held[0])
    assert torch.equal(graph.batch.seq_lens, held[1])


def test_a_graph_with_drafts_needs_them():
    scene = Scene(attention({"draft_masks": True}, speculative_tokens=1))
    graph = scene.graph(4, drafts="mask")
    with pytest.raises(pageant.ArgumentError, match="captured with drafts='mask'") as caught:
        graph.replay(batch([1], [9]))
    assert caught.value.argument == "batch.draft_mask"
    rows = torch.ones(5, 1, dtype=torch.bool)
    with pytest.raises(pageant.ArgumentError, match="5 rows") as caught:
        graph.replay(batch([1], [9], draft_mask=rows))
    assert caught.value.argument == "batch.draft_mask"


def test_values_on_the_device_are_checked_if_asked():
    scene = Scene(attention(validate=True))
    graph, step = scene.graph(4), batch([1], [9])
    graph.replay(step)
    step.seq_lens[0] = -2
    with pytest.raises(pageant.ArgumentError, match=r"seq_lens\[0\]"):
        graph.replay(step)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": 13}, "tokens"),
        ({"tokens": 2.0}, "tokens"),
        ({"tokens": 4, "requests": 7}, "requests"),
        ({"tokens": 4, "requests": 0}, "requests"),
        ({"tokens": 4, "mixed": 1}, "mixed"),
        ({"tokens": 4, "drafts": "tree"}, "drafts"),
        ({"tokens": 4, "drafts": "mask"}, "drafts"),
    ],
)
def test_wrong_buckets_are_named(arguments, name):
    given = {"requests": None, "mixed": False, "drafts": None, **arguments}
    with pytest.raises(pageant.ArgumentError) as caught:
        bucket_of(attention(), **given)
    assert caught.value.argument == name


def test_a_cpu_has_no_graphs(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(pageant.ArgumentError, match="CUDA graphs") as caught:
        capture(attention(), print, tokens=4)
    assert caught.value.argument == "attn.device"
