"""Which kernels a configuration gets, why, and what follows for the host: text or JSON.

>>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
>>> answer = explain(shape, CacheSpec(format="fp8"), device="cpu")
>>> answer.to_dict()["decode"]
{'kernel': 'cpu.decode', 'q_dtype': 'bfloat16'}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from pageant.cache.formats import resolve
from pageant.device import Device
from pageant.select.choose import Choice, Refusal, choose_each, device_of
from pageant.select.rows import Row
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Features, Options, Shape, Support


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer for one configuration; ``print`` shows it as a table, ``to_dict`` as JSON.

    Attributes:
        support: whether it can run; if not, the reason and the argument in the way.
        shape, cache, options: what was asked.
        device: for which device; None if it is not one.
        choices: prefill's and decode's; empty if the question itself was wrong.
    """

    support: Support
    shape: Shape
    cache: CacheSpec
    options: Options
    device: Device | None = None
    choices: tuple[Choice, ...] = field(default=())

    @property
    def rows(self) -> dict[str, Row]:
        """The row of each phase; a phase without one is missing."""
        return {choice.phase: choice.row for choice in self.choices if choice.row is not None}

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Every row refused before the one chosen, prefill's first."""
        return tuple(refusal for choice in self.choices for refusal in choice.refused)

    @property
    def decode_threshold(self) -> int:
        """New tokens a request may bring and still count as a decode."""
        return 1 + self.options.speculative_tokens if self.rows["decode"].takes_drafts else 1

    def to_dict(self) -> dict[str, Any]:
        """The answer in the form ``pageant explain --json`` prints; null means any."""
        if not self.support.ok:
            return refused_dict(self.support)
        rows = self.rows
        prefill, decode = rows["prefill"], rows["decode"]
        q_dtype = _dtype_name(self.shape)
        return {
            "ok": True,
            "prefill": {"kernel": prefill.name, "q_dtype": q_dtype},
            "decode": {"kernel": decode.name, "q_dtype": q_dtype},
            "decode_threshold": self.decode_threshold,
            "cuda_graph": decode.graph,
            "varlen_graph_max_q": None,
            "lens_mismatch": prefill.lens_mismatch and decode.lens_mismatch,
            "page_sizes": _common(prefill.page_sizes, decode.page_sizes),
            "layouts": _common(prefill.layouts, decode.layouts),
            "draft_reuse": decode.draft_reuse,
            "refused": [
                {"kernel": refusal.kernel, "phase": refusal.phase, "why": refusal.why}
                for refusal in self.refused
            ],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.device is None or not self.choices:
            yield f"refused: {self.support.reason}"
            return
        shape, cache = self.shape, self.cache
        dims = f"{shape.head_dim}" + (f"/{shape.value_dim}" * (shape.value_dim != shape.head_dim))
        yield f"device  {self.device.family} ({self.device.name})"
        yield (
            f"model   {shape.num_q_heads} query heads, {shape.num_kv_heads} kv heads, "
            f"head size {dims}, {_dtype_name(shape)}"
        )
        stored = resolve(cache.format, shape.dtype).name
        yield f"cache   {stored}, {cache.page_size} tokens a page, layout {cache.layout}"
        yield ""
        if self.rows:
            chosen = [(phase, row.name, row.because) for phase, row in self.rows.items()]
            yield from _columns([("phase", "kernel", "because"), *chosen])
            yield ""
        if self.support.ok:
            tokens = self.decode_threshold
            yield f"Requests of up to {tokens} new token{'s' * (tokens > 1)} are decodes."
            yield f"CUDA graphs: {self.rows['decode'].graph}."
        else:
            yield f"refused: {self.support.reason}"
        if self.refused:
            yield ""
            refused = [(r.phase, r.kernel, r.why) for r in self.refused]
            yield from _columns([("phase", "not chosen", "why"), *refused])


def explain(
    shape: Shape,
    cache: CacheSpec | None = None,
    features: Features | None = None,
    options: Options | None = None,
    device: Device | torch.device | str = "cpu",
) -> Explanation:
    """Choose a kernel for each phase and say why.

    Args:
        shape, cache, features, options: as for ``Attention``.
        device: a device of this machine, or any family: a Device, "sm90" or "90".
    """
    cache, features, options = cache or CacheSpec(), features or Features(), options or Options()
    asked: dict[str, Any] = {"shape": shape, "cache": cache, "options": options}
    support = check_config(shape, cache, features, options)
    if not support.ok:
        return Explanation(support=support, **asked)
    try:
        known = device_of(device)
    except ArgumentError as error:
        return Explanation(support=Support(False, str(error), error.argument), **asked)
    choices = choose_each(shape, cache, features, options, known)
    support = next((c.support for c in choices if c.row is None), Support(True))
    return Explanation(support=support, device=known, choices=choices, **asked)


def refused_dict(support: Support) -> dict[str, Any]:
    """The JSON answer where nothing can run."""
    return {"ok": False, "reason": support.reason, "argument": support.argument}


def _dtype_name(shape: Shape) -> str:
    return str(shape.dtype).removeprefix("torch.")


def _common(first: tuple[Any, ...] | None, second: tuple[Any, ...] | None) -> list[Any] | None:
    """What both accept; None stands for anything.

    >>> _common((16, 32), (32, 64)), _common((16,), None), _common(None, None)
    ([32], [16], None)
    """
    if first is None or second is None:
        either = first if second is None else second
        return None if either is None else list(either)
    return [value for value in first if value in second]


def _columns(table: list[tuple[str, str, str]]) -> Iterator[str]:
    """Lines of a table; the last column is not padded."""
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:2]]
    for first, second, last in table:
        yield f"{first:<{widths[0]}}  {second:<{widths[1]}}  {last}"
