"""R20: planning the next step disturbed the one before, or waited for lengths on the host.

With several plan slots an older plan reads what it read; with one, using it is an error. Lengths
on the host are never needed.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Layer
from tests.reports.scene import each_kernel, each_phase

PAGE = 4
LAYERS = (Layer(), Layer(window=5))
STEPS = (
    ([3, 1], [9, 30], [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9, 10]]),
    ([1, 1, 1], [40, 1, 40], [list(range(20, 30)), [11], list(range(20, 30))]),
    ([5], [5], [[30, 12]]),
    ([], [], []),
    ([1, 6], [17, 8], [[35, 34, 33, 32, 31], [37, 36]]),
)


def attention(kernels, phase, slots):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=4, max_tokens=16, max_seq_len=64),
        pageant.Features.of(LAYERS, lse=True, draft_masks=True, non_causal=True),
        pageant.Options(
            kernels=kernels, plan_slots=slots, speculative_tokens=7 if phase == "decode" else 0
        ),
    )


def batch(index, **others):
    query_lens, seq_lens, table = STEPS[index]
    return pageant.Batch.from_lengths(query_lens, seq_lens, table, PAGE, **others)


def pool(attn):
    kv = attn.new_cache(num_layers=1, num_pages=40)[0]
    rng = torch.Generator().manual_seed(20)
    for view in (kv.k, kv.v):
        view.copy_(torch.randn(view.shape, generator=rng))
    return kv


def answers(attn, plan, kv):
    q = torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(2))
    count = plan.batch.num_tokens
    return [x for layer in LAYERS for x in attn.run(plan, q[:count], kv, layer, return_lse=True)]


@each_kernel
@each_phase
@pytest.mark.parametrize("slots", [2, 3])
def test_older_plans_read_what_they_read(kernels, phase, slots):
    """Every plan still alive, run again after each newer one, whose batch has other tensors."""
    attn = attention(kernels, phase, slots)
    kv, alive = pool(attn), []
    for turn in range(2 * len(STEPS)):
        plan = attn.plan(batch(turn % len(STEPS)))
        alive.append((plan, answers(attn, plan, kv)))
        for dead, _ in alive[:-slots]:
            with pytest.raises(pageant.ArgumentError, match="newest") as caught:
                answers(attn, dead, kv)
            assert caught.value.argument == "plan"
        for older, want in alive[-slots:]:
            for got, expected in zip(answers(attn, older, kv), want, strict=True):
                assert torch.equal(got, expected)


@each_kernel
@each_phase
def test_slots_write_where_their_own_plan_says(kernels, phase):
    attn = attention(kernels, phase, 2)
    kv = attn.new_cache(num_layers=1, num_pages=40)[0]
    first, second = attn.plan(batch(0)), attn.plan(batch(4))
    for plan, value in ((second, 2.0), (first, 1.0)):
        rows = torch.full((plan.batch.num_tokens, 1, 16), value)
        attn.write(plan, kv, rows, rows)
    for plan, value in ((first, 1.0), (second, 2.0)):
        slots = plan.batch.slot_mapping
        assert (kv.k[slots // PAGE, slots % PAGE] == value).all()
    assert (kv.k != 0).any(-1).sum() == first.batch.num_tokens + second.batch.num_tokens


@each_kernel
@each_phase
def test_updating_one_slot_leaves_the_other(kernels, phase):
    attn = attention(kernels, phase, 2)
    kv, steps = pool(attn), (batch(0, max_seq_len=64), batch(4, max_seq_len=64))
    plans = [attn.plan(step) for step in steps]
    want = answers(attn, plans[0], kv)
    steps[0].seq_lens[1] = 31
    steps[1].seq_lens[0] = 18
    attn.update(plans[1])
    for got, expected in zip(answers(attn, plans[0], kv), want, strict=True):
        assert torch.equal(got, expected)
    attn.update(plans[0])
    assert not torch.equal(answers(attn, plans[0], kv)[1], want[1])


@each_kernel
@each_phase
@pytest.mark.parametrize("index", range(len(STEPS)))
def test_no_lengths_on_the_host_are_needed(kernels, phase, index):
    """Without host copies, with right ones and with wrong ones: the same answer."""
    attn = attention(kernels, phase, 1)
    kv, step = pool(attn), batch(index)
    assert step.query_start_loc_cpu is None
    assert step.seq_lens_cpu is None
    want = answers(attn, attn.plan(step), kv)
    right = step.query_start_loc.clone(), step.seq_lens.clone()
    wrong = torch.zeros_like(right[0]), torch.full_like(right[1], 2**30)
    for starts, lens in (right, wrong):
        told = replace(step, query_start_loc_cpu=starts, seq_lens_cpu=lens, max_seq_len=64)
        for got, expected in zip(answers(attn, attn.plan(told), kv), want, strict=True):
            assert torch.equal(got, expected)
