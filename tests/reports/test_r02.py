"""R2: requests without new tokens or without keys, and empty batches, crashed or left stale data.

They are legal everywhere, alone or between others, and nothing of theirs is read.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from tests.inputs import Case, build
from tests.reports.scene import KERNELS, assert_means, each_kernel, each_phase, scene


def case(lengths, **others):
    return Case(seed=3, lengths=lengths, group=3, v_head_dim=24, **others)


def test_the_example():
    step = scene("auto", "prefill", [1, 0, 2], [5, 0, 3])
    out, lse = step.run()
    assert_means(out[:, 0, 0], [2.0, 0.5, 1.0])
    torch.testing.assert_close(lse[:, 0].exp(), torch.tensor([5.0, 2.0, 3.0]))


# `build` gives requests without new tokens page ids that do not exist.
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "lengths",
    [
        ((1, 5), (0, 0), (2, 3)),
        ((0, 9), (1, 5), (0, 30), (3, 3)),
        ((0, 0),),
        ((0, 7),),
        ((0, 0), (0, 0), (0, 0)),
        ((1, 0), (1, 9), (2, 0)),
        ((2, 0), (0, 4), (1, 0)),
        (),
    ],
)
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"padding": 3},
        {"speculative": 3, "splits": 3},
        {"window": 2, "sinks": True, "alibi": True},
        {"causal": False, "format": "fp8_e4m3"},
        {"cross": True},
        {"drafts": "parents"},
        {"drafts": "mask"},
    ],
)
def test_zero_lengths_anywhere(kernels, lengths, others):
    build(case(lengths, **others), kernels).check()


@each_kernel
def test_no_request_then_some(kernels):
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=4),
        features=pageant.Features(lse=True),
        options=pageant.Options(kernels=kernels),
    )
    kv = attn.new_cache(num_layers=1, num_pages=4)
    nothing = pageant.Batch.from_lengths([], [], [], page_size=4)
    some = pageant.Batch.from_lengths([3], [3], [[2]], page_size=4)
    v = torch.arange(3.0)[:, None, None].expand(3, 1, 16)
    for _ in range(2):
        plan = attn.plan(nothing)
        attn.write(plan, kv[0], torch.zeros(0, 1, 16), torch.zeros(0, 1, 16))
        out, lse = attn.run(plan, torch.zeros(0, 2, 16), kv[0], return_lse=True)
        assert out.shape == (0, 2, 16)
        assert lse.shape == (0, 2)
        plan = attn.plan(some)
        attn.write(plan, kv[0], torch.ones(3, 1, 16), v)
        assert_means(attn.run(plan, torch.zeros(3, 2, 16), kv[0])[:, 0, 0], [0.0, 0.5, 1.0])


@each_kernel
def test_only_padding(kernels):
    """No request, yet four padding tokens: their rows are left alone."""
    problem = build(case((), padding=4), kernels)
    out, _ = problem.run()
    assert out.shape == (0, 6, 24)


@each_kernel
@each_phase
def test_a_later_batch_is_not_stale(kernels, phase):
    step = scene(kernels, phase, [2, 1], [9, 6])
    want = step.means()
    idle = replace(
        step.batch,
        query_start_loc=torch.zeros_like(step.batch.query_start_loc),
        slot_mapping=None,
    )
    step.attn.plan(idle)
    assert torch.equal(step.means(), want)


def test_empty_merge():
    out, lse = pageant.ops.merge_states([torch.zeros(0, 2, 16)] * 2, [torch.zeros(0, 2)] * 2)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)
