"""R22: parallel drafters attend without causality; a quantised cache then crashed or was wrong.

Non-causal rows see all n keys of their request and nothing past them, in every cache format; a
window still limits the left side.
"""

import math

import pytest
import torch

from pageant import ArgumentError, Layer
from tests.inputs import BOUNDS, Case, assert_close, build
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2")
each_format = pytest.mark.parametrize("format", FORMATS)
NON_CAUSAL = {"non_causal": True}


@each_kernel
@each_phase
@each_dtype
@each_format
def test_the_example(kernels, phase, dtype, format):
    """4 new tokens, 21 keys, pages of 16: ones average to one exactly, numbers to their mean."""
    config = {
        "cache": {"page_size": 16, "format": format},
        "features": NON_CAUSAL,
        "causal": False,
        "dtype": dtype,
    }
    out, lse = scene(kernels, phase, [4], [21], values=torch.ones, **config).run()
    assert_close(out, torch.ones_like(out), BOUNDS[dtype])
    assert_close(lse, torch.full((4, 2), math.log(21)), BOUNDS[dtype])
    few = scene(kernels, phase, [4], [21], values=lambda n: torch.arange(n) % 4, **config)
    assert_means(few.means(), [30 / 21] * 4)


@each_kernel
def test_ones_average_to_exactly_one(kernels):
    for phase in ("decode", "prefill"):
        step = scene(
            kernels,
            phase,
            [4],
            [21],
            cache={"page_size": 16, "format": "fp8_e4m3"},
            features=NON_CAUSAL,
            causal=False,
            dtype=torch.bfloat16,
            values=torch.ones,
        )
        assert (step.run()[0] == 1.0).all()


@each_kernel
@each_phase
@each_format
def test_a_window_limits_the_left_side_only(kernels, phase, format):
    layer = Layer(window=3)
    step = scene(
        kernels,
        phase,
        [4],
        [8],
        layers=[layer],
        cache={"format": format},
        features=NON_CAUSAL,
        causal=False,
        values=lambda n: torch.arange(n) % 4,
    )
    # Positions 4 to 7 see keys from 2, 3, 4 and 5 on; values are 0 1 2 3 0 1 2 3.
    assert_means(step.means(layer), [11 / 6, 9 / 5, 6 / 4, 6 / 3])


@each_kernel
@each_phase
@each_format
def test_each_request_its_own_way(kernels, phase, format):
    step = scene(
        kernels,
        phase,
        [2, 2, 1],
        [4, 4, 3],
        cache={"format": format},
        features=NON_CAUSAL,
        causal=torch.tensor([True, False, True]),
    )
    assert_means(step.means(), [1.0, 1.5, 1.5, 1.5, 1.0])


@each_kernel
@each_dtype
@each_format
@pytest.mark.parametrize("speculative", [0, 7])
def test_with_everything_else(kernels, dtype, format, speculative):
    case = Case(
        seed=6,
        dtype=dtype,
        head_dim=24,
        v_head_dim=16,
        format={torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        if format == "auto"
        else format,
        page_size=16,
        lengths=((4, 21), (1, 16), (8, 60), (0, 5)),
        causal=False,
        window=19,
        soft_cap=2.0,
        sinks=True,
        scales=True,
        speculative=speculative,
        splits=3,
    )
    build(case, kernels).check()


@each_kernel
@pytest.mark.parametrize("causal", [False, torch.tensor([False]), torch.tensor([True])])
def test_undeclared_is_refused(kernels, causal):
    step = scene(kernels, "decode", [4], [8], causal=causal)
    with pytest.raises(ArgumentError) as caught:
        step.run()
    assert caught.value.argument == "batch.causal"
