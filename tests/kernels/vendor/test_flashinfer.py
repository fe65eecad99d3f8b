"""FlashInfer's rows by the provider, computed by the stand-in, with every call bound."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pageant
from pageant import ContextParallel, Features, Options, ops
from pageant.cache.out_scales import SwizzledScales
from pageant.kernels.vendor.flashinfer_native import alibi_slopes
from pageant.plan.host_plan import HostPlanner
from pageant.types import ArgumentError
from tests.inputs import BOUNDS, Case, Problem, assert_close, build
from tests.kernels.vendor.scene import attention, by_flashinfer, flashinfer
from tests.kernels.vendor.signatures import folder, read, recorded
from tests.parallel.sharded import on_rank

QUANTIZED_QUERY = 5e-2
LENGTHS = ((1, 20), (1, 40), (5, 37), (3, 3), (0, 9), (1, 0), (9, 60))
MIXED = (True, False, True, False, True, True, False)
NO_LSE = {"lse": False}
DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
SINKS = "BatchAttentionWithAttentionSinkWrapper"
XQA, TRTLLM = "xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"
CONTEXT = "trtllm_batch_context_with_kv_cache"


def problem(features: dict[str, Any] | None = None, **case: Any) -> Problem:
    plain: dict[str, Any] = {
        "seed": 3, "lengths": LENGTHS, "dtype": torch.bfloat16, "kv_heads": 2, "group": 4,
        "head_dim": 64, "v_head_dim": 64, "format": "bf16", "page_size": 16,
    }  # fmt: skip
    made = build(Case(**{**plain, **case}))
    mine = made.attn
    features = replace(mine.features, **(features or {}))
    parts = (mine.shape, mine.cache, mine.limits, features, mine.options)
    return replace(made, attn=pageant.Attention(*parts))


def check(given: Problem, bound: float = BOUNDS[torch.bfloat16]) -> list[str]:
    """Run twice, as two layers would; the answer is right, and only the first one plans."""
    lse_too, real = given.attn.features.lse, given.expected_out.shape[0]
    with flashinfer() as calls:
        plan = given.attn.plan(given.batch)
        for _ in range(2):
            planned = sum(name.endswith(".plan") for name in calls)
            out = torch.full_like(given.q, 77.0, dtype=torch.bfloat16)
            result = given.attn.run(
                plan, given.q, given.cache, given.layer, out=out, return_lse=lse_too
            )
            assert (out[real:] == 77.0).all(), "rows past the real tokens were written"
            assert_close(out[:real], given.expected_out, bound)
            if lse_too:
                assert_close(result[1][:real], given.expected_lse, bound)
        assert sum(name.endswith(".plan") for name in calls) == planned
    return sorted(
        {name.removesuffix(".run") for name in calls if not name.endswith((".plan", "_"))}
    )


NATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "cap": {"soft_cap": 5.0},
    "not causal": {"causal": MIXED},
    "cross": {"cross": True},
    "fp8": {"format": "fp8_e4m3", "scales": True},
    "padding": {"padding": 5},
}


@pytest.mark.parametrize("name", NATIVE)
def test_native(name: str) -> None:
    called = check(by_flashinfer(problem(**NATIVE[name]), "sm80"))
    assert called == [DECODE, PREFILL]


def test_native_in_invariant_mode() -> None:
    assert check(by_flashinfer(problem(), "sm90", invariant=True)) == [DECODE, PREFILL]


def test_native_with_fp8_queries() -> None:
    given = problem(format="fp8_e4m3", scales=True)
    check(by_flashinfer(given, "sm90", table_kernels=False), QUANTIZED_QUERY)


def test_native_with_flashinfers_own_slopes() -> None:
    given = problem({**NO_LSE, "alibi": True}, alibi=True)
    layer = replace(given.layer, alibi_slopes=torch.tensor(alibi_slopes(8)))
    want = given.attn.run(given.attn.plan(given.batch), given.q, given.cache, layer)
    mine = replace(by_flashinfer(given, "sm80"), layer=layer, expected_out=want.double())
    check(mine)
    with pytest.raises(ArgumentError, match="allowed: FlashInfer's own of 8 heads"):
        check(replace(mine, layer=given.layer))


TABLES: dict[str, dict[str, Any]] = {
    "ragged": {},
    "uniform": {"lengths": ((3, 20), (3, 40), (3, 5))},
    "one token": {"lengths": ((1, 20), (1, 40))},
    "more rows than keys": {"lengths": ((3, 2), (1, 40), (5, 37), (19, 6))},
    "window": {"window": 9},
    "sinks": {"sinks": True},
    "float scales": {"scales": True},
}


@pytest.mark.parametrize("name", TABLES)
def test_xqa(name: str) -> None:
    given = problem(NO_LSE, speculative=4, **TABLES[name])
    called = check(by_flashinfer(given, "sm90"))
    sinks = name == "sinks"
    prefill = [] if name in ("uniform", "one token") else [SINKS if sinks else PREFILL]
    assert called == [*prefill, XQA]


@pytest.mark.parametrize("drafts", ["mask", "parents"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("lengths", [LENGTHS, ((1, 20), (1, 40)), ((5, 9), (5, 30))])
def test_xqa_with_draft_masks(drafts: str, window: int | None, lengths: Any) -> None:
    given = problem(NO_LSE, speculative=4, drafts=drafts, window=window, lengths=lengths)
    given = _with_keys(given) if lengths is LENGTHS else given
    check(by_flashinfer(given, "sm90"))


def _with_keys(given: Problem) -> Problem:
    """The same without the decode that has no key, which XQA refuses with a draft mask."""
    case = given.case
    lengths = tuple(pair for pair in case.lengths if pair[0] <= pair[1])
    return problem(NO_LSE, **{**vars(case), "lengths": lengths})


def test_xqa_refuses_drafts_without_keys() -> None:
    given = problem(NO_LSE, speculative=4, drafts="mask", lengths=((3, 2), (1, 5)))
    with pytest.raises(
        ArgumentError, match=r"batch\.seq_lens is .less than a request's new tokens"
    ):
        check(by_flashinfer(given, "sm90"))


@pytest.mark.parametrize("causal", [False, MIXED])
@pytest.mark.parametrize("lengths", [LENGTHS, ((2, 20),) * 7])
def test_xqa_not_causal(causal: Any, lengths: Any) -> None:
    check(by_flashinfer(problem(NO_LSE, speculative=4, causal=causal, lengths=lengths), "sm120"))


@pytest.mark.parametrize("sinks", [False, True])
def test_xqa_over_fp8(sinks: bool) -> None:
    given = problem(NO_LSE, speculative=4, format="fp8_e4m3", scales=True, sinks=sinks)
    check(by_flashinfer(given, "sm90"), QUANTIZED_QUERY)


def test_sink_kernels_that_flashinfer_cannot_tell_apart() -> None:
    given = [problem(NO_LSE, sinks=True, head_dim=dim, v_head_dim=dim) for dim in (64, 128)]
    first, other = (by_flashinfer(each, "sm90") for each in given)
    with flashinfer():
        first.attn.run(first.attn.plan(first.batch), first.q, first.cache, first.layer)
        plan = other.attn.plan(other.batch)
        with pytest.raises(ArgumentError, match="of both have one name"):
            other.attn.run(plan, other.q, other.cache, other.layer)


@pytest.mark.parametrize("name", TABLES)
def test_trtllm_gen(name: str) -> None:
    given = problem(NO_LSE, speculative=4, **TABLES[name])
    assert set(check(by_flashinfer(given, "sm100"))) <= {CONTEXT, TRTLLM}


@pytest.mark.parametrize("case", [{}, {"window": 9}])
def test_trtllm_gen_with_lse(case: dict[str, Any]) -> None:
    assert check(by_flashinfer(problem(speculative=4, **case), "sm103")) == [PREFILL, TRTLLM]


def test_trtllm_gen_with_lse_and_sinks() -> None:
    """The lse is without sinks, the output with them. No prefill serves both, so ranks do."""
    given = problem(speculative=4, sinks=True, lengths=((2, 20), (1, 9)))
    parts = by_flashinfer(problem(NO_LSE, speculative=4, lengths=((2, 20), (1, 9))), "sm100")
    parts.attn._calls.__dict__["features"] = given.attn.features
    parts.attn.features = given.attn.features
    check(replace(given, attn=parts.attn))


@pytest.mark.parametrize("swizzled", [True])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("query_scale", [None, 0.25])
def test_trtllm_gen_over_quantised_caches(
    fmt: str, swizzled: bool, query_scale: float | None
) -> None:
    given = problem(
        NO_LSE, speculative=4, format=fmt, scales=True, query_scale=query_scale,
        swizzled=swizzled and fmt == "nvfp4",
    )  # fmt: skip
    bound = QUANTIZED_QUERY if query_scale is None else BOUNDS[torch.bfloat16]
    assert check(by_flashinfer(given, "sm100"), bound) == [CONTEXT, TRTLLM]


def test_trtllm_gen_reads_fp8_with_unquantised_queries() -> None:
    """Prefill then reads numbers of the model's type, in a cache made for the purpose."""
    given = problem(NO_LSE, speculative=4, format="fp8_e4m3", scales=True)
    options = {"quantize_query": False, "table_kernels": True}
    assert check(by_flashinfer(given, "sm100", **options)) == [CONTEXT, TRTLLM]


def test_scales_of_queries_that_kernels_quantise() -> None:
    """Queries beyond what e4m3 holds are divided first, and their scores multiplied."""
    given = problem(NO_LSE, speculative=4, format="fp8_e4m3", scales=True)
    big, scale = given.q * 1024, given.attn.shape.head_dim**-0.5 * 1.3 / 1024
    layer = replace(given.layer, scale=scale, q_scale=64.0)
    check(by_flashinfer(replace(given, q=big, layer=layer), "sm100"), QUANTIZED_QUERY)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "nvfp4"])
def test_trtllm_gen_quantises_outputs(kind: Any) -> None:
    """As our own kernels do, up to a code where rounding falls the other way."""
    out_formats = {"lse": False, "out_formats": ("model", kind)}
    given = problem(out_formats, speculative=4, format="fp8_e4m3", query_scale=0.25,
                    lengths=((1, 20), (3, 40), (9, 60)))  # fmt: skip
    layer = replace(given.layer, out_format=kind, out_scale=0.02 if kind == "fp8_e4m3" else 300.0)
    mine, tokens = by_flashinfer(given, "sm100"), given.expected_out.shape[0]
    results = []
    with flashinfer():
        for attn in (given.attn, mine.attn):
            scales = None
            if kind == "nvfp4":
                memory = torch.zeros(256, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
                scales = SwizzledScales(memory, start_row=7)
            plan = attn.plan(given.batch)
            out = attn.run(plan, given.q, given.cache, layer, out_scales=scales)
            results.append((out.view(torch.uint8)[:tokens], scales))
    (want, scales), (got, other) = results
    assert (want == got).float().mean() > 0.97
    if scales is not None and other is not None:
        same = scales.scales.view(torch.uint8) == other.scales.view(torch.uint8)
        assert same.float().mean() > 0.98


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 4)])
@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("sm90", {}),
        ("sm90", {"window": 13}),
        ("sm80", {"format": "fp8_e4m3", "scales": True, "soft_cap": 4.0}),
        ("sm100", {}),
    ],
)
def test_ranks(family: str, case: dict[str, Any], world: int, interleave: int) -> None:
    given = problem(lengths=(*LENGTHS, (40, 90)), **case)
    outs, lses = [], []
    for rank in range(world):
        ranks = ContextParallel(rank=rank, world=world, interleave=interleave)
        with patch("tests.parallel.sharded.PAGE", 16):
            own = on_rank(given, ranks)
        attn = attention(own.attn, family)
        with flashinfer():
            out, lse = attn.run(attn.plan(own.batch), own.q, own.cache, own.layer, return_lse=True)
        outs.append(out)
        lses.append(lse)
    out, lse = ops.merge_states(outs, lses)
    assert_close(out, given.expected_out, BOUNDS[torch.bfloat16])
    assert_close(lse, given.expected_lse, BOUNDS[torch.bfloat16])


def test_a_new_step_is_planned_anew_and_an_update_too() -> None:
    given = by_flashinfer(problem(), "sm80")
    fewer = replace(given.batch, seq_lens=given.batch.seq_lens.clone())
    with flashinfer() as calls:
        plan = given.attn.plan(fewer)
        before = given.attn.run(plan, given.q, given.cache, given.layer)
        fewer.seq_lens[0] -= 3
        given.attn.update(plan)
        after = given.attn.run(plan, given.q, given.cache, given.layer)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])
    assert calls.count(f"{DECODE}.plan") == 2
    assert calls.count(f"{DECODE}.__init__") == 1


def test_workspace_and_graphs() -> None:
    attn = by_flashinfer(problem(), "sm90", table_kernels=False).attn
    assert isinstance(attn._planner, HostPlanner)
    assert attn.workspace_bytes == 1 << 24  # both phases' kernel is one
    assert attn.explain().cuda_graph == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize(
    ("features", "options", "case", "match"),
    [
        ({"alibi": True}, {}, {}, "features.alibi is True; allowed: False with soft_cap"),
        ({"windows": (9,)}, {"context_parallel": ContextParallel(rank=0, world=2)}, {},
         "features.windows is"),
        ({"lse": False}, {}, {"format": "nvfp4"}, "cache.v_scale_order is 'linear'"),
        ({"lse": False}, {"context_parallel": ContextParallel(rank=0, world=2)},
         {"format": "nvfp4", "swizzled": True}, "cache.format is 'nvfp4'"),
    ],
)  # fmt: skip
def test_what_flashinfer_cannot_answer_rightly(
    features: Any, options: Any, case: Any, match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        by_flashinfer(problem(features, **case), "sm100", **options)


def test_a_package_that_cannot_be_imported() -> None:
    given = by_flashinfer(problem(), "sm80")
    with (
        patch.dict(sys.modules, {"flashinfer": None}),
        pytest.raises(RuntimeError, match=r"flashinfer cannot be imported: .*; `pip install"),
    ):
        given.run()


def test_a_package_or_a_device_that_is_missing() -> None:
    shape = problem().attn.shape
    with patch("pageant.select.built.is_installed", lambda _: False):
        said = pageant.supports(shape, options=Options(kernels="flashinfer"), device="sm90")
    assert said.reason is not None
    assert "would run after `pip install flashinfer-python`" in said.reason
    with pytest.raises(ArgumentError, match="serves no device of this family; would run on sm80"):
        pageant.Attention(shape, options=Options(kernels="flashinfer"), features=Features())


@pytest.mark.skipif(folder() is None, reason="FlashInfer's sources are not here")
def test_the_record_is_what_the_sources_say() -> None:
    root = folder()
    assert root is not None
    assert read(root) == recorded()
