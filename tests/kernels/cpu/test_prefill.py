"""The kernel alone over prefills: work lists and shapes that random small cases seldom reach."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from pageant.kernels.call import AttentionCall
from pageant.kernels.cpu import attention
from tests.inputs import BOUNDS
from tests.kernels.cpu import calls
from tests.kernels.cpu.calls import UNTOUCHED

make_call = partial(calls.make_call, phase="prefill")


def check(call: AttentionCall) -> None:
    calls.check(attention.run, call, lse_bound=BOUNDS[call.out.dtype])


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 100},
    "wide window": {"window": 600},
    "cap": {"soft_cap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05, 0.02, -0.1])},
    "sinks": {"sinks": torch.tensor([-torch.inf, -2.0, 0.0, 1.0, 2.0, 9.0]), "value_scale": 3.0},
    "negative scale": {"score_scale": -0.2},
    "no scale": {"score_scale": 0.0},
}
FEATURES["cap, alibi, window"] = FEATURES["cap"] | FEATURES["alibi"] | FEATURES["window"]


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_long_requests(dtype: torch.dtype, features: dict[str, Any]) -> None:
    check(make_call([(600, 600), (70, 900), (3, 2), (530, 1100)], dtype=dtype, **features))


@pytest.mark.parametrize("page_size", [1, 63, 64, 129, 1000])
def test_page_sizes(page_size: int) -> None:
    check(make_call([(40, 300), (200, 260), (2, 1)], page_size=page_size, window=77))


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_formats_and_unequal_head_sizes(dtype: torch.dtype, format: str) -> None:
    for dims in ((48, 16), (16, 48)):
        check(make_call([(9, 40)], dtype=dtype, format=format, dims=dims, value_scale=0.5))


def test_fp16_scores_past_its_range_before_scaling() -> None:
    call = make_call([(30, 60)], dtype=torch.float16, dims=(128, 128), score_scale=1e-4)
    call.q.mul_(60)
    call.cache.k.mul_(60)
    check(call)


@pytest.mark.parametrize("window", [None, 12])
def test_draft_masks_hide_poison(window: int | None) -> None:
    lengths = [(8, 40), (6, 6), (5, 3)]
    draft = torch.rand(19, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    draft[2] = False
    draft[:8, 3] = False
    call = make_call(lengths, page_size=4, draft=draft, window=window)
    key = 40 - 8 + 3
    slot = int(call.page_table[0, key // 4]), key % 4
    call.cache.k[slot], call.cache.v[slot] = torch.nan, torch.inf
    check(call)


def test_only_rows_of_the_work_list_are_written() -> None:
    call = make_call([(5, 9), (4, 4)])
    call.work.counts[0] = 1
    attention.run(call)
    assert call.lse is not None
    assert (call.out[5:] == UNTOUCHED).all()
    assert (call.lse[5:] == UNTOUCHED).all()
    assert not (call.out[:5] == UNTOUCHED).any()


def test_rows_without_keys_and_calls_without_lse_or_work() -> None:
    call = make_call([(3, 0), (4, 1), (0, 5)], sinks=torch.zeros(6))
    check(call)
    assert call.lse is not None
    assert (call.out[:6] == 0).all()
    assert (call.lse[:6] == -torch.inf).all()
    again = replace(call, lse=None, out=torch.full_like(call.out, UNTOUCHED))
    attention.run(again)
    assert torch.equal(again.out, call.out)
    call.work.clear()
    attention.run(call)


def test_causality_is_each_requests_own() -> None:
    lengths = [(20, 50), (20, 50)]
    both = replace(make_call(lengths, causal=False), causal=torch.tensor([True, False]))
    both.work.items[0, 4] = 50
    check(both)
