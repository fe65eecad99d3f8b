"""What the Gluon decode serves on Hopper once its rows name a kernel, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import pageant
from pageant import CacheSpec, Features, Options, Shape
from pageant.device import Device
from pageant.plan.hopper_tiles import HopperTile
from pageant.select.explain import explain
from tests.switched_on import gluon_decode

SHAPE = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
EVERYTHING = Features(
    windows=(None, 64),
    soft_cap=True,
    sinks=True,
    alibi=True,
    draft_masks=True,
    non_causal=True,
    lse=True,
)
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("decode", {}),
    ("decode", {"shape": replace(SHAPE, dtype=torch.float16)}),
    ("decode", {"cache": CacheSpec(format="fp8_e5m2", page_size=1, layout="LBNHC")}),
    ("decode", {"shape": replace(SHAPE, head_dim=192, v_head_dim=128)}),
    ("decode", {"shape": replace(SHAPE, num_q_heads=35, num_kv_heads=7)}),
    ("decode", {"features": EVERYTHING, "options": Options(speculative_tokens=7)}),
    ("decode_row_scales", {"cache": CacheSpec(format="int8")}),
    ("decode_row_scales", {"cache": CacheSpec(format="fp8_e4m3_token_head", page_size=64)}),
    ("decode_nvfp4", {"cache": CacheSpec(format="nvfp4_4over6"), "features": EVERYTHING}),
]
LEFT: list[dict[str, Any]] = [
    {"cache": CacheSpec(format="fp16")},
    {"shape": replace(SHAPE, dtype=torch.float32)},
    {"shape": replace(SHAPE, head_dim=80)},
    {"cache": CacheSpec(format="int8", page_size=1)},
    {"cache": CacheSpec(format="nvfp4", layout="LBNHC")},
    {"cache": CacheSpec(format="nvfp4"), "shape": replace(SHAPE, head_dim=96)},
]


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    with gluon_decode():
        yield


def asked(change: dict[str, Any]) -> tuple[Shape, CacheSpec, Features, Options]:
    parts = {"shape": SHAPE, "cache": CacheSpec(), "features": Features(), "options": Options()}
    return tuple({**parts, **change}.values())  # type: ignore[return-value]


@pytest.mark.parametrize(("name", "change"), SERVED)
def test_serves(name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(change)
    assert explain(*config, "sm90").rows["decode"].name == f"gluon_sm90.{name}"
    assert pageant.supports(*config, "sm90").ok
    monkeypatch.setattr(Device, "detect", lambda _device: Device.of("sm90"))
    limits = pageant.Limits(max_requests=4, max_tokens=32, max_seq_len=1024)
    shape, cache, features, options = config
    attn = pageant.Attention(shape, cache, limits, features, options)
    tile = attn._planner.tiles["decode"]  # type: ignore[attr-defined]
    assert isinstance(tile, HopperTile)
    assert shape.num_kv_heads % tile.kv_heads == 0
    assert tile.columns >= tile.heads * tile.tokens
    assert attn._planner.workspace.partial_lse.shape[1] == tile.kv_heads * tile.columns


@pytest.mark.parametrize("change", LEFT)
def test_leaves_to_the_next(change: dict[str, Any]) -> None:
    answer = explain(*asked(change), "sm90")
    assert not answer.rows["decode"].name.startswith("gluon")
    refused = [one.why for one in answer.refused if one.kernel.startswith("gluon_sm90.decode")]
    assert len(refused) == 3
    assert not any("not built" in why for why in refused)


@pytest.mark.parametrize("family", ["sm80", "sm100", "cpu"])
def test_is_for_hopper_alone(family: str) -> None:
    assert not explain(*asked({}), family).rows["decode"].name.startswith("gluon")
