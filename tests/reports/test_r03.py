"""R3: one kernel's log-sum-exp was base 2 where the merge took base e: merged answers were off.

Every lse is a natural logarithm: parts merge to the whole.
"""

import math

import pytest
import torch

from pageant import ops
from tests.reports.scene import each_dtype, each_kernel, each_phase, scene


@each_kernel
@each_phase
@each_dtype
@pytest.mark.parametrize(
    ("keys", "lse"), [(1, 0.0), (2, 0.693147), (4, 1.386294), (300, math.log(300))]
)
def test_lse_counts_keys(kernels, phase, dtype, keys, lse):
    _, got = scene(kernels, phase, [1], [keys], dtype=dtype).run()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.full((1, 2), lse), rtol=1e-5, atol=1e-6)


@each_kernel
@each_phase
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_parts_merge_to_the_whole(kernels, phase, cut):
    """Four keys in two parts, attended apart without causality, then merged."""
    step = scene(kernels, phase, [1], [4], causal=False, features={"non_causal": True})
    q = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1))
    whole, whole_lse = step.run(q)
    page = step.batch.page_table[-1, 0]
    parts = []
    for rows in (slice(0, cut), slice(cut, 4)):
        k, v = step.cache.k[page, rows], step.cache.v[page, rows]
        starts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, len(k)]).int()
        parts.append(ops.ragged_attention(q, k, v, *starts, causal=False, return_lse=True))
    out, lse = ops.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    assert (out - whole).abs().max() < 1e-6 * 3
    assert (lse - whole_lse).abs().max() < 1e-6


@each_kernel
@each_phase
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_scaled_scores(kernels, phase, splits):
    """Scores 0 and ln 3: lse ln 4, weights 1/4 and 3/4, however keys are split."""
    step = scene(kernels, phase, [1], [2], options={"debug_splits": splits})
    page = step.batch.page_table[-1, 0]
    step.cache.k[page, 0], step.cache.k[page, 1] = 0.0, 1.0
    q = torch.full((1, 2, 16), math.log(3) / 16 * 16**0.5)
    out, lse = step.run(q)
    torch.testing.assert_close(lse, torch.full((1, 2), math.log(4)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out, torch.full((1, 2, 16), 0.75), rtol=1e-5, atol=1e-6)
