from dataclasses import replace
from typing import Any

import pytest
import torch

from pageant.device import Device
from pageant.select.needs import Need, needs_of
from pageant.select.words import FEATURES, FIELDS
from pageant.types import CacheSpec, ContextParallel, Features, Options, Shape
from tests.select.configs import PARTS, SHAPE

PLAIN = [
    Need("families", "sm90"),
    Need("dtypes", "bfloat16"),
    Need("head_dims", 64),
    Need("page_sizes", 16),
    Need("formats", "bf16"),
    Need("layouts", "LBHNC"),
    Need("ranks", "one rank"),
    Need("out_formats", "model"),
]
FP8, NVFP4 = {"cache": CacheSpec(format="fp8")}, {"cache": CacheSpec(format="nvfp4")}
IN_TILES = {"cache": CacheSpec(format="nvfp4", v_scale_order="swizzled")}
LARGE = {"cache": CacheSpec(page_size=128)}
RANKS = ContextParallel(rank=0, world=2)
UNQUANTIZED = {"options": Options(quantize_query=False)}
# What brings each feature of a kernel into play, and the features that come with it.
ASKING: dict[str, tuple[Any, ...]] = {
    "window": ({"features": Features(windows=(1,))},),
    "mixed_windows": ({"features": Features(windows=(None, 1))}, "window"),
    "soft_cap": ({"features": Features(soft_cap=True)},),
    "sinks": ({"features": Features(sinks=True)},),
    "alibi": ({"features": Features(alibi=True)}, "all_inputs"),
    "draft_masks": ({"features": Features(draft_masks=True)},),
    "non_causal": ({"features": Features(non_causal=True)},),
    "lse": ({"features": Features(lse=True)},),
    "fp32_over_quantized": ({"shape": replace(SHAPE, dtype=torch.float32), **FP8},),
    "unquantized_query": ({**UNQUANTIZED, **FP8}, "fp8_left_to_native"),
    "adaptive": ({"options": Options(adaptive=True)},),
    "non_causal_drafts": ({"options": Options(non_causal_drafts=True)},),
    "forced_splits": ({"options": Options(debug_splits=1)},),
    "invariant": ({"options": Options(invariant=True)},),
    "table_kernels_off": ({"options": Options(table_kernels=False)},),
    "no_cubins": ({"cubins": False},),
    "large_pages_of_lone_heads": ({"shape": replace(SHAPE, num_q_heads=2), **LARGE},),
    "large_pages_without_table_kernels": ({"cubins": False, **LARGE}, "no_cubins"),
    "other_16_bit_cache": ({"cache": CacheSpec(format="fp16")},),
    "nvfp4_without_table_kernels": ({"options": Options(invariant=True), **IN_TILES}, "invariant"),
    "nvfp4_non_causal": ({"features": Features(non_causal=True), **IN_TILES}, "non_causal"),
    "fp8_left_to_native": ({"cache": CacheSpec(format="fp8_e5m2")},),
    "sinks_on_ranks": (
        {"features": Features(sinks=True), "options": Options(context_parallel=RANKS)},
        "sinks",
    ),
    "non_causal_on_ranks": (
        {"options": Options(context_parallel=RANKS, non_causal_drafts=True)},
        "non_causal_drafts",
    ),
    "nvfp4_unquantized_query": ({**UNQUANTIZED, **IN_TILES}, "unquantized_query"),
    "quantized_out_of_plain_cache": ({"features": Features(out_formats=("fp8_e4m3",))},),
    "quantized_out_of_plain_query": (
        {
            "features": Features(out_formats=("fp8_e4m3",)),
            "cache": CacheSpec(format="int8"),
        },
    ),
    "all_inputs": (NVFP4,),
    "nvfp4_out_of_nvfp4_cache": (
        {"features": Features(out_formats=("nvfp4",)), **IN_TILES},
        "all_inputs",
    ),
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
    parts, *others = ASKING[feature]
    assert sorted(names(needs(**parts))) == sorted([feature, *others])


@pytest.mark.parametrize(
    "parts",
    [
        {"options": Options(table_kernels=True)},
        {"features": Features(sinks=True)},
        LARGE,
    ],
)
def test_what_forces_fp8_prefill_on_table_kernels(parts: dict[str, Any]) -> None:
    fp8 = replace(parts.get("cache", CacheSpec()), format="fp8_e5m2")
    assert "fp8_left_to_native" not in names(needs(**{**parts, "cache": fp8}))


def test_ranks_are_a_need_of_their_own() -> None:
    assert Need("ranks", "several ranks") in needs(options=Options(context_parallel=RANKS))


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
        ("head_dims", (192, 128)),
        ("page_sizes", 48),
        ("formats", "fp8_e5m2"),
        ("layouts", "BLHNC"),
        ("ranks", "one rank"),
        ("out_formats", "nvfp4"),
        ("out_formats", "model"),
        ("features", "fp8_left_to_native"),
        ("features", "quantized_out_of_plain_query"),
        ("features", "all_inputs"),
    ]


@pytest.mark.parametrize(
    "parts",
    [
        NVFP4,
        {"features": Features(alibi=True)},
        {"features": Features(windows=(5,)), "options": Options(context_parallel=RANKS)},
        {"features": Features(out_formats=("nvfp4",)), **IN_TILES},
        {"features": Features(out_formats=("fp8_e4m3",), lse=True, sinks=True), **FP8},
    ],
)
def test_what_flashinfer_serves_only_in_part_is_not_left_to_it_unasked(
    parts: dict[str, Any],
) -> None:
    assert "all_inputs" in names(needs(**parts))
    options = replace(parts.get("options", Options()), kernels="flashinfer")
    assert "all_inputs" not in names(needs(**{**parts, "options": options}))
