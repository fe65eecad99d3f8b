"""What real hosts hand over: padded batches, empty ones, dummy runs, runs before a cache exists."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import pageant
from pageant import ArgumentError, Batch, Layer
from pageant.plan import prefix
from tests.inputs import NO_SUCH_PAGE, Case, assert_close, build
from tests.reports.scene import each_kernel

E4M3 = torch.float8_e4m3fn
OUT_FORMATS = ("model", "fp8_e4m3", "nvfp4")
each_out_format = pytest.mark.parametrize("out_format", OUT_FORMATS)
FORMATS = ("fp32", "bf16", "fp8_e4m3", "int8", "nvfp4")


@pytest.fixture
def _always(monkeypatch):
    """Share whatever can be shared."""
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=1, because="a test"),))


def case(lengths=((1, 33), (3, 40), (1, 36), (2, 44), (0, 0), (3, 21)), **others):
    """Decodes with drafts that begin with the same 20 tokens, one of them without a new token."""
    fields = {
        "seed": 3,
        "head_dim": 32,
        "v_head_dim": 32,
        "sinks": True,
        "speculative": 2,
        "prefixes": ((0, 20),) * 6 if len(lengths) == 6 else (),
    }
    return Case(lengths=lengths, **{**fields, **others})


def attention(problem):
    """The problem's, with every output format."""
    old = problem.attn
    features = replace(old.features, out_formats=OUT_FORMATS)
    return pageant.Attention(old.shape, old.cache, old.limits, features, old.options)


def rooms(attn, rows, out_format):
    """Out and out_scales, poisoned with one byte."""
    shape = attn.shape
    dtype, per_byte = {
        "model": (shape.dtype, 1),
        "fp8_e4m3": (E4M3, 1),
        "nvfp4": (torch.uint8, 2),
    }[out_format]
    out = torch.empty(rows, shape.num_q_heads, shape.value_dim // per_byte, dtype=dtype)
    scales = torch.empty(rows, shape.num_q_heads * shape.value_dim // 16, dtype=E4M3)
    for tensor in (out, scales):
        tensor.view(torch.uint8).fill_(0x55)
    return out, scales if out_format == "nvfp4" else None


def run(attn, step, problem, out_format, rows):
    """All bytes of out, of its scales, and the lse."""
    out, scales = rooms(attn, rows, out_format)
    layer = replace(problem.layer, out_format=out_format, out_scale=2.0)
    q = torch.full((rows, *problem.q.shape[1:]), torch.nan, dtype=problem.q.dtype)
    q[: len(problem.q)] = problem.q
    plan = attn.plan(step)
    _, lse = attn.run(plan, q, problem.cache, layer, out=out, out_scales=scales, return_lse=True)
    parts = (out,) if scales is None else (out, scales)
    return *(part.view(torch.uint8).flatten(1) for part in parts), lse


def padded(step, tokens, requests):
    """The same batch with so many padding tokens and requests, whose tables hold nonsense."""
    more = torch.zeros(requests, dtype=torch.int32)
    table = torch.full((requests, step.page_table.shape[1]), NO_SUCH_PAGE, dtype=torch.int32)
    changes = {}
    if step.draft_mask is not None:  # a host may pad its mask as far as the tokens, or not at all
        rows = torch.ones(tokens, step.max_query_len, dtype=torch.bool)
        changes["draft_mask"] = torch.cat([step.draft_mask, rows])
    if step.draft_parents is not None:
        changes["draft_parents"] = torch.cat(
            [step.draft_parents, torch.full((tokens,), 99, dtype=torch.int32)]
        )
    if isinstance(step.causal, torch.Tensor):
        changes["causal"] = torch.cat([step.causal, more.bool()])
    return replace(
        step,
        query_start_loc=torch.cat([step.query_start_loc, step.query_start_loc[-1] + more]),
        seq_lens=torch.cat([step.seq_lens, more]),
        page_table=torch.cat([step.page_table, table]),
        num_requests=step.num_requests + requests,
        num_tokens=step.num_tokens + tokens,
        **changes,
    )


@pytest.mark.usefixtures("_always")
@each_kernel
@each_out_format
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"drafts": "mask"},
        {"drafts": "parents", "window": 60},
        {"causal": (True, False, True, False, True, True)},
        {"lengths": ((1, 33), (3, 40), (1, 36), (2, 44), (0, 0), (9, 21)), "drafts": "mask"},
    ],
)
def test_padding_changes_nothing(kernels, out_format, format, others):
    problem = build(case(format=format, **others), kernels)
    attn, step = attention(problem), problem.batch
    real = len(problem.q)
    want = run(attn, step, problem, out_format, real)
    if out_format == "model":
        out = want[0].view(torch.float32).view(problem.expected_out.shape)
        assert_close(out, problem.expected_out, 1e-5)
    if kernels == "auto":
        assert attn.plan(step).shared[problem.case.window]
    for tokens, requests in ((0, 2), (5, 0), (5, 2)):
        got = run(attn, padded(step, tokens, requests), problem, out_format, real + tokens + 3)
        for ours, theirs in zip(got, want, strict=True):
            assert torch.equal(ours[:real], theirs)
        for part in got[:-1]:
            assert (part[real:] == 0x55).all(), "rows past the real tokens were written"
        assert (got[-1][real:] == -torch.inf).all()


@pytest.mark.usefixtures("_always")
@each_kernel
@each_out_format
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("drafts", [None, "mask", "parents"])
@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((0, 24),) * 6])
def test_nothing_to_do(kernels, out_format, format, drafts, lengths):
    """No request, or only requests without new tokens: padding alone, and it is left alone."""
    problem = build(case(lengths, format=format, drafts=drafts, padding=4), kernels)
    attn = attention(problem)
    *parts, lse = run(attn, problem.batch, problem, out_format, 7)
    assert all((part == 0x55).all() for part in parts)
    assert (lse == -torch.inf).all()


@each_kernel
@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("starts", [(0, 0, 0), (0, 2, 5), (0, 5, 5), (0, 1, 1)])
@pytest.mark.parametrize("keys", [0, 1, 7])
def test_dummy_runs(kernels, speculative, starts, keys):
    """Five tokens of two requests over page 0, divided in any way: rows of no key are 0."""
    problem = build(case((), speculative=speculative), kernels)
    attn = problem.attn
    kv = attn.new_cache(num_layers=1, num_pages=1)[0]
    batch = Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((2,), keys, dtype=torch.int32),
        page_table=torch.zeros(2, 3, dtype=torch.int32),
        slot_mapping=torch.full((5,), -1),
        num_requests=2,
        num_tokens=5,
        max_query_len=5,
        max_seq_len=7,
    )
    plan = attn.plan(batch)
    attn.write(plan, kv, torch.ones(5, 2, 32), torch.ones(5, 2, 32))
    assert (kv.v == 0).all()
    out = torch.full((5, 4, 32), 77.0)
    _, lse = attn.run(plan, torch.ones(5, 4, 32), kv, problem.layer, out=out, return_lse=True)
    real = starts[-1]
    assert (out[:real] == 0).all()
    assert (out[real:] == 77.0).all()
    lens = [m for a, b in pairwise(starts) for m in range(b - a, 0, -1)]
    seen = torch.tensor([max(0, keys - m + 1) for m in lens])
    assert torch.equal(lse[:real, 0].exp().round().int(), seen.int())


@each_out_format
def test_a_run_before_there_is_a_cache(out_format):
    problem = build(case())
    attn, layer = attention(problem), Layer(out_format=out_format, sinks=problem.layer.sinks)
    q = torch.full((7, 4, 32), torch.nan)
    for rows in (7, 9):
        out, scales = rooms(attn, rows, out_format)
        got, lse = attn.run(None, q, None, layer, out=out, out_scales=scales, return_lse=True)
        assert got is out
        assert (out.view(torch.uint8) == 0).all()
        assert scales is None or (scales.view(torch.uint8) == 0).all()
        assert torch.equal(lse, torch.full((7, 4), -torch.inf))
    made = attn.run(None, q, None, layer, out_scales=scales)
    assert made.shape == (7, *out.shape[1:])
    assert made.dtype == out.dtype
    assert (made.view(torch.uint8) == 0).all()


def test_a_run_before_there_is_a_cache_finds_the_same_mistakes():
    problem = build(case())
    attn = problem.attn
    q = torch.ones(7, 4, 32)
    plan = attn.plan(problem.batch)
    for call, argument in (
        (lambda: attn.run(None, q, problem.cache), "plan"),
        (lambda: attn.run(plan, problem.q, None), "cache"),
        (lambda: attn.run(None, q[:, :3], None), "q"),
        (lambda: attn.run(None, q, None, Layer(window=3)), "layer.window"),
        (lambda: attn.run(None, q, None, Layer(out_format="nvfp4")), "layer.out_format"),
        (lambda: attn.run(None, q, None, out=q.half()), "out"),
        (lambda: attn.run(None, q, None, out=q[:1].expand(7, 4, 32)), "out"),
        (lambda: attn.run(None, q, None, out_scales=q), "out_scales"),
        (lambda: attn.run(None, q, None, return_lse=1), "return_lse"),
        (lambda: attn.run(None, q, None, k=q[:, :2]), "v"),
        (lambda: attn.run(None, q, None, k=q, v=q[:, :2]), "k"),
        (lambda: attn.run(None, q, None, k=q[:, :2], v=q[:, :2].half()), "v"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
    assert (q == 1).all()
