"""R4: windows were one token off between backends, and causal masks hung from the wrong corner.

A window of W is the row's own key and the W - 1 before it; the last row sees the last key.
"""

import pytest
import torch

from pageant import Layer
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

WINDOWS = (None, 1, 2, 3, 7, 16, 17, 128, 1000)


@each_kernel
@each_phase
@each_dtype
def test_the_examples(kernels, phase, dtype):
    layer = Layer(window=3)
    step = scene(kernels, phase, [2], [6], layers=[layer], dtype=dtype)
    assert_means(step.means(layer), [3.0, 4.0])
    assert_means(scene(kernels, phase, [2], [5], dtype=dtype).means(), [1.5, 2.0])


@each_kernel
@each_phase
def test_decode_reads_the_window_only(kernels, phase):
    """256 keys, window 128: keys 128 to 255, and nothing else even if all else is NaN."""
    layer = Layer(window=128)
    step = scene(kernels, phase, [1], [256], layers=[layer])
    row = step.batch.page_table[-1]
    step.cache.k[row[:32].long()] = torch.nan
    step.cache.v[row[:32].long()] = torch.nan
    row[:32] = -7
    out, lse = step.run(None, layer)
    assert_means(out[:, 0, 0], [(128 + 255) / 2])
    torch.testing.assert_close(lse.exp(), torch.full((1, 2), 128.0), rtol=1e-5, atol=0)


@each_kernel
@each_phase
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("splits", [None, 2])
def test_every_row_sees_its_own_keys(kernels, phase, window, causal, splits):
    layer = Layer(window=window)
    lengths = [(1, 1), (1, 17), (3, 3), (4, 130), (2, 16), (5, 2)]
    step = scene(
        kernels,
        phase,
        [m for m, _ in lengths],
        [n for _, n in lengths],
        layers=[layer],
        features={"non_causal": True},
        options={"debug_splits": splits},
        causal=causal,
    )
    want = []
    for m, n in lengths:
        for position in range(n - m, n):
            first = 0 if window is None else max(0, position - window + 1)
            keys = range(first, position + 1 if causal else n)
            want.append(sum(keys) / len(keys) if keys else 0.0)
    assert_means(step.means(layer), want)


@each_kernel
def test_window_across_tiles_of_a_long_prefill(kernels):
    layer = Layer(window=5)
    step = scene(kernels, "prefill", [200], [230], layers=[layer])
    assert_means(step.means(layer), [p - 2.0 for p in range(30, 230)])
