"""Attention in Triton, interpreted: equal to the float64 reference on random cases.

The interpreter computes bfloat16 wrongly, so cases are of the other types; a GPU runs them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings

import pageant
from pageant.cache.formats import resolve
from pageant.device import Device
from pageant.kernels.triton.attention_tile import _as_operand
from tests.inputs import Case, build, cases


@dataclass(frozen=True)
class HALF:
    """What of a variant decides about operands."""

    rows: int
    dtype: tl.dtype = tl.float16
    as_is: bool = False


@triton.jit
def call_as_operand(q, operand, factors, factor, C: tl.constexpr, DIM: tl.constexpr):
    row = tl.arange(0, C.rows)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    rows, found = _as_operand(tl.load(q + at), factor, C)
    tl.store(operand + at, rows)
    tl.store(factors + row, found)


FEW_SHARES = replace(Device.of("sm80"), num_sms=2)


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for an A100 of two multiprocessors, whose kernels are interpreted."""
    monkeypatch.setattr(Device, "detect", lambda _device: FEW_SHARES)


def is_served(case: Case) -> bool:
    """All are but float32 queries over a quantised cache."""
    return case.dtype != torch.float32 or not resolve(case.format, case.dtype).quantized


def prove(dtype: torch.dtype, max_len: int, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(cases(dtype, max_len=max_len).filter(is_served))
    def equal(case: Case) -> None:
        problem = build(case)
        names = [row.name for row in problem.attn.explain().rows.values()]
        assert names == ["triton.prefill", "triton.decode"]
        problem.check()

    equal()


@pytest.mark.parametrize(("dtype", "examples"), [(torch.float16, 30), (torch.float32, 12)])
def test_small(dtype: torch.dtype, examples: int) -> None:
    prove(dtype, 70, examples)


def test_over_several_blocks_and_shares() -> None:
    prove(torch.float16, 700, 12)


def test_a_share_that_ends_one_tile_and_begins_another() -> None:
    """Three requests of 6, 6 and 7 blocks in four shares: two leave two partial results each."""
    case = Case(
        seed=1,
        lengths=((1, 700), (1, 650), (1, 800)),
        dtype=torch.float16,
        kv_heads=1,
        group=2,
        head_dim=32,
        v_head_dim=32,
        format="fp16",
        page_size=16,
        memory="LBHNC",
    )
    problem = build(case)
    problem.check()
    plan = problem.attn.plan(problem.batch)
    work = plan.buffers.work["decode", None]
    partial = {
        tuple(work.items[item, 4].item() >= 0 for item in range(first, first + count))
        for first, count in work.shares.tolist()
    }
    assert (True, True) in partial


def test_invariant_mode_ignores_the_batch() -> None:
    """A request alone, in a batch, and in chunks: the same bits."""
    torch.manual_seed(0)
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float16),
        pageant.CacheSpec(page_size=16),
        pageant.Limits(max_requests=4, max_tokens=64, max_seq_len=256),
        options=pageant.Options(invariant=True),
    )
    kv = attn.new_cache(num_layers=1, num_pages=24)
    q = torch.randn(30, 4, 32).half()
    k, v = (torch.randn(30, 2, 32).half() for _ in "kv")
    whole = pageant.Batch.from_lengths([30], [150], [list(range(10))], page_size=16)
    for view in (kv[0].k, kv[0].v):
        view.copy_(torch.randn(view.shape))
    plan = attn.plan(whole)
    attn.write(plan, kv[0], k, v)
    want = attn.run(plan, q, kv[0])
    pages = [list(range(10)), [11, 12]]
    chunk = pageant.Batch.from_lengths([7, 1], [127, 20], pages, page_size=16)
    rows = torch.cat([q[:7], q[:1]])
    assert torch.equal(attn.run(attn.plan(chunk), rows, kv[0])[:7], want[:7])
    last = pageant.Batch.from_lengths([1], [150], pages[:1], page_size=16)
    assert torch.equal(attn.run(attn.plan(last), q[-1:], kv[0])[0], want[-1])


# Not so far below 0 that sinks would make outputs subnormal in float16.
@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_scores_may_be_turned_around_or_all_equal(scale: float) -> None:
    @settings(max_examples=8, suppress_health_check=list(HealthCheck))
    @given(cases(torch.float16).filter(is_served))
    def equal(case: Case) -> None:
        build(replace(case, score_scale=scale)).check()

    equal()


def test_addresses_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pageant.LayerCache, "is_far", True)
    prove(torch.float16, 70, examples=12)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_bfloat16_rows_become_float16_whatever_their_size(size: float) -> None:
    """As far as the interpreter's bfloat16 goes: conversions from and to it."""
    rows, dim = 16, 32
    q = (torch.randn(rows, dim) * size).bfloat16()
    q[3], q[5, 1:] = 0, 0
    got = torch.zeros(rows, dim, dtype=torch.float16)
    factors = torch.zeros(rows)
    call_as_operand[(1,)](q, got, factors, -0.5, HALF(rows=rows), dim)
    assert got.isfinite().all()
    assert (factors > 0).all()
    torch.testing.assert_close(got.double() * factors[:, None].double(), q.double() * -0.5)


def test_a_query_in_fp8_may_be_packed_or_not() -> None:
    """Converting, torch keeps the strides of some: of one token's slice, not of two tokens'."""
    torch.manual_seed(0)
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16),
        pageant.CacheSpec(page_size=4),
        pageant.Limits(max_requests=2, max_tokens=8, max_seq_len=16),
    )
    kv = attn.new_cache(num_layers=1, num_pages=4)
    for view in (kv[0].k, kv[0].v):
        view.copy_(torch.randn(view.shape))
    fused = torch.randn(2, 4, 16).to(torch.float8_e4m3fn)
    for count in (1, 2):
        plan = attn.plan(pageant.Batch.from_lengths([1] * count, [8] * count, [[0, 1]] * count, 4))
        got = attn.run(plan, fused[:count, :2], kv[0])
        assert torch.equal(got, attn.run(plan, fused[:count, :2].half().contiguous(), kv[0]))


def test_lengths_on_the_device_are_kept_within_the_limits() -> None:
    """What the host cannot see cannot make a kernel read past a buffer."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=4),
        pageant.Limits(max_requests=4, max_tokens=8, max_seq_len=16),
    )
    kv = attn.new_cache(num_layers=1, num_pages=4)
    batch = pageant.Batch.from_lengths([1, 1], [5, 9], [[0, 1, 0, 0], [1, 2, 3, 0]], page_size=4)
    plan = attn.plan(batch)
    batch.seq_lens[:] = torch.tensor([-3, 1 << 30])
    batch.query_start_loc[:] = torch.tensor([0, 1, 1 << 30])
    attn.update(plan)
    assert plan.buffers.batch.key_lens.tolist() == [0, 16]
    assert plan.buffers.batch.query_start_loc.tolist() == [0, 1, 2]
    attn.run(plan, torch.zeros(2, 2, 16), kv[0])
    with pytest.raises(pageant.ArgumentError, match="query_start_loc"):
        plan.check()
