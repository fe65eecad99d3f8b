from dataclasses import replace
from typing import Any

import pytest
import torch

from pageant.device import Device
from pageant.select.needs import FEATURES, FIELDS, Need, needs_of
from pageant.types import CacheSpec, ContextParallel, Features, Options, Shape
from tests.select.configs import PARTS, SHAPE

PLAIN = [
    Need("families", "sm90"),
    Need("dtypes", "bfloat16"),
    Need("formats", "bf16"),
    Need("head_dims", 64),
    Need("page_sizes", 16),
    Need("layouts", "LBHNC"),
    Need("out_formats", "model"),
]
FP8 = {"cache": CacheSpec(format="fp8")}
# What brings each feature of a kernel into play.
ASKING: dict[str, dict[str, Any]] = {
    "window": {"features": Features(windows=(None, 1))},
    "soft_cap": {"features": Features(soft_cap=True)},
    "sinks": {"features": Features(sinks=True)},
    "alibi": {"features": Features(alibi=True)},
    "draft_masks": {"features": Features(draft_masks=True)},
    "non_causal": {"features": Features(non_causal=True)},
    "lse": {"features": Features(lse=True)},
    "v_head_dim": {"shape": replace(SHAPE, v_head_dim=128)},
    "fp32_over_quantized": {"shape": replace(SHAPE, dtype=torch.float32), **FP8},
    "unquantized_query": {"options": Options(quantize_query=False), **FP8},
    "adaptive": {"options": Options(adaptive=True)},
    "non_causal_drafts": {"options": Options(non_causal_drafts=True)},
    "forced_splits": {"options": Options(debug_splits=1)},
    "invariant": {"options": Options(invariant=True)},
    "context_parallel": {"options": Options(context_parallel=ContextParallel(rank=0, world=2))},
}


def needs(**parts: Any) -> list[Need]:
    return list(needs_of(**{**PARTS, **parts}, device=Device.of("sm90")))


def names(asked: list[Need]) -> list[str]:
    return [need.value for need in asked if need.field == "features"]


def test_plain_configuration_needs_one_value_of_each_field() -> None:
    assert needs() == PLAIN
    assert [need.field for need in PLAIN] == list(FIELDS)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_is_needed_where_it_is_asked_for(feature: str) -> None:
    assert names(needs(**ASKING[feature])) == [feature]


@pytest.mark.parametrize(
    "parts",
    [
        {"shape": replace(SHAPE, v_head_dim=64)},
        {"shape": replace(SHAPE, dtype=torch.float32)},
        {"options": Options(quantize_query=False)},
        {"options": Options(context_parallel=ContextParallel(rank=0, world=1))},
        FP8,
    ],
)
def test_what_makes_no_difference_needs_nothing(parts: dict[str, Any]) -> None:
    assert names(needs(**parts)) == []


def test_every_value_given_is_needed() -> None:
    asked = needs(
        shape=Shape(num_q_heads=8, num_kv_heads=2, head_dim=192, v_head_dim=128),
        cache=CacheSpec(format="fp8_e5m2", page_size=48, layout="BLHNC"),
        features=Features(out_formats=("nvfp4", "model", "nvfp4")),
    )
    assert [(need.field, need.value) for need in asked] == [
        ("families", "sm90"),
        ("dtypes", "bfloat16"),
        ("formats", "fp8_e5m2"),
        ("head_dims", 192),
        ("head_dims", 128),
        ("page_sizes", 48),
        ("layouts", "BLHNC"),
        ("out_formats", "nvfp4"),
        ("out_formats", "model"),
        ("features", "v_head_dim"),
    ]
