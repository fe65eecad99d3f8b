"""R18: the workspace is made once, holds what any batch needs, and is no tenth larger than that."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import pageant
from tests.gpu.scene import attention, batch, noise, random_batch, rows

pytestmark = pytest.mark.gpu

UNTOUCHED = 12345.0
PARTIAL = 4  # column of an item: the slot of its partial result, or -1
LIMITS = pageant.Limits(max_requests=700, max_tokens=1400, max_seq_len=8192)
# Sixteen heads a group and two tokens fill the rows of a tile of decode.
SHAPE = pageant.Shape(num_q_heads=16, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)


def touched(attn, kv, step):
    """Bytes of the workspace that one step writes."""
    workspace = attn._planner.workspace
    parts = [workspace.partial_out, workspace.partial_lse]
    if workspace.shared is not None:
        parts += [workspace.shared.partial_out, workspace.shared.partial_lse]
    for part in parts:
        part.fill_(UNTOUCHED)
    q = rows(step.num_tokens, 16, 64)
    attn.run(attn.plan(step), q, kv)
    return sum(int((part != UNTOUCHED).sum()) * part.itemsize for part in parts)


def test_no_batch_needs_a_tenth_less():
    """The worst: each share ends one request and begins the next."""
    attn = attention(LIMITS, shape=SHAPE, speculative_tokens=1, cascade=False)
    kv = noise(attn, 1024)[0]
    shares = attn._planner._grid[0]
    whole, half = 4096, 2048
    lens = [half, *[whole] * (shares - 1), half]
    pages = np.random.default_rng(0).integers(0, 1024, sum(lens) // 16)  # shared: read alone
    worst = touched(attn, kv, batch([2] * len(lens), lens, pages, slot_mapping=None))
    assert worst <= attn.workspace_bytes <= 1.1 * worst


def test_no_batch_that_shares_needs_a_tenth_less():
    """All requests share what fills the pages, and each tile of their rows is cut."""
    attn = attention(LIMITS, shape=SHAPE, speculative_tokens=1)
    kv = noise(attn, 1024)[0]
    pages = np.concatenate([[*np.arange(511), 511 + r % 512] for r in range(700)])
    step = batch([2] * 700, [8192] * 700, pages, slot_mapping=None)
    step = dataclasses.replace(step, shared_prefix_lens=torch.zeros_like(step.seq_lens))
    worst = touched(attn, kv, step)
    assert worst <= attn.workspace_bytes <= 1.1 * worst


def test_it_is_made_once():
    """Random batches change neither its size nor its place, and name no slot past its end."""
    limits = pageant.Limits(max_requests=64, max_tokens=128, max_seq_len=2048)
    attn = attention(limits, speculative_tokens=3)
    kv, size = noise(attn, 64 * 128)[0], attn.workspace_bytes
    workspace = attn._planner.workspace
    places = [workspace.partial_out.data_ptr(), workspace.partial_lse.data_ptr()]
    q, rng = rows(128, 8, 64), np.random.default_rng(18)
    for _ in range(50):
        step = random_batch(rng, limits, 64 * 128, longest=4)
        plan = attn.plan(step)
        out = attn.run(plan, q[: step.num_tokens], kv)
        assert out.isfinite().all()
        for work in plan.buffers.work.values():
            first, count = work.shares.cpu().T
            items = work.items.cpu()
            assert (first + count).max() <= len(items)
            for begin, number in zip(first.tolist(), count.tolist(), strict=True):
                slots = items[begin : begin + number, PARTIAL]
                assert (slots < workspace.partial_lse.shape[0]).all()
        assert attn._planner.workspace is workspace
        assert [workspace.partial_out.data_ptr(), workspace.partial_lse.data_ptr()] == places
        assert attn.workspace_bytes == size


def test_a_step_allocates_nothing_but_its_output():
    limits = pageant.Limits(max_requests=64, max_tokens=64, max_seq_len=2048)
    attn = attention(limits)
    kv, q = noise(attn, 64 * 128)[0], rows(64, 8, 64)
    out = torch.empty_like(q)
    steps = [batch([1] * count, [2048] * count) for count in (1, 64)]
    for step in steps:
        attn.run(attn.plan(step), q[: step.num_tokens], kv, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for step in steps:
        attn.run(attn.plan(step), q[: step.num_tokens], kv, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
