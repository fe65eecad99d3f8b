"""R13: models with values narrower than keys crashed, ran slowly, or were wrong with fp8.

Keys and values have sizes of their own everywhere, and a token takes no more memory than both.
"""

import pytest
import torch

import pageant
from tests.inputs import Case, build


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (40, 24)])
@pytest.mark.parametrize(
    ("kernels", "dtype", "format"),
    [
        ("reference", torch.bfloat16, "fp8_e4m3"),
        ("auto", torch.float32, "fp8_e5m2"),
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.bfloat16, "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_two_sizes(kernels, dims, dtype, format, causal):
    for lengths, speculative in (((1, 21), (5, 33)), 0), (((1, 21), (5, 33)), 4):
        case = Case(
            seed=1,
            dtype=dtype,
            group=3,
            head_dim=dims[0],
            v_head_dim=dims[1],
            format=format,
            page_size=16,
            memory="LBNHC",
            lengths=lengths,
            causal=causal,
            scales=True,
            speculative=speculative,
        )
        problem = build(case, kernels)
        out, _ = problem.check()
        assert out.shape == (6, 6, dims[1])


@pytest.mark.parametrize(("format", "element"), [("bf16", 2), ("fp8_e4m3", 1), ("fp32", 4)])
def test_memory_is_keys_and_values(format, element):
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=192, v_head_dim=128),
        pageant.CacheSpec(format=format, page_size=16),
    )
    kv = attn.new_cache(num_layers=3, num_pages=5)
    assert kv.num_bytes == kv.storage.nbytes == 3 * 5 * 16 * 2 * (192 + 128) * element
