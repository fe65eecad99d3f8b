"""What a cache format costs a model: perplexity through Pageant, and error of K and V.

The text is the Python standard library's own documentation topics, so nothing is downloaded. It is
cut into windows, each prefilled from its start in one step; attention reads the keys and values
back from the cache, as the format stores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageant.cache.calibrate import Sample, Scales, calibrate
from pageant.cache.pages import PagedCache, layout_for
from pageant.cache.quantize import dequantize, quantize
from pageant.engine.prefill import Prefill, observe
from pageant.integrations.transformers import layers_of
from pageant.types import CacheSpec, Options, bad

BASELINE = "fp32"
SAME = 0.05  # per cent that kernels may differ from the reference
# Per cent that a format may cost SmolLM2.
BOUNDS = {"fp8_e4m3": 1.5, "int8": 0.5}


@dataclass(frozen=True, kw_only=True)
class Text:
    """What is measured, and what the scales are fitted to.

    Attributes:
        windows: token ids; a window's own tokens but the first, and one more, are predicted.
        calibration: other windows of the same text.
    """

    windows: list[list[int]]
    calibration: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Any, num_tokens: int, window: int, num_calibration: int) -> Text:
        """The first tokens of the topics, sorted by name; the calibration's come after them."""
        from pydoc_data.topics import topics

        tokens = tokenizer("\n\n".join(topics[name] for name in sorted(topics))).input_ids
        end = num_tokens + 1 + num_calibration
        if end > len(tokens):
            allowed = f"with those of the calibration up to {len(tokens) - 1}, the text's length"
            raise bad("tokens", num_tokens, allowed)
        starts = range(0, num_tokens, window)
        rest = range(num_tokens + 1, end, window)
        return cls(
            windows=[tokens[start : min(start + window, num_tokens) + 1] for start in starts],
            calibration=[tokens[start : min(start + window, end)] for start in rest],
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cache format.

    Attributes:
        format: its name.
        bytes_per_token: of all layers, scales included.
        perplexity: exp of the mean negative log-likelihood of the predicted tokens.
        change: per cent above the fp32 cache's.
        change_error: standard error of that, from the tokens' own differences: a coarse format is
            noise, and another draw of it (other scales, another processor) moves `change` so far.
        k_error, v_error: relative squared error of the observed K and V, all layers together.
        reference: perplexity with the float64 reference in place of the kernels, if asked for.
        difference: per cent between the two.
    """

    format: str
    bytes_per_token: int
    perplexity: float
    change: float
    change_error: float
    k_error: float
    v_error: float
    reference: float | None = None
    difference: float | None = None


class Measurement:
    """A model and a text, ready to be measured with one cache format after another.

    Args:
        model: a transformers model for causal language modelling; switched to Pageant's attention.
        text: windows to predict, and others to fit scales to; without those all scales are 1.
        percentile: as in ``pageant.calibrate``.
    """

    def __init__(self, model: Any, text: Text, percentile: float = 100.0) -> None:
        self.model, self.text, self.percentile = model, text, percentile
        self.shape, self.layers = layers_of(model)
        self.seen = observe(model, text.calibration or text.windows[:1])
        self._baseline: torch.Tensor | None = None

    def row(self, format: str, kernels: str = "auto", *, check: bool = False) -> Row:
        """Measure a format; with `check` also the reference, over the cache the kernels wrote."""
        found = self.surprise(format, kernels, check=check)
        if format == BASELINE:
            self._baseline = found[0]
        elif self._baseline is None:
            (self._baseline,) = self.surprise(BASELINE, kernels)
        change = found[0] - self._baseline
        perplexity, *reference = (math.exp(each.mean()) for each in found)
        k_error, v_error = squared_errors(self.seen, format, self.scales(format))
        spec = CacheSpec(format=format, page_size=1)
        return Row(
            format=format,
            bytes_per_token=layout_for(self.shape, spec, len(self.layers), 1).num_bytes,
            perplexity=perplexity,
            change=100 * math.expm1(change.mean()),
            change_error=100 * float(change.std(correction=0)) / math.sqrt(len(change)),
            k_error=k_error,
            v_error=v_error,
            reference=reference[0] if check else None,
            difference=100 * abs(perplexity / reference[0] - 1) if check else None,
        )

    def scales(self, format: str) -> list[Scales]:
        """Of each layer, fitted to the calibration windows."""
        if not self.text.calibration:
            return [Scales() for _ in self.layers]
        return [calibrate(pairs, format, self.percentile) for pairs in self.seen]

    def surprise(
        self, format: str, kernels: str = "auto", *, check: bool = False
    ) -> list[torch.Tensor]:
        """Negative log-likelihood of each predicted token, through a cache of this format.

        Returns:
            float64 [tokens] of the kernels; and with `check` of the float64 reference, reading the
            cache they wrote. Writing one of its own would tell nothing: values that differ in the
            last bit round to different codes now and then, and thirty layers make that another
            sample of the format's noise.
        """
        layers = [
            scales.apply(layer)
            for scales, layer in zip(self.scales(format), self.layers, strict=True)
        ]
        longest = max(map(len, self.text.windows)) - 1
        spec, options = CacheSpec(format=format), Options(kernels=kernels)

        def prefill(options: Options, shared: PagedCache | None = None) -> Prefill:
            return Prefill(
                self.model,
                self.shape,
                layers,
                max_tokens=longest,
                cache=spec,
                options=options,
                shared=shared,
            )

        runs = [prefill(options)]
        if check:
            runs.append(prefill(Options(kernels="reference"), runs[0].cache))
        found: list[list[torch.Tensor]] = [[] for _ in runs]
        for window in self.text.windows:
            for run, parts in zip(runs, found, strict=True):
                parts.append(_surprise(run, window))
        return [torch.cat(parts) for parts in found]


def _surprise(prefill: Prefill, window: Sequence[int]) -> torch.Tensor:
    """Negative log-likelihood, natural, of a window's tokens but the first."""
    logits = prefill.run(window[:-1]).float()
    targets = torch.tensor(window[1:], device=logits.device)
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return each.double().cpu()


def squared_errors(
    seen: Iterable[Sequence[Sample]], format: str, scales: Iterable[Scales]
) -> tuple[float, float]:
    """Sum of squared errors over sum of squares, of K and of V, as stored and read back."""
    errors, sizes = [0.0, 0.0], [0.0, 0.0]
    for pairs, layer in zip(seen, scales, strict=True):
        for pair in pairs:
            for part, (x, scale) in enumerate(
                zip(pair, (layer.k_scale, layer.v_scale), strict=True)
            ):
                stored = dequantize(*quantize(x, format, scale), format, scale)
                errors[part] += float((stored.double() - x.double()).square().sum())
                sizes[part] += float(x.double().square().sum())
    return errors[0] / sizes[0], errors[1] / sizes[1]


def broken(rows: Sequence[Row]) -> list[str]:
    """What should hold and does not, one line each; only what was measured is judged."""
    found = {row.format: row for row in rows}
    faults = [
        f"{name}: {found[name].change:+.2f} % of perplexity, at most {bound:+.2f} %"
        for name, bound in BOUNDS.items()
        if name in found and found[name].change > bound
    ]
    faults += [
        f"{row.format}: {row.difference:.4f} % from the reference, at most {SAME} %"
        for row in rows
        if row.difference is not None and row.difference > SAME
    ]
    plain, better = found.get("nvfp4"), found.get("nvfp4_4over6")
    if plain and better:
        faults += [
            f"nvfp4_4over6: squared error of {name} not below nvfp4's"
            for name, one, other in (
                ("K", better.k_error, plain.k_error),
                ("V", better.v_error, plain.v_error),
            )
            if one >= other
        ]
    return faults
