"""The kernel alone: bit patterns, work lists and threads that random cases do not reach."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pageant.cache.formats import FORMATS
from pageant.cache.pages import LayerCache
from pageant.cache.quantize import dequantize
from pageant.kernels.call import AttentionCall
from pageant.kernels.cpu import attention, attention_walk
from tests.inputs import BOUNDS
from tests.kernels.cpu import calls
from tests.kernels.cpu.calls import UNTOUCHED, fresh

make_call = partial(calls.make_call, phase="decode")


def check(call: AttentionCall) -> None:
    calls.check(attention.run, call, lse_bound=1e-5)


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 70},
    "cap": {"soft_cap": 2.0, "score_scale": 1.0},
    "high cap": {"soft_cap": 30.0, "score_scale": 1.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05, 0.02, -0.1])},
    "sinks": {"sinks": torch.tensor([-torch.inf, -2.0, 0.0, 1.0, 2.0, 9.0]), "value_scale": 3.0},
    "negative scale": {"score_scale": -0.2},
    "no scale": {"score_scale": 0.0},
    "each its own": {"causal": torch.tensor([True, False, True, False, False]), "window": 9},
}
FEATURES["cap, alibi, window"] = FEATURES["cap"] | FEATURES["alibi"] | FEATURES["window"]


@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_features_in_one_piece_and_in_parts(features: dict[str, Any], splits: int | None) -> None:
    check(make_call([(1, 300), (4, 129), (0, 7), (5, 3), (2, 0)], splits=splits, **features))


@pytest.mark.parametrize("heads_inside", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_formats_and_unequal_head_sizes(
    dtype: torch.dtype, format: str, heads_inside: bool
) -> None:
    for dims in ((48, 16), (16, 48)):
        check(
            make_call(
                [(1, 130), (3, 40)],
                dtype=dtype,
                format=format,
                dims=dims,
                page_size=5,
                heads_inside=heads_inside,
                value_scale=0.5,
            )
        )


def test_one_variant_is_compiled_a_storage_type() -> None:
    for features in FEATURES.values():
        attention.run(make_call([(1, 9)] * 5, **features))
    attention.run(make_call([(2, 9)], draft=torch.ones(2, 3, dtype=torch.bool)))
    assert len(attention_walk.walk.signatures) <= 3


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "fp16", "bf16", "int8"])
def test_every_bit_pattern_is_read_as_torch_reads_it(format: str) -> None:
    fmt = FORMATS[format]
    bits = {8: torch.uint8, 16: torch.int16}[fmt.bits]
    codes = torch.arange(2**fmt.bits).to(bits).view(fmt.element_dtype)
    requests = max(1, codes.numel() // 512)
    call = make_call(
        [(1, 1)] * requests,
        format=format,
        page_size=1,
        heads=(1, 1),
        dims=(16, codes.numel() // requests),
    )
    call.cache.v.view(bits)[:, 0, 0] = codes.view(bits).view(requests, -1)
    if call.cache.v_scales is not None:
        call.cache.v_scales[:] = 1.0
    attention.run(call)
    want = codes.float().view(requests, -1)[call.page_table[:, 0].long()]
    assert torch.equal(call.out[:-2, 0].nan_to_num(nan=0.5), want.nan_to_num(nan=0.5))
    assert torch.equal(call.out[:-2, 0].isnan(), want.isnan())


def test_every_pair_and_block_scale_is_read_by_the_definition() -> None:
    """All bytes in one value of 512 elements, under each of the 256 scales."""
    call = make_call([(1, 1)] * 256, format="nvfp4", page_size=1, heads=(1, 1), dims=(16, 512))
    page = call.page_table[:, 0].long()
    every = torch.arange(256, dtype=torch.uint8)
    assert call.cache.v_scales is not None
    call.cache.v[:, 0, 0] = every
    call.cache.v_scales.view(torch.uint8)[page, 0, 0] = every[:, None].expand(256, 32)
    attention.run(call)
    scales = call.cache.v_scales[page, 0, 0]
    want = dequantize(every.expand(256, 256), scales, "nvfp4")
    torch.testing.assert_close(call.out[:256, 0], want, rtol=0, atol=0, equal_nan=True)


def test_exp_and_tanh() -> None:
    x = np.concatenate([-np.geomspace(1e-7, 86.9, 4000), [0.0, 80.0]]).astype(np.float32)
    got = np.array([attention_walk._exp(each) for each in x])
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 5e-7
    assert attention_walk._exp(np.float32(-np.inf)) == 0
    assert np.isnan(attention_walk._exp(np.float32(np.nan)))
    x = np.concatenate([np.geomspace(1e-20, 100, 4000), [0.59999, 0.6, np.inf]]).astype(np.float32)
    for sign in (1, -1):
        got = np.array([attention_walk._tanh(np.float32(sign * each)) for each in x])
        assert np.abs(sign * got / np.tanh(x.astype(np.float64)) - 1).max() < 5e-7


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("window", [None, 12])
def test_draft_masks_hide_poison(window: int | None, splits: int | None) -> None:
    lengths = [(8, 80), (6, 6), (5, 3)]
    draft = torch.rand(19, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    draft[2] = False
    draft[:8, 3:7] = False
    call = make_call(lengths, page_size=2, draft=draft, window=window, splits=splits)
    slot = int(call.page_table[0, 75 // 2]), 75 % 2
    call.cache.k[slot], call.cache.v[slot] = torch.nan, torch.inf
    call.page_table[0, 76 // 2] = 10**6  # keys 76 and 77 are seen by nobody: no such page
    attention.run(call)
    got = call.out.clone(), call.lse
    call.page_table[0, 76 // 2] = 0
    check(fresh(call))
    assert torch.equal(got[0], call.out)


def test_a_score_of_minus_infinity_among_finite_ones() -> None:
    call = make_call([(1, 100)], heads=(1, 1))
    call.q.abs_()
    for key in (0, 50, 99):
        call.cache.k[int(call.page_table[0, key // 16]), key % 16] = -torch.inf
    check(call)
    assert torch.isfinite(call.out).all()


def test_a_visible_nan_is_not_swallowed() -> None:
    call = make_call([(1, 100)])
    call.cache.k[int(call.page_table[0, 3]), 1, 0] = torch.nan
    attention.run(call)
    assert call.out[0, :3].isnan().all()
    assert torch.isfinite(call.out[0, 3:]).all()


def test_strided_and_shared_memory_gives_the_same_bits() -> None:
    call = make_call([(1, 200), (2, 70)], dims=(32, 32))
    attention.run(call)
    k, v = call.cache.k, call.cache.v
    both = torch.cat([k, v], dim=-1)
    wide = torch.stack([k, v], dim=1)
    inside = wide.transpose(2, 3).contiguous().transpose(2, 3)
    for views in ((both[..., :32], both[..., 32:]), wide.unbind(1), inside.unbind(1)):
        again = fresh(replace(call, cache=LayerCache(*views, call.cache.format)))
        attention.run(again)
        assert torch.equal(again.out, call.out)
    fused = torch.empty(call.q.shape[0], 3, *call.q.shape[1:])
    fused[:, 1] = call.q
    spread = torch.empty(*call.page_table.shape, 2, dtype=torch.int32).transpose(1, 2).flatten(1)
    table = spread[:, : call.page_table.shape[1]].copy_(call.page_table)
    out = torch.full((*call.out.shape[:2], 40), UNTOUCHED)[..., :32]
    attention.run(fresh(replace(call, q=fused[:, 1], page_table=table)))
    attention.run(replace(call, q=fused[:, 1], page_table=table, out=out, lse=None))
    assert torch.equal(out, call.out)


def test_threads_and_concurrent_callers_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [make_call([(1, 700), (2, 900), (1, 300 + 40 * i)]) for i in range(4)]
    for call in calls:
        assert call.work.counts[1] > 0, "a request is cut between shares"
        check(call)
    monkeypatch.setattr(attention, "THREAD_READS", 0)

    def again(call: AttentionCall) -> bool:
        results = []
        for _ in range(20):
            results.append(fresh(call))
            attention.run(results[-1])
        return all(torch.equal(each.out, call.out) for each in results)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(again, calls))


SPAWNED = """
import torch
from pageant.cache.quantize import dequantize
from pageant.kernels.cpu import attention, attention_walk
from tests.kernels.cpu.test_attention import make_call
attention.THREAD_READS = 0
call = make_call([(1, 700), (2, 900)])
attention.run(call)
torch.save(call.out, {path!r})
"""


def test_a_process_of_its_own_gives_the_same_bits(tmp_path: Any) -> None:
    paths = [str(tmp_path / str(index)) for index in range(2)]
    running = [
        subprocess.Popen([sys.executable, "-c", SPAWNED.format(path=path)]) for path in paths
    ]
    call = make_call([(1, 700), (2, 900)])
    attention.run(call)
    for process, path in zip(running, paths, strict=True):
        assert process.wait() == 0
        assert torch.equal(torch.load(path), call.out)


def test_empty_work_writes_nothing() -> None:
    call = make_call([(1, 5)])
    call.work.clear()
    attention.run(call)
    assert (call.out == UNTOUCHED).all()


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3_token_head", "nvfp4", "fp32"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_nan_of_one_request_stays_there(format: str, phase: str) -> None:
    """The next request has fewer keys, and its last few are no multiple of anything."""
    call = calls.make_call([(8, 8), (5, 5)], phase, format=format, page_size=8)
    first = int(call.page_table[0, 0])
    call.cache.v[first, 5] = 0xFF if format == "nvfp4" else torch.tensor(-1).to(call.cache.v.dtype)
    for scales in (call.cache.k_scales, call.cache.v_scales):
        if scales is not None:
            scales[first, 5] = torch.tensor(torch.nan).to(scales.dtype)
    if format == "fp32":
        call.cache.v[first, 5] = torch.nan
    attention.run(call)
    assert call.out[:8].isnan().any()
    assert call.out[8:13].isfinite().all()
