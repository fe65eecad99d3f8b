"""How refusals speak of each thing a configuration may need from a kernel."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """How a refusal speaks of a need.

    Attributes:
        argument: the user's argument the need comes from.
        lacking: follows "serves no"; {value} is what was needed.
        cure: follows "would run"; {served} is what the row serves.
    """

    argument: str
    lacking: str
    cure: str


# Fields of a row, in the order refusals name them.
FIELDS: dict[str, Words] = {
    "families": Words("sm", "device of this family", "on {served}"),
    "dtypes": Words("dtype", "{value} models", "with dtype {served}"),
    "head_dims": Words("head_dim", "head size {value}", "with head sizes {served}"),
    "page_sizes": Words("page_size", "pages of {value} tokens", "with page_size {served}"),
    "formats": Words("cache", "{value} cache", "with cache {served}"),
    "layouts": Words("cache", "layout {value}", "with layout {served}"),
    "ranks": Words("dcp", "sequences on {value}", "on {served} (dcp)"),
    "out_formats": Words("out_formats", "{value} output", "with out_formats {served}"),
}

FEATURES: dict[str, Words] = {
    "window": Words("window", "sliding window", "without a window"),
    "mixed_windows": Words(
        "window", "layers with different windows", "with one window for all layers of a group"
    ),
    "soft_cap": Words("soft_cap", "soft cap", "without a soft cap"),
    "sinks": Words("sinks", "attention sinks", "without sinks"),
    "alibi": Words("alibi", "ALiBi slopes", "without ALiBi"),
    "draft_masks": Words("draft_masks", "draft masks", "without draft masks"),
    "non_causal": Words("non_causal", "non-causal batches", "with causal batches only"),
    "lse": Words("lse", "log-sum-exp output", "without lse"),
    "fp32_over_quantized": Words(
        "dtype",
        "float32 queries over a quantised cache",
        "with a 16-bit dtype or a cache that is not quantised",
    ),
    "unquantized_query": Words("q_quant", "unquantised queries", "with quantize_query on"),
    "adaptive": Words("adaptive", "lengths only the device knows", "with adaptive off"),
    "non_causal_drafts": Words(
        "non_causal_drafts", "non-causal drafts", "with non_causal_drafts off"
    ),
    "forced_splits": Words("debug_splits", "forced key splits", "with debug_splits None"),
    "invariant": Words("invariant", "invariant mode", "with invariant off"),
    # What only FlashInfer's kernels refuse: options of theirs, and things they serve only apart.
    "table_kernels_off": Words(
        "table_kernels", "configuration with table_kernels off", "with table_kernels auto or on"
    ),
    "no_cubins": Words("cubins", "machine without prebuilt kernels", "where cubins can be had"),
    "large_pages_of_lone_heads": Words(
        "page_size",
        "pages of 128 tokens and more with one query head a kv head",
        "with pages of at most 64 tokens or more query heads",
    ),
    "large_pages_without_table_kernels": Words(
        "page_size",
        "pages of 128 tokens and more without the table kernels",
        "with pages of at most 64 tokens",
    ),
    "other_16_bit_cache": Words(
        "cache", "unquantised cache of another type than the model's", "with cache auto"
    ),
    "nvfp4_without_table_kernels": Words(
        "cache", "nvfp4 cache without the table kernels", "with another cache"
    ),
    "nvfp4_non_causal": Words(
        "cache", "non-causal drafts or batches over an nvfp4 cache", "with another cache"
    ),
    "fp8_left_to_native": Words(
        "cache",
        "fp8 cache without fp8_e4m3 queries, unless forced to",
        "with cache fp8_e4m3 and quantize_query on, with sinks, with pages of 128 tokens and more "
        "or with table_kernels on",
    ),
    "sinks_on_ranks": Words("sinks", "sinks under context parallel", "without sinks"),
    "non_causal_on_ranks": Words(
        "dcp", "non-causal drafts or batches under context parallel", "on one rank (dcp 1)"
    ),
    "nvfp4_unquantized_query": Words(
        "q_quant", "unquantised queries over an nvfp4 cache", "with quantize_query on"
    ),
    "quantized_out_of_plain_cache": Words(
        "out_formats", "quantised output from an unquantised cache", "with a quantised cache"
    ),
    "quantized_out_of_plain_query": Words(
        "out_formats",
        "quantised output from queries of another type than fp8_e4m3",
        "with cache fp8_e4m3 or nvfp4 and quantised queries",
    ),
    "all_inputs": Words(
        "kernels",
        "ALiBi slopes, orders of nvfp4 scales and windows on ranks but its own",
        "where it can with kernels flashinfer",
    ),
    "nvfp4_out_of_nvfp4_cache": Words(
        "out_formats", "nvfp4 output from an nvfp4 cache", "with fp8_e4m3 output"
    ),
}

# Where several rows come equally close, the first of these a user could give up is named; any other
# argument comes after these and before the last three.
EASIEST_GIVEN_UP = ("q_quant", "soft_cap", "alibi", "sinks", "dtype", "head_dim", "page_size")
HARDEST_GIVEN_UP = ("table_kernels", "cubins", "invariant")


def reluctance(argument: str) -> int:
    """Where an argument stands between the easiest and the hardest given up.

    >>> reluctance("soft_cap") < reluctance("sinks") < reluctance("cache") < reluctance("cubins")
    True
    """
    if argument in EASIEST_GIVEN_UP:
        return EASIEST_GIVEN_UP.index(argument)
    hardest = argument in HARDEST_GIVEN_UP
    return len(EASIEST_GIVEN_UP) + hardest
