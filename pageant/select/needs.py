"""What a configuration needs from a kernel, as data.

A need is a value that must lie in one field of a row. There is no other rule, so a need no row
lists is served by none:

>>> from pageant.select.rows import ROWS
>>> Need("features", "time_travel").refusal(ROWS[0])
('time_travel', 'without time_travel')

Some kernels serve two things, but not together. Such a pair is a need of its own, asked for where
both are (``_pairs``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pageant.cache.formats import OF_DTYPE, Format, resolve
from pageant.device import Device
from pageant.select.row import Row
from pageant.select.words import FEATURES, FIELDS, Words
from pageant.types import CacheSpec, Features, Options, Shape

ONE_RANK, SEVERAL_RANKS = "one rank", "several ranks"
NVFP4 = ("nvfp4", "nvfp4_4over6")
PLAIN_16_BIT = ("fp16", "bf16")
FP8 = ("fp8_e4m3", "fp8_e5m2")
LARGE_PAGE = 128  # tokens; from here on FlashInfer has only its table kernels


class Need(NamedTuple):
    """`value` must lie in the row's `field`; a field of None serves any value."""

    field: str
    value: Any

    @property
    def words(self) -> Words:
        """How refusals speak of it."""
        if self.field != "features":
            return FIELDS[self.field]
        name = str(self.value)
        return FEATURES.get(name, Words(name, name, f"without {name}"))

    def served_by(self, row: Row) -> bool:
        """Whether the row lists it."""
        served = getattr(row, self.field)
        return served is None or self.value in served

    def refusal(self, row: Row, served: object = None) -> tuple[str, str]:
        """What the row lacks, and what would make it run; `served` stands for the row's field."""
        served = getattr(row, self.field) if served is None else served
        listed = one_of(served) if isinstance(served, tuple) else str(served)
        words = self.words
        return words.lacking.format(value=_said(self.value)), words.cure.format(served=listed)


def _said(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def one_of(values: tuple[object, ...]) -> str:
    """The values as English: "a, b or c"; a pair is "a/b".

    >>> one_of(("fp16", "bf16", "fp8_e4m3")), one_of((64, (192, 128)))
    ('fp16, bf16 or fp8_e4m3', '64 or 192/128')
    """
    *most, last = map(_said, values)
    return f"{', '.join(most)} or {last}" if most else last


def needs_of(
    shape: Shape,
    cache: CacheSpec,
    features: Features,
    options: Options,
    device: Device,
    cubins: bool = True,
) -> tuple[Need, ...]:
    """Everything a valid configuration asks of a kernel, in the order refusals name it.

    Args:
        shape, cache, features, options: as for ``Attention``.
        device: for which device.
        cubins: whether FlashInfer's prebuilt kernels can be had there.

    >>> needs = needs_of(Shape(num_q_heads=8, num_kv_heads=2, head_dim=64), CacheSpec(),
    ...                  Features(sinks=True), Options(), Device.of("90"))
    >>> [need.value for need in needs]
    ['sm90', 'bfloat16', 64, 16, 'bf16', 'LBHNC', 'one rank', 'model', 'sinks']
    """
    fmt = resolve(cache.format, shape.dtype)
    size, value_size = shape.head_dim, shape.value_dim
    asked = _single(features, options)
    asked["fp32_over_quantized"] = fmt.quantized and OF_DTYPE[shape.dtype] == "fp32"
    asked["unquantized_query"] = fmt.quantized and not options.quantize_query
    asked["no_cubins"] = not cubins
    asked.update(_pairs(shape, fmt, cache.page_size, features, options, cubins))
    asked["all_inputs"] = _exceeds_flashinfer(fmt, cache.v_scale_order, features, options)
    return (
        Need("families", device.family),
        Need("dtypes", dtype_name(shape.dtype)),
        Need("head_dims", size if size == value_size else (size, value_size)),
        Need("page_sizes", cache.page_size),
        Need("formats", fmt.name),
        Need("layouts", cache.layout),
        Need("ranks", SEVERAL_RANKS if options.world > 1 else ONE_RANK),
        *[Need("out_formats", name) for name in dict.fromkeys(features.out_formats)],
        *[need for name, need in FEATURE_NEEDS.items() if asked[name]],
    )


FEATURE_NEEDS = {name: Need("features", name) for name in FEATURES}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _single(features: Features, options: Options) -> dict[str, bool]:
    """Whether each feature that stands in one place is asked for."""
    return {
        "window": any(window is not None for window in features.windows),
        "mixed_windows": len(set(features.windows)) > 1,
        "soft_cap": features.soft_cap,
        "sinks": features.sinks,
        "alibi": features.alibi,
        "draft_masks": features.draft_masks,
        "non_causal": features.non_causal,
        "lse": features.lse,
        "adaptive": options.adaptive,
        "non_causal_drafts": options.non_causal_drafts,
        "forced_splits": options.debug_splits is not None,
        "invariant": options.invariant,
        "table_kernels_off": options.table_kernels is False,
    }


def _exceeds_flashinfer(
    fmt: Format, v_scale_order: str, features: Features, options: Options
) -> bool:
    """Whether FlashInfer's kernels, unless asked for, would serve some of the layers alone.

    ALiBi has slopes of its own there, an nvfp4 cache and output scales in tiles, and on several
    ranks a window counts the keys of one.
    """
    if options.kernels.startswith("flashinfer"):
        return False
    is_nvfp4, sharded = fmt.name in NVFP4, options.world > 1
    windows = any(window is not None for window in features.windows)
    in_tiles = is_nvfp4 and v_scale_order != "swizzled"
    quantized_out = any(name != "model" for name in features.out_formats)
    return (
        features.alibi
        or in_tiles
        or "nvfp4" in features.out_formats
        or (sharded and (windows or is_nvfp4))
        or (quantized_out and features.lse and features.sinks)
    )


def _pairs(
    shape: Shape, fmt: Format, page_size: int, features: Features, options: Options, cubins: bool
) -> dict[str, bool]:
    """Whether things some kernel serves only apart are asked for together."""
    large_page, sharded = page_size >= LARGE_PAGE, options.world > 1
    no_table_kernels = options.table_kernels is False or options.invariant or not cubins
    non_causal = features.non_causal or options.non_causal_drafts
    is_nvfp4, is_plain = fmt.name in NVFP4, not fmt.quantized
    e4m3_query = options.quantize_query and (is_nvfp4 or fmt.name == "fp8_e4m3")
    forced = options.table_kernels is True or features.sinks or large_page
    quantized_out = any(name != "model" for name in features.out_formats)
    return {
        "large_pages_of_lone_heads": large_page and shape.group_size == 1,
        "large_pages_without_table_kernels": large_page and no_table_kernels,
        "other_16_bit_cache": fmt.name in PLAIN_16_BIT and fmt.name != OF_DTYPE[shape.dtype],
        "nvfp4_without_table_kernels": is_nvfp4 and no_table_kernels,
        "nvfp4_non_causal": is_nvfp4 and non_causal,
        "fp8_left_to_native": fmt.name in FP8 and not e4m3_query and not forced,
        "sinks_on_ranks": features.sinks and sharded,
        "non_causal_on_ranks": non_causal and sharded,
        "nvfp4_unquantized_query": is_nvfp4 and not options.quantize_query,
        "quantized_out_of_plain_cache": quantized_out and is_plain,
        "quantized_out_of_plain_query": quantized_out and fmt.quantized and not e4m3_query,
        "nvfp4_out_of_nvfp4_cache": is_nvfp4 and "nvfp4" in features.out_formats,
    }
