"""Scales from observed keys and values: the right number for every format, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageant
from pageant.cache.formats import FORMATS, Format
from pageant.cache.quantize import dequantize, quantize

SCALED = [row for row in FORMATS.values() if row.uses_layer_scales]
UNSCALED = [row for row in FORMATS.values() if not row.uses_layer_scales]


def normal(seed: int, tokens: int = 64, dim: int = 64, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 3, dim, generator=generator) * spread


def largest(row: Format) -> float:
    """The largest value a cache of scale 1 holds."""
    blocks = 1.0 if row.scale_dtype is None else torch.finfo(row.scale_dtype).max
    return row.max_value * blocks


@pytest.mark.parametrize("row", SCALED, ids=lambda row: row.name)
def test_largest_value_of_all_samples_is_stored_exactly(row: Format) -> None:
    samples = [(normal(1), normal(2)), (normal(3, 5), normal(4, 5))]
    samples[1][0][4, 2, 63] = -50.0
    samples[0][1][0, 0, 0] = 3000.0
    scales = pageant.calibrate(samples, row.name)
    assert scales.k_scale == pytest.approx(50.0 / largest(row))
    assert scales.v_scale == pytest.approx(3000.0 / largest(row))
    for part, scale, peak in ((0, scales.k_scale, 50.0), (1, scales.v_scale, 3000.0)):
        for pair in samples:
            stored = dequantize(*quantize(pair[part], row.name, scale), row.name, scale)
            assert stored.abs().max() <= peak * (1 + 1e-6)
        assert max(  # the peak itself is neither clipped nor rounded away
            dequantize(*quantize(pair[part], row.name, scale), row.name, scale).abs().max()
            for pair in samples
        ) == pytest.approx(peak)


@pytest.mark.parametrize("row", UNSCALED, ids=lambda row: row.name)
def test_formats_without_such_scales_get_one(row: Format) -> None:
    assert pageant.calibrate([(normal(1), normal(2))], row.name) == pageant.Scales()


def test_auto_asks_the_samples_for_their_type() -> None:
    samples = [(normal(1).bfloat16(), normal(2).bfloat16())]
    assert pageant.calibrate(samples, "auto") == pageant.Scales()


def test_percentile_takes_the_magnitude_that_enough_elements_keep_below() -> None:
    ramp = torch.arange(1, 1001.0).reshape(10, 1, 100)
    ramp[::2] *= -1
    for percentile, bound in ((100.0, 1000), (99.9, 999), (50, 500), (0.01, 1)):
        scales = pageant.calibrate([(ramp, 2 * ramp)], "fp8_e4m3", percentile)
        assert scales.k_scale == pytest.approx(bound / 448)
        assert scales.v_scale == pytest.approx(2 * bound / 448)


def test_percentile_serves_outliers_worse_and_others_better() -> None:
    """E4m3 has 16 binades; values far below the largest need the smaller scale."""
    k = normal(1, spread=1e-3)
    k[0, 0, 0] = 1e4
    errors = []
    for percentile in (100.0, 99.9):
        scale = pageant.calibrate([(k, k)], "fp8_e4m3", percentile).k_scale
        stored = dequantize(*quantize(k, "fp8_e4m3", scale), "fp8_e4m3", scale)
        errors.append((stored - k)[1:].square().sum() / k[1:].square().sum())
    assert errors[0] > 0.1
    assert errors[1] < 1e-3


def test_zero_and_tiny_values_give_scales_that_write_accepts() -> None:
    zero, tiny = torch.zeros(2, 1, 16), torch.full((2, 1, 16), 1e-44)
    for row in SCALED:
        scales = pageant.calibrate([(zero, tiny)], row.name)
        assert scales.k_scale == 1.0
        assert scales.v_scale == torch.finfo(torch.float32).tiny
        codes = quantize(tiny, row.name, scales.v_scale)
        assert dequantize(*codes, row.name, scales.v_scale).isfinite().all()


def test_samples_may_be_a_generator_of_any_float_type_and_hold_empty_pairs() -> None:
    k, v = normal(1).half(), normal(2, dim=32).half()
    pairs = ((part, other) for part, other in ((k[:0], v[:0]), (k, v)))
    scales = pageant.calibrate(pairs)
    assert scales.k_scale == float(k.abs().max()) / 448
    assert scales.v_scale == float(v.abs().max()) / 448


def test_apply_keeps_what_else_a_layer_has() -> None:
    scales = pageant.Scales(k_scale=0.5, v_scale=2.0)
    assert scales.apply() == pageant.Layer(k_scale=0.5, v_scale=2.0)
    layer = pageant.Layer(window=7, soft_cap=30.0)
    assert scales.apply(layer) == pageant.Layer(window=7, soft_cap=30.0, k_scale=0.5, v_scale=2.0)


GOOD = torch.ones(2, 1, 16)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"samples": None}, "samples"),
        ({"samples": GOOD}, "samples"),
        ({"samples": []}, "samples"),
        ({"samples": [(GOOD[:0], GOOD[:0])]}, "samples"),
        ({"samples": (GOOD, GOOD)}, r"samples\[0\]"),
        ({"samples": [(GOOD, GOOD), (GOOD,)]}, r"samples\[1\]"),
        ({"samples": [(GOOD, GOOD[0])]}, r"samples\[0\]\.v"),
        ({"samples": [(GOOD, GOOD[:1])]}, r"samples\[0\]\.v"),
        ({"samples": [(GOOD.int(), GOOD)]}, r"samples\[0\]\.k"),
        ({"samples": [(GOOD, 1.0)]}, r"samples\[0\]\.v"),
        ({"samples": [(GOOD, GOOD / 0)]}, "samples' v"),
        ({"samples": [(GOOD * torch.nan, GOOD)], "percentile": 50}, "samples' k"),
        ({"percentile": 0}, "percentile"),
        ({"percentile": 100.1}, "percentile"),
        ({"percentile": True}, "percentile"),
        ({"percentile": "99"}, "percentile"),
        ({"format": "fp3"}, "cache"),
    ],
)
def test_a_mistake_names_its_argument(arguments: dict[str, Any], argument: str) -> None:
    with pytest.raises(pageant.ArgumentError, match=rf"^{argument} is .*; allowed: "):
        pageant.calibrate(**{"samples": [(GOOD, GOOD)], **arguments})
