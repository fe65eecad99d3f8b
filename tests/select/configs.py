"""Configurations to ask about: a fixed grid, and any there may be."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
from pageant.select.rows import NAMES, OWNERS
from pageant.types import CacheSpec, ContextParallel, Features, Options, Shape

SHAPE = Shape(num_q_heads=8, num_kv_heads=2, head_dim=64)
FEATURE_GRID = [
    Features(),
    Features(windows=(128, None), soft_cap=True, sinks=True),
    Features(alibi=True, draft_masks=True, non_causal=True, lse=True),
    Features(out_formats=("model", "nvfp4")),
]
OPTIONS_GRID = [
    *(Options(kernels=name) for name in (*OWNERS, *NAMES)),
    Options(speculative_tokens=3, non_causal_drafts=True, adaptive=True, quantize_query=False),
    Options(invariant=True),
    Options(debug_splits=2),
    Options(context_parallel=ContextParallel(rank=1, world=2)),
]
PARTS = {"shape": SHAPE, "cache": CacheSpec(), "features": Features(), "options": Options()}
# Part, field, a value that makes sense on no device, and the argument that errors name.
WRONG: list[tuple[str, str, Any, str]] = [
    *(("shape", "head_dim", value, "head_dim") for value in (8, 20, 520, "64", True, 64.0, None)),
    *(("shape", "v_head_dim", value, "head_dim") for value in (0, 20, 520, "64", False)),
    *(("shape", "num_kv_heads", value, "q_heads") for value in (0, -1, True, "2")),
    *(("shape", "num_q_heads", value, "q_heads") for value in (0, -8, 7, True, "8")),
    *(("shape", "dtype", value, "dtype") for value in (torch.int8, torch.float64, "bfloat16")),
    *(("cache", "page_size", value, "page_size") for value in (0, -1, 16.0, True, "16")),
    *(("cache", "format", value, "cache") for value in ("fp7", "", None, 8, torch.float16)),
    *(("cache", "layout", value, "layout") for value in ("NHD", "", None, ("LBHNC",))),
    *(("features", "windows", value, "window") for value in ((), (0,), (True,), 128, ("8",))),
    *(("features", name, 30.0, name) for name in ("soft_cap", "sinks", "alibi", "lse")),
    *(("features", name, None, name) for name in ("draft_masks", "non_causal")),
    *(("features", "out_formats", value, "out_formats") for value in ((), ("fp4",), "model")),
    *(("options", "kernels", value, "kernels") for value in ("best", "", None, "cpu")),
    *(("options", "speculative_tokens", value, "spec") for value in (-1, 1.5, False)),
    *(("options", "plan_slots", value, "plan_slots") for value in (0, None, True)),
    *(("options", "debug_splits", value, "debug_splits") for value in (0, True, "2")),
    *(("options", "table_kernels", value, "table_kernels") for value in ("on", 1)),
    *(("options", name, 1, name) for name in ("invariant", "adaptive", "validate")),
    ("options", "non_causal_drafts", None, "non_causal_drafts"),
    ("options", "quantize_query", 0, "q_quant"),
    ("options", "context_parallel", 2, "dcp"),
    ("options", "context_parallel", ContextParallel(rank=0, world=0), "dcp"),
    ("options", "context_parallel", ContextParallel(rank=2, world=2), "dcp"),
    ("options", "context_parallel", ContextParallel(rank=0, world=2, interleave=0), "dcp"),
]
Config = tuple[Shape, CacheSpec, Features, Options]


def grid(head_dims: tuple[int, ...] = (20, 64)) -> Iterator[Config]:
    """Valid and invalid configurations; some that no kernel serves."""
    formats = ("auto", *FORMATS)
    dtypes = (torch.float32, torch.bfloat16)
    axes = (head_dims, dtypes, formats, FEATURE_GRID, OPTIONS_GRID)
    for head_dim, dtype, fmt, features, options in itertools.product(*axes):
        yield (
            replace(SHAPE, head_dim=head_dim, dtype=dtype),
            CacheSpec(format=fmt),
            features,
            options,
        )


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any valid configuration."""
    group, kv_heads = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    dims = st.integers(2, 64).map(lambda eighth: 8 * eighth)
    flags = ("soft_cap", "sinks", "alibi", "draft_masks", "non_causal", "lse")
    shape = Shape(
        num_q_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=draw(dims),
        v_head_dim=draw(st.none() | dims),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
    )
    cache = CacheSpec(
        format=draw(st.sampled_from(["auto", *FORMATS])),
        page_size=draw(st.integers(1, 1024)),
        layout=draw(st.sampled_from(LAYOUTS)),
    )
    features = Features(
        windows=tuple(draw(st.lists(st.none() | st.integers(1, 4096), min_size=1, max_size=3))),
        out_formats=draw(st.sampled_from([("model",), ("model", "fp8_e4m3")])),
        **{flag: draw(st.booleans()) for flag in flags},
    )
    options = Options(
        kernels=draw(st.sampled_from([*OWNERS, *NAMES])),
        invariant=draw(st.booleans()),
        speculative_tokens=draw(st.integers(0, 4)),
        context_parallel=draw(st.sampled_from([None, ContextParallel(rank=0, world=2)])),
        quantize_query=draw(st.booleans()),
        table_kernels=draw(st.sampled_from([None, True, False])),
        adaptive=draw(st.booleans()),
        non_causal_drafts=draw(st.booleans()),
        debug_splits=draw(st.none() | st.integers(1, 4)),
    )
    return shape, cache, features, options


@st.composite
def configs_and_mistakes(draw: st.DrawFn) -> Config:
    """Any configuration, every other one with one value that makes no sense."""
    parts = dict(zip(PARTS, draw(configs()), strict=True))
    if draw(st.booleans()):
        part, field, value, _ = draw(st.sampled_from(WRONG))
        parts[part] = replace(parts[part], **{field: value})
    return parts["shape"], parts["cache"], parts["features"], parts["options"]
