"""R6: sinks were refused on most devices, and on some paths dropped without a word.

A sink adds exp(sink) to its head's denominator once: however keys are cut, in every phase, dtype,
window and format. Where a kernel has no sinks, construction refuses.
"""

import math

import pytest
import torch

import pageant
from pageant import Layer
from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from tests.inputs import Case, build
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

SINKS = ((0.0, 0.75), (math.log(5.0), 0.375), (-math.inf, 1.0), (None, 1.0))


def sinks_of(value):
    return Layer(sinks=None if value is None else torch.full((2,), value))


@each_kernel
@each_phase
@each_dtype
@pytest.mark.parametrize(("sink", "want"), SINKS)
def test_the_examples(kernels, phase, dtype, sink, want):
    """Three keys of value 1: the output is 3 / (3 + exp(sink)), the lse is log 3 with any sink."""
    layer = sinks_of(sink)
    step = scene(kernels, phase, [1], [3], layers=[layer], dtype=dtype, values=torch.ones)
    assert_means(step.means(layer), [want])
    _, lse = step.run(None, layer)
    torch.testing.assert_close(lse, torch.full((1, 2), math.log(3.0)))


@each_kernel
@each_phase
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 4])
def test_once_however_keys_are_cut(kernels, phase, splits, window):
    layer = Layer(sinks=torch.full((2,), math.log(4.0)), window=window)
    options = {"debug_splits": splits}
    lens = [1, 2, 3, 50]
    step = scene(kernels, phase, [1] * 4, lens, layers=[layer], options=options, values=torch.ones)
    seen = [min(n, window or n) for n in lens]
    assert_means(step.means(layer), [n / (n + 4) for n in seen])


@each_kernel
@each_phase
def test_each_head_has_its_own(kernels, phase):
    layer = Layer(sinks=torch.tensor([0.0, math.log(5.0)]))
    step = scene(kernels, phase, [1], [3], layers=[layer], values=torch.ones)
    out, _ = step.run(None, layer)
    torch.testing.assert_close(out[0, :, 0], torch.tensor([0.75, 0.375]))


@each_kernel
@each_phase
def test_a_row_that_sees_nothing_but_the_sink_is_zero(kernels, phase):
    layer = sinks_of(0.0)
    step = scene(kernels, phase, [3], [1], layers=[layer], values=torch.ones)
    out, lse = step.run(None, layer)
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert_means(out[2:, 0, 0], [0.5])


@each_kernel
@each_phase
def test_neither_capped_nor_scaled(kernels, phase):
    """Scores are 0 whatever cap and scale are; a capped sink of log 20 would be 1 at most."""
    layer = Layer(sinks=torch.full((2,), math.log(20.0)), soft_cap=1.0, scale=0.1, k_scale=7.0)
    cache = {"format": "fp8_e4m3"}
    step = scene(kernels, phase, [1], [4], layers=[layer], cache=cache, values=torch.ones)
    assert_means(step.means(layer), [4 / 24])


@each_kernel
@each_dtype
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("window", [None, 9])
def test_with_every_format(kernels, dtype, format, window):
    case = Case(
        seed=6,
        dtype=dtype,
        group=3,
        head_dim=32,
        v_head_dim=48,
        format=format,
        lengths=((1, 40), (3, 11), (2, 2), (9, 30)),
        window=window,
        soft_cap=2.0,
        alibi=True,
        sinks=True,
        scales=True,
        speculative=2,
        splits=3,
    )
    build(case, kernels).check()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("kernels", ["auto", "flashinfer"])
def test_refused_when_built_or_served(family, head_dim, kernels, monkeypatch):
    """FlashInfer has no sinks on Ampere: that is an error, not an attention without them."""
    monkeypatch.setattr(Device, "detect", lambda device: FAMILIES[family])
    shape = pageant.Shape(num_q_heads=8, num_kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    features, options = pageant.Features(sinks=True), pageant.Options(kernels=kernels)
    limits = pageant.Limits(max_requests=2, max_tokens=4, max_seq_len=32)
    verdict = pageant.supports(shape, None, features, options, family)
    if verdict.ok:
        attn = pageant.Attention(shape, None, limits, features, options)
        assert set(attn.explain().rows) == {"decode", "prefill"}
    else:
        with pytest.raises(pageant.ArgumentError) as caught:
            pageant.Attention(shape, None, limits, features, options)
        assert (str(caught.value), caught.value.argument) == (verdict.reason, verdict.argument)
    if kernels == "auto":
        assert verdict.ok
    if kernels == "flashinfer" and family in ("sm80", "sm86", "sm89"):
        assert verdict.argument == "sinks"
