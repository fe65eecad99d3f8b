"""R5: one layer's window, cap or scale was applied to all layers, or dropped without a word.

Layers of one plan each get their own; what cannot take effect is an error.
"""

import math

import pytest
import torch

import pageant
from pageant import Layer
from pageant.kernels import reference
from pageant.plan.inputs import LayerParams
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

SINKS = torch.tensor([0.5, -1.0])
SLOPES = torch.tensor([0.25, 0.5])
LAYERS = (
    Layer(window=2),
    Layer(),
    Layer(soft_cap=1.0),
    Layer(scale=1.0),
    Layer(window=7, soft_cap=30.0, scale=0.3),
    Layer(sinks=SINKS),
    Layer(alibi_slopes=SLOPES, window=7),
    Layer(soft_cap=1.0, sinks=SINKS, alibi_slopes=SLOPES, scale=2.0),
)


@each_kernel
@each_phase
@each_dtype
def test_two_windows_in_one_plan(kernels, phase, dtype):
    windowed, plain = Layer(window=2), Layer()
    step = scene(kernels, phase, [1], [4], layers=[windowed, plain], dtype=dtype)
    plan = step.plan()
    q = torch.zeros(step.batch.num_tokens, 2, 16, dtype=dtype)
    for layer, mean in ((windowed, 2.5), (plain, 1.5), (windowed, 2.5)):
        assert_means(step.attn.run(plan, q, step.cache, layer)[-1:, 0, 0], [mean])


@each_kernel
@each_phase
@pytest.mark.parametrize(
    ("cap", "want"), [(1.0, 0.731059), (None, 0.999955), (1e6, 0.999955), (10.0, 0.999508)]
)
def test_cap_of_scores_0_and_10(kernels, phase, cap, want):
    layer = Layer(soft_cap=cap, scale=10 / 16)
    step = scene(kernels, phase, [1], [2], layers=[layer])
    page = step.batch.page_table[-1, 0]
    step.cache.k[page, 0], step.cache.k[page, 1] = 0.0, 1.0
    out, _ = step.run(torch.ones(1, 2, 16), layer)
    torch.testing.assert_close(out, torch.full((1, 2, 16), want), rtol=1e-5, atol=2e-6)


@each_kernel
@each_phase
@each_dtype
def test_all_parameters_layer_by_layer(kernels, phase, dtype):
    """Eight layers, one plan, forwards and backwards: each equals its own definition."""
    step = scene(
        kernels,
        phase,
        [1, 3],
        [9, 21],
        layers=LAYERS,
        dims=(64, 64),
        dtype=dtype,
    )
    rng = torch.Generator().manual_seed(4)
    # Elements that differ, where the scene has tokens, so that their roundings differ too.
    values = torch.randn(step.cache.v.shape, generator=rng).to(dtype)
    step.cache.v.copy_(values.where(~step.cache.v.isnan(), torch.nan))
    q = torch.randn(step.batch.num_tokens, 2, 64, generator=rng).to(dtype)
    plan = step.plan()
    starts, lens = step.batch.query_start_loc.tolist(), step.batch.seq_lens.tolist()
    first = [step.attn.run(plan, q, step.cache, layer, return_lse=True) for layer in LAYERS]
    for layer, (out, lse) in reversed(list(zip(LAYERS, first, strict=True))):
        again, lse_again = step.attn.run(plan, q, step.cache, layer, return_lse=True)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)
        params = LayerParams(
            score_scale=64**-0.5 if layer.scale is None else layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            alibi_slopes=layer.alibi_slopes,
        )
        want, want_lse = [], []
        for r, n in enumerate(lens):
            rows = slice(starts[r], starts[r + 1])
            pages, at = step.batch.page_table[r].long(), torch.arange(n)
            k, v = (view[pages[at // 4], at % 4].double() for view in (step.cache.k, step.cache.v))
            m = rows.stop - rows.start
            mask = reference.visible(m, n, causal=True, window=layer.window, draft=None)
            answer = reference.attend(q[rows].double(), k, v, mask, params)
            want.append(answer[0])
            want_lse.append(answer[1])
        assert_close(out, torch.cat(want), BOUNDS[dtype])
        assert_close(lse, torch.cat(want_lse), BOUNDS[dtype])


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        (Layer(window=3), "layer.window"),
        (Layer(soft_cap=5.0), "layer.soft_cap"),
        (Layer(sinks=torch.zeros(2)), "layer.sinks"),
        (Layer(alibi_slopes=torch.zeros(2)), "layer.alibi_slopes"),
        (Layer(out_format="fp8_e4m3"), "layer.out_format"),
    ],
)
@each_kernel
def test_what_was_not_declared_raises(kernels, layer, field):
    step = scene(kernels, "decode", [1], [4])
    with pytest.raises(pageant.ArgumentError) as caught:
        step.run(None, layer)
    assert caught.value.argument == field
    assert_means(step.means(), [1.5])


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_none_raises(cap):
    step = scene("auto", "decode", [1], [4], layers=[Layer(soft_cap=1.0)])
    with pytest.raises(pageant.ArgumentError) as caught:
        step.run(None, Layer(soft_cap=cap))
    assert caught.value.argument == "layer.soft_cap"
