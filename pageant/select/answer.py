"""What a choice of kernels means for the host, in properties, JSON or text.

>>> from pageant.select.explain import explain
>>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
>>> answer = explain(shape, CacheSpec(format="fp8"), device="cpu")
>>> answer.to_dict()["decode"]
{'kernel': 'cpu.decode', 'q_dtype': 'bfloat16'}
>>> answer.cuda_graph, answer.page_sizes, answer.serves_sinks
('NEVER', None, True)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pageant.cache.formats import resolve
from pageant.device import Device
from pageant.select.built import missing_here
from pageant.select.choose import Choice, Missing, asked_rows, has_kernels
from pageant.select.needs import NVFP4, Need, dtype_name, needs_of
from pageant.select.refusal import Refusal
from pageant.select.row import PHASES, GraphLevel, Phase, Reports, Row
from pageant.select.text import lines_of
from pageant.select.validate import OUT_FORMATS, check_config
from pageant.types import CacheSpec, Features, Options, Shape, Support


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one configuration; ``print`` shows it as a table, ``to_dict`` as JSON.

    Where it can run (``support.ok``), the properties say what a host may build on.

    Attributes:
        support: whether it can run; if not, the reason and the argument in the way.
        shape, cache, features, options: what was asked.
        cubins: whether FlashInfer's prebuilt kernels can be had.
        device: for which device; None if it is not one.
        choices: prefill's and decode's; empty if the question itself was wrong.
    """

    support: Support
    shape: Shape
    cache: CacheSpec
    features: Features
    options: Options
    cubins: bool = True
    device: Device | None = None
    choices: tuple[Choice, ...] = field(default=())
    needs: tuple[Need, ...] = field(default=(), repr=False)
    missing: Missing = field(default=missing_here, repr=False, compare=False)

    @property
    def rows(self) -> dict[str, Row]:
        """The row of each phase; a phase without one is missing."""
        return {choice.phase: choice.row for choice in self.choices if choice.row is not None}

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Every row refused before the one chosen, prefill's first."""
        return tuple(refusal for choice in self.choices for refusal in choice.refused)

    @cached_property
    def reports(self) -> Reports:
        """What the decode kernel promises for these needs."""
        row, values = self.rows["decode"], {need.value for need in self.needs}
        return next((said for value, said in row.reports_with if value in values), row.reports)

    @cached_property
    def query_dtypes(self) -> dict[Phase, str]:
        """The type queries are given to the kernel of each phase in, by its torch name."""
        values = {need.value for need in self.needs}
        model = dtype_name(self.shape.dtype)
        return {phase: _query_dtype(self.rows[phase], phase, values, model) for phase in PHASES}

    @property
    def decode_threshold(self) -> int:
        """New tokens a request may bring and still count as a decode."""
        return 1 + self.options.speculative_tokens if self.reports.takes_drafts else 1

    @property
    def shares_prefixes(self) -> bool:
        """Whether keys that several decodes share may be computed once."""
        wanted = self.options.cascade and self.unshared is None
        return wanted and bool(self.rows["decode"].shared_kernel)

    @property
    def unshared(self) -> str | None:
        """What keeps any kernel from sharing the keys of prefixes; None if nothing does."""
        if self.options.invariant:
            return "invariant mode"
        if self.options.world > 1:
            if self.features.alibi:  # distances of a rank's keys are uneven
                return "ALiBi on several ranks"
            if "decode" in self.rows and self.rows["decode"].is_planned_on_device:
                return "several ranks, on a GPU"
        return None

    @property
    def cuda_graph(self) -> GraphLevel:
        """Which batches a CUDA graph can capture."""
        return self.reports.graph

    @property
    def varlen_graph_max_q(self) -> int | None:
        """Most new tokens a decode may bring to a full graph that reads offsets on the device.

        None: graphs need decodes of one length.
        """
        said = self.reports.varlen_graph
        adaptive = self.options.adaptive and self.options.speculative_tokens > 0
        varies = said == "always" or (said == "adaptive" and adaptive)
        return self.decode_threshold if varies else None

    @property
    def lens_mismatch(self) -> bool:
        """Whether query lengths on the device may differ from the host's."""
        return self.reports.lens_mismatch

    @property
    def draft_reuse(self) -> bool:
        """Whether one plan serves all fused draft steps, lengths advancing in place."""
        return self.reports.draft_reuse

    @property
    def layers_may_differ(self) -> bool:
        """Whether layers of one plan may differ in window, cap and scale."""
        return all("mixed_windows" in row.features for row in self.rows.values())

    def graph_tokens(self, max_requests: int, largest: int | None = None) -> int:
        """Most tokens of a batch of decodes that graphs are captured for.

        Args:
            max_requests: requests a batch.
            largest: tokens of the largest graph the host captures; None: no bound of its own.
        """
        tokens = (1 + self.options.speculative_tokens) * max_requests
        return tokens if largest is None else min(tokens, largest)

    @property
    def takes_fp8_query(self) -> bool:
        """Whether a layer may hand over a query that is fp8 already, for both phases."""
        said = self.reports.fp8_query
        planned = all(dtype.startswith("float8") for dtype in self.query_dtypes.values())
        return said == "always" or (said == "planned" and planned)

    @cached_property
    def page_sizes(self) -> tuple[int, ...] | None:
        """Every page size that would run, all else as asked; None: any."""
        if all(row.page_sizes is None for row in self.rows.values()):
            return None
        family, kernels = self.needs[0].value, self.options.kernels
        rows = [row for phase in PHASES for row in asked_rows(phase, kernels, family)]
        sizes = sorted({size for row in rows for size in row.page_sizes or ()})
        return tuple(
            size for size in sizes if self._runs_with(cache=replace(self.cache, page_size=size))
        )

    @property
    def layouts(self) -> tuple[str, ...] | None:
        """Every cache layout that both kernels take; None: any."""
        limits = [row.layouts for row in self.rows.values() if row.layouts is not None]
        if not limits:
            return None
        return tuple(name for name in limits[0] if all(name in limit for limit in limits))

    @property
    def serves_sinks(self) -> bool:
        """Whether it would also run with attention sinks."""
        return self._runs_with(features=replace(self.features, sinks=True))

    @property
    def serves_non_causal(self) -> bool:
        """Whether it would also run with batches that are not causal."""
        return self._runs_with(features=replace(self.features, non_causal=True))

    @property
    def fused_out_formats(self) -> tuple[str, ...]:
        """The quantised formats that a layer's output can be written in."""
        return tuple(
            name
            for name in OUT_FORMATS
            if name != "model"
            and self._runs_with(features=replace(self.features, out_formats=("model", name)))
        )

    def _runs_with(self, cache: CacheSpec | None = None, features: Features | None = None) -> bool:
        cache, features = cache or self.cache, features or self.features
        assert self.device is not None
        if not check_config(self.shape, cache, features, self.options):
            return False
        needs = needs_of(self.shape, cache, features, self.options, self.device, self.cubins)
        return has_kernels(needs, self.options.kernels, self.missing)

    @property
    def nvfp4_cache_shape(self) -> tuple[int, int, int] | None:
        """Head slots, tokens and bytes a slot of one nvfp4 page; None for other formats.

        Also None where keys and values differ in size. K and V have
        head slots of their own: elements, two a byte, and then a scale for every 16 of them.

        >>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> Explanation(support=Support(True), shape=shape, cache=CacheSpec(format="nvfp4"),
        ...             features=Features(), options=Options()).nvfp4_cache_shape
        (16, 16, 72)
        """
        shape = self.shape
        is_nvfp4 = resolve(self.cache.format, shape.dtype).name in NVFP4
        if not is_nvfp4 or shape.head_dim != shape.value_dim:
            return None
        slot_bytes = shape.head_dim // 2 + shape.head_dim // 16
        return 2 * shape.num_kv_heads, self.cache.page_size, slot_bytes

    def to_dict(self) -> dict[str, Any]:
        """The answer in the form ``pageant explain --json`` prints; null means any."""
        if not self.support.ok:
            return refused_dict(self.support)
        rows, page_sizes, layouts = self.rows, self.page_sizes, self.layouts
        queries = self.query_dtypes
        return {
            "ok": True,
            **{p: {"kernel": rows[p].name, "q_dtype": queries[p]} for p in PHASES},
            "decode_threshold": self.decode_threshold,
            "cuda_graph": self.cuda_graph,
            "varlen_graph_max_q": self.varlen_graph_max_q,
            "lens_mismatch": self.lens_mismatch,
            "page_sizes": None if page_sizes is None else list(page_sizes),
            "layouts": None if layouts is None else list(layouts),
            "draft_reuse": self.draft_reuse,
            "refused": [
                {"kernel": refusal.kernel, "phase": refusal.phase, "why": refusal.why}
                for refusal in self.refused
            ],
        }

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def _query_dtype(row: Row, phase: Phase, values: set[Any], model: str) -> str:
    """What the row's first rule that fits says."""
    said = next((rule.dtype for rule in row.queries if rule.fits(phase, values)), "model")
    return model if said == "model" else said


def refused_dict(support: Support) -> dict[str, Any]:
    """The JSON answer where nothing can run."""
    return {"ok": False, "reason": support.reason, "argument": support.argument}
