"""Parts of tiles, joined: planned, made up, folded in the interpreter, and compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from pageant.cache.formats import FORMATS
from pageant.device import Device
from pageant.kernels.gluon import decode_join
from pageant.plan.hopper_tiles import hopper_tile
from pageant.plan.on_device import (
    BEGIN,
    CLOSER,
    END,
    ITEM,
    OPENER,
    PARTIAL,
    REQUEST,
    UNIT,
    Cut,
    plan_step,
)
from pageant.types import Shape

pytestmark = pytest.mark.skipif(
    not isinstance(decode_join.join_parts, InterpretedFunction), reason="needs the interpreter"
)


@pytest.fixture(autouse=True)
def _no_dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    monkeypatch.setattr(decode_join, "cuda", nothing)


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "programs"), [(8, 2, 1, 40), (12, 4, 2, 5), (6, 3, 3, 24)]
)
def test_joins(heads: int, kv_heads: int, tokens: int, programs: int, splits: int) -> None:
    shape = Shape(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=64)
    tile = hopper_tile(shape, FORMATS["bf16"], Device.of("sm90"), tokens)
    starts = torch.tensor([0, tokens, tokens, tokens + 1, 2 * tokens + 1], dtype=torch.int32)
    lens = torch.tensor([1900, 50, 3, 700], dtype=torch.int32)
    units = tile.units(shape)
    programs = 4 * units * splits if splits else programs
    items = torch.zeros(100 + programs, ITEM.value, dtype=torch.int32)
    shares = torch.zeros(programs, 2, dtype=torch.int32)
    cut = Cut(tokens=tile.tokens, block=tile.block, units=units, world=1, splits=splits, least=2)
    plan_step[programs, 1, 1](
        starts, lens, 4, 100, 4000, None, None, items, shares,
        torch.zeros(programs, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), tokens,
        (0, 1), len(items), None, cut,
    )  # fmt: skip
    rng = np.random.default_rng(heads)
    dim, rows = 64, tile.rows
    parts = torch.from_numpy(rng.normal(size=(2 * programs, rows, dim)).astype(np.float32))
    lses = torch.from_numpy(rng.normal(size=(2 * programs, rows)).astype(np.float32))
    lses[rng.random(lses.shape) < 0.2] = -torch.inf
    out = torch.full((2 * tokens + 1, heads, dim), torch.nan)
    lse = torch.full((2 * tokens + 1, heads), torch.nan)
    sinks = torch.from_numpy(rng.normal(size=heads).astype(np.float32))
    variant = SimpleNamespace(
        kv_heads=tile.kv_heads, columns=tile.columns, value_dim=dim, heads=tile.heads,
        query_tokens=tile.tokens, group=heads // kv_heads, all_kv_heads=kv_heads,
        pieces=-(-(heads // kv_heads) // tile.heads), padded_value_dim=64,
    )  # fmt: skip
    decode_join.join_parts[programs, 2](
        (out, *out.stride()[:2]), (lse, *lse.stride()), items, shares, (parts, lses), starts,
        sinks, None, 0.5, variant,
    )  # fmt: skip
    want, want_lse = expected(items, shares, parts, lses, starts, sinks, variant, out, lse)
    assert np.isfinite(want[~torch.isnan(want)]).all()
    assert (~torch.isnan(want)).any(), "nothing was cut"
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5, equal_nan=True)


def expected(
    items: torch.Tensor,
    shares: torch.Tensor,
    parts: torch.Tensor,
    lses: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor,
    variant: Any,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the items alone: parts of a tile are those of its request and unit."""
    found: dict[tuple[int, int], list[int]] = {}
    for first, count in shares.tolist():
        for item in items[first : first + count].tolist():
            assert item[END.value] >= item[BEGIN.value]
            assert item[CLOSER.value] >= item[OPENER.value] or item[PARTIAL.value] < 0
            if item[PARTIAL.value] >= 0:
                slots = found.setdefault((item[REQUEST.value], item[UNIT.value]), [])
                slots.append(item[PARTIAL.value])
    want, want_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    for (request, unit), slots in found.items():
        sets = variant.all_kv_heads // variant.kv_heads
        for row in range(variant.kv_heads * variant.columns):
            column = row % variant.columns
            token = unit // sets // variant.pieces * variant.query_tokens + column // variant.heads
            in_group = unit // sets % variant.pieces * variant.heads + column % variant.heads
            head = unit % sets * variant.kv_heads + row // variant.columns
            start, end = starts[request : request + 2].tolist()
            in_tile = column < variant.query_tokens * variant.heads
            if not in_tile or start + token >= end or in_group >= variant.group:
                continue
            weights = torch.exp2(lses[slots, row].double())
            total, query_head = weights.sum(), head * variant.group + in_group
            x = (weights[:, None] * parts[slots, row]).sum(0) / total.clamp(min=1e-300)
            sunk = total / (total + torch.exp(sinks[query_head].double()))
            want[start + token, query_head] = (x * sunk * 0.5).float()
            want_lse[start + token, query_head] = torch.log(total).float()
    return want, want_lse
