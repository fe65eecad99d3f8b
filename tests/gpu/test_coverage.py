"""R28: whatever this GPU is, each configuration is served right, or refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pageant
from pageant.cache.formats import FORMATS
from tests.inputs import BOUNDS, Case, assert_close, build

pytestmark = pytest.mark.gpu


FEW = ("fp32", "bf16", "fp8_e5m2", "nvfp4")  # each compiles kernels of its own


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float16, format) for format in FORMATS]
    + [(dtype, format) for dtype in (torch.float32, torch.bfloat16) for format in FEW],
    ids=str,
)
def test_served_or_refused(dtype, format):
    problem = build(
        Case(
            seed=28,
            dtype=dtype,
            group=3,
            head_dim=64,
            v_head_dim=64,
            format=format,
            page_size=16,
            lengths=((1, 300), (3, 20), (9, 133)),
            window=30,
            soft_cap=2.0,
            alibi=True,
            sinks=True,
            speculative=2,
        )
    )
    attn = problem.attn
    own = replace(attn.options, kernels="pageant")
    verdict = pageant.supports(attn.shape, attn.cache, attn.features, own, "cuda")
    assert verdict.ok == (verdict.reason is None) == (verdict.argument is None)
    there = problem.on("cuda")
    if verdict.ok:
        assert {row.owner for row in there.attn.explain().rows.values()} == {"pageant"}
    out, lse = there.run()
    assert_close(out, problem.expected_out, BOUNDS[dtype])
    assert_close(lse, problem.expected_lse, BOUNDS[dtype])


def test_own_kernels_serve_some_of_it():
    shape = pageant.Shape(num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.float16)
    own = pageant.Options(kernels="pageant")
    assert pageant.supports(shape, options=own, device="cuda"), "float16 runs everywhere"
