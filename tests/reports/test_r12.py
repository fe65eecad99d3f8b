"""R12: head sizes outside a short list were refused, crashed, or were silently wrong.

Every multiple of 8 from 16 to 512 works, for one and for several new tokens; others are refused.
"""

import pytest
import torch

import pageant
from tests.inputs import Case, build

SIZES = (16, 24, 40, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 512)


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize(
    ("kernels", "dtype", "format"),
    [
        ("reference", torch.float32, "fp8_e4m3"),
        ("auto", torch.float32, "fp8_e4m3"),
        ("auto", torch.bfloat16, "bf16"),
    ],
)
def test_every_head_size(kernels, dim, dtype, format):
    for lengths, speculative in (((1, 37), (7, 20)), 6), (((7, 33), (1, 18)), 0):
        case = Case(
            seed=dim,
            dtype=dtype,
            head_dim=dim,
            v_head_dim=dim,
            format=format,
            page_size=16,
            lengths=lengths,
            window=30,
            scales=True,
            speculative=speculative,
        )
        build(case, kernels).check()


@pytest.mark.parametrize("dim", [-64, 0, 8, 15, 17, 20, 36, 127, 513, 520, 1024, 64.0, True, "64"])
@pytest.mark.parametrize("which", ["head_dim", "v_head_dim"])
def test_other_sizes_are_refused(dim, which):
    sizes = {"head_dim": 64, "v_head_dim": 64, which: dim}
    with pytest.raises(pageant.ArgumentError) as caught:
        pageant.Attention(pageant.Shape(num_q_heads=2, num_kv_heads=1, **sizes))
    assert caught.value.argument == "head_dim"
    assert repr(dim) in str(caught.value)
