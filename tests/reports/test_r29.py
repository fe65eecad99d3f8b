"""R29: ALiBi slopes were worked out from a rank's own head count, wrong on all ranks but the first.

Slopes are an input, one a query head, so a rank passes its slice of the model's.
"""

import math

import pytest
import torch

import pageant
from pageant import Layer
from tests.inputs import BOUNDS, Case, assert_close, build
from tests.reports.scene import each_dtype, each_kernel, each_phase, scene


@each_kernel
@each_phase
@each_dtype
def test_the_example(kernels, phase, dtype):
    """Slope ln 2 over three keys: weights 1/7, 2/7 and 4/7."""
    layer = Layer(alibi_slopes=torch.full((2,), math.log(2)))
    step = scene(
        kernels,
        phase,
        [1],
        [3],
        layers=[layer],
        dtype=dtype,
        values=lambda n: torch.tensor([0.0, 0.0, 7.0, 0.0][:n]),
    )
    out, lse = step.run(None, layer)
    assert_close(out, torch.full((1, 2, 16), 4.0), BOUNDS[dtype])
    want = torch.full((1, 2), math.log(7 / 4))
    torch.testing.assert_close(lse, want, rtol=1e-5, atol=1e-6)


@each_kernel
@each_phase
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [None, 5])
def test_ranks_with_their_slices_equal_the_whole(kernels, phase, ranks, window):
    heads, kv_heads = 8, 4
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(heads)])
    whole = Layer(alibi_slopes=slopes, window=window)
    step = scene(kernels, phase, [1, 3], [9, 14], heads=(heads, kv_heads), layers=[whole])
    q = torch.randn(4, heads, 16, generator=torch.Generator().manual_seed(2))
    want, want_lse = step.run(q, whole)
    for rank in range(ranks):
        mine = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        kv = slice(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks)
        layer = Layer(alibi_slopes=slopes[mine], window=window)
        part = scene(
            kernels,
            phase,
            [1, 3],
            [9, 14],
            heads=(heads // ranks, kv_heads // ranks),
            layers=[layer],
        )
        part.cache.k[:], part.cache.v[:] = step.cache.k[:, :, kv], step.cache.v[:, :, kv]
        out, lse = part.run(q[:, mine], layer)
        assert_close(out, want[:, mine], 1e-5)
        assert_close(lse, want_lse[:, mine], 1e-5)


@each_kernel
@each_dtype
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("drafts", [None, "parents"])
@pytest.mark.parametrize("speculative", [0, 5])
def test_with_everything_else(kernels, dtype, causal, drafts, speculative):
    case = Case(
        seed=5,
        dtype=dtype,
        group=6,
        format="fp8_e4m3",
        page_size=5,
        lengths=((1, 30), (6, 23), (2, 2), (5, 3)),
        causal=causal,
        drafts=drafts,
        alibi=True,
        sinks=True,
        soft_cap=2.0,
        window=11,
        speculative=speculative,
        splits=2,
    )
    build(case, kernels).check()


@each_kernel
def test_strided_slopes(kernels):
    """Every other entry of a longer tensor."""
    slopes = torch.tensor([0.5, 9.0, 0.25, 9.0])[::2]
    layer = Layer(alibi_slopes=slopes, sinks=slopes)
    step = scene(kernels, "decode", [1], [5], layers=[layer])
    plain = Layer(alibi_slopes=slopes.contiguous(), sinks=slopes.contiguous())
    for got, want in zip(step.run(None, layer), step.run(None, plain), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "slopes",
    [torch.ones(1), torch.ones(3), torch.ones(2, 1), torch.ones(2).double(), [0.5, 0.25]],
)
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_one_float32_a_query_head(slopes, name):
    step = scene("auto", "decode", [1], [5], layers=[Layer(**{name: torch.ones(2)})])
    with pytest.raises(pageant.ArgumentError) as caught:
        step.run(None, Layer(**{name: slopes}))
    assert caught.value.argument == f"layer.{name}"
