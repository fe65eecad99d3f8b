"""What a configuration needs from a kernel, as data, with the words refusals use.

A need is a value that must lie in one field of a row. There is no other rule, so a need no row
lists is served by none:

>>> from pageant.select.rows import ROWS
>>> Need("features", "time_travel").refusal(ROWS[0])
('time_travel', 'without time_travel')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from pageant.cache.formats import resolve
from pageant.device import Device
from pageant.select.rows import Row
from pageant.types import CacheSpec, Features, Options, Shape


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


FIELDS: dict[str, Words] = {
    "families": Words("sm", "device of this family", "on {served}"),
    "dtypes": Words("dtype", "{value} models", "with dtype {served}"),
    "formats": Words("cache", "{value} cache", "with cache {served}"),
    "head_dims": Words("head_dim", "head size {value}", "with head sizes {served}"),
    "page_sizes": Words("page_size", "pages of {value} tokens", "with page_size {served}"),
    "layouts": Words("layout", "layout {value}", "with layout {served}"),
    "out_formats": Words("out_formats", "{value} output", "with out_formats {served}"),
}

FEATURES: dict[str, Words] = {
    "window": Words("window", "sliding window", "without a window"),
    "soft_cap": Words("soft_cap", "soft cap", "without a soft cap"),
    "sinks": Words("sinks", "attention sinks", "without sinks"),
    "alibi": Words("alibi", "ALiBi slopes", "without ALiBi"),
    "draft_masks": Words("draft_masks", "draft masks", "without draft masks"),
    "non_causal": Words("non_causal", "non-causal batches", "with causal batches only"),
    "lse": Words("lse", "log-sum-exp output", "without lse"),
    "v_head_dim": Words(
        "head_dim", "values of another size than keys", "with v_head_dim equal to head_dim"
    ),
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
    "context_parallel": Words("dcp", "context parallel", "on one rank (dcp 1)"),
}


@dataclass(frozen=True)
class Need:
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

    def refusal(self, row: Row) -> tuple[str, str]:
        """What the row lacks, and what would make it run."""
        served = getattr(row, self.field)
        listed = one_of(served) if isinstance(served, tuple) else str(served)
        words = self.words
        return words.lacking.format(value=self.value), words.cure.format(served=listed)


def one_of(values: tuple[object, ...]) -> str:
    """The values as English: "a, b or c".

    >>> one_of(("fp16", "bf16", "fp8_e4m3"))
    'fp16, bf16 or fp8_e4m3'
    """
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def needs_of(
    shape: Shape, cache: CacheSpec, features: Features, options: Options, device: Device
) -> tuple[Need, ...]:
    """Everything a valid configuration asks of a kernel, in the order refusals name it.

    >>> needs = needs_of(Shape(num_q_heads=8, num_kv_heads=2, head_dim=64), CacheSpec(),
    ...                  Features(sinks=True), Options(), Device.of("90"))
    >>> [need.value for need in needs]
    ['sm90', 'bfloat16', 'bf16', 64, 16, 'LBHNC', 'model', 'sinks']
    """
    fmt = resolve(cache.format, shape.dtype)
    dtype = str(shape.dtype).removeprefix("torch.")
    wanted = {
        "window": any(window is not None for window in features.windows),
        "soft_cap": features.soft_cap,
        "sinks": features.sinks,
        "alibi": features.alibi,
        "draft_masks": features.draft_masks,
        "non_causal": features.non_causal,
        "lse": features.lse,
        "v_head_dim": shape.value_dim != shape.head_dim,
        "fp32_over_quantized": fmt.quantized and dtype == "float32",
        "unquantized_query": fmt.quantized and not options.quantize_query,
        "adaptive": options.adaptive,
        "non_causal_drafts": options.non_causal_drafts,
        "forced_splits": options.debug_splits is not None,
        "invariant": options.invariant,
        "context_parallel": options.world > 1,
    }
    return (
        Need("families", device.family),
        Need("dtypes", dtype),
        Need("formats", fmt.name),
        *(Need("head_dims", size) for size in dict.fromkeys((shape.head_dim, shape.value_dim))),
        Need("page_sizes", cache.page_size),
        Need("layouts", cache.layout),
        *(Need("out_formats", name) for name in dict.fromkeys(features.out_formats)),
        *(Need("features", name) for name, is_wanted in wanted.items() if is_wanted),
    )
