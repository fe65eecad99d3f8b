"""R20: the host waits for nothing, and a step planned early does not disturb the one before."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer
from tests.gpu.scene import attention, batch, no_waiting, noise, rows

pytestmark = pytest.mark.gpu

LIMITS = pageant.Limits(max_requests=256, max_tokens=512, max_seq_len=4096)
LAYERS = (Layer(), Layer(window=100))
LENS = ([900, 17, 4000], [1, 2, 3, 4, 5], [4096] * 3, [33] * 100)


def scene(**options):
    attn = attention(LIMITS, LAYERS, **options)
    return attn, noise(attn, 1024)[0]


def step(attn, kv, given, seed):
    """Plan, write and run; the answers of both layers."""
    count = given.num_tokens
    plan = attn.plan(given)
    attn.write(plan, kv, rows(count, 2, 64, seed), rows(count, 2, 64, seed + 1))
    q = rows(count, 8, 64, seed + 2)
    return [x for layer in LAYERS for x in attn.run(plan, q, kv, layer, return_lse=True)]


def batches(on_host=True):
    """Decodes and prefills; with their lengths on the host too, or not."""
    made = []
    for index, lens in enumerate(LENS):
        query_lens = [min(n, 40 if index % 2 else 1) for n in lens[:12]] + [1] * len(lens[12:])
        pages = np.random.default_rng(index).permutation(1024)
        others = {}
        if on_host:
            starts = np.concatenate([[0], np.cumsum(query_lens)])
            others["query_start_loc_cpu"] = torch.tensor(starts, dtype=torch.int32)
            others["seq_lens_cpu"] = torch.tensor(lens, dtype=torch.int32)
        made.append(batch(query_lens, lens, pages, **others))
    return made


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_waits(on_host, invariant):
    attn, kv = scene(invariant=invariant)
    given = batches(on_host)
    for index, each in enumerate(given):
        step(attn, kv, each, index)
    with no_waiting():
        for index, each in enumerate(given):
            step(attn, kv, each, index)
            attn.update(attn.plan(each))


def test_the_detector_sees_waiting():
    with pytest.raises(RuntimeError), no_waiting():
        torch.ones(1, device="cuda").item()


def test_the_next_plan_does_not_disturb_a_stalled_step():
    """All steps are planned, written and run before the device has begun the first."""
    attn, kv = scene()
    given = batches()
    clean = kv.k.clone(), kv.v.clone()
    want = [step(attn, kv, each, index) for index, each in enumerate(given)]
    torch.cuda.synchronize()
    for view, old in zip((kv.k, kv.v), clean, strict=True):
        view.copy_(old)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # clock cycles: half a second
    got = [step(attn, kv, each, index) for index, each in enumerate(given)]
    assert not torch.cuda.current_stream().query(), "the device was not stalled"
    for one, other in zip(got, want, strict=True):
        for x, expected in zip(one, other, strict=True):
            assert torch.equal(x, expected)


def test_lengths_changed_behind_a_stalled_step():
    """The batch's own tensors are overwritten, in stream order, for the next step."""
    attn, kv = scene()
    lens = ([900, 17, 3000], [40, 1200, 5])
    q, given = rows(3, 8, 64), batch([1, 1, 1], [4000] * 3, slot_mapping=None)
    want = []
    for each in lens:
        given.seq_lens.copy_(torch.tensor(each))
        want.append(attn.run(attn.plan(given), q, kv).clone())
    staged = [torch.tensor(each, dtype=torch.int32).cuda() for each in lens]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    given.seq_lens.copy_(staged[0])
    plan = attn.plan(given)
    first = attn.run(plan, q, kv)
    given.seq_lens.copy_(staged[1])
    attn.update(plan)
    second = attn.run(plan, q, kv)
    assert not torch.cuda.current_stream().query(), "the device was not stalled"
    assert torch.equal(first, want[0])
    assert torch.equal(second, want[1])


def test_a_plan_costs_the_host_little():
    """Less than 100 us at 256 requests, whose lengths the device alone knows."""
    attn, _ = scene()
    given = batch([1] * 256, [16] * 256, list(range(256)), slot_mapping=None)
    spans = []
    for _ in range(300):
        start = time.perf_counter()
        attn.plan(given)
        spans.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    assert np.median(spans) < 100e-6, f"{np.median(spans) * 1e6:.0f} us"
