"""R1: merging two empty partial results, or a row that sees no key, gave NaN or a wrong number.

An empty state is exactly out 0 and lse -inf everywhere, and joins any other without changing a bit.
"""

import pytest
import torch

from pageant import ops
from pageant.kernels import reference
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

INF = torch.inf


def state(dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(5, 3, 16, generator=rng).to(dtype), torch.randn(5, 3, generator=rng)


def empty(dtype=torch.float32, lse=-INF, out=0.0):
    return torch.full((5, 3, 16), out, dtype=dtype), torch.full((5, 3), lse)


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_all_empty_stays_empty(dtype, parts):
    out, lse = ops.merge_states(*zip(*[empty(dtype)] * parts, strict=True))
    assert out.dtype == dtype
    assert (out == 0).all()
    assert (lse == -INF).all()


@each_dtype
@pytest.mark.parametrize("nothing", [-INF, INF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_empty_parts_change_no_bit(dtype, nothing, place):
    x, s = state(dtype)
    parts = [empty(dtype, nothing, out=torch.nan)] * 2
    parts.insert(place, (x, s))
    out, lse = ops.merge_states([o for o, _ in parts], [part for _, part in parts])
    assert torch.equal(out, x)
    assert torch.equal(lse, s)


def test_extreme_lse_is_not_mistaken_for_empty():
    x, _ = state()
    for s in (-1e4, -5e4, -3e38, 3e38):
        lse = torch.full((5, 3), s)
        out, joined = ops.merge_states([x, empty()[0]], [lse, empty()[1]])
        assert torch.equal(out, x)
        assert torch.equal(joined, lse)


def test_plus_infinity_is_read_as_empty():
    out, lse = ops.merge_states(*zip(empty(lse=INF, out=7.0), empty(lse=INF), strict=True))
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_rows_and_heads_are_empty_one_by_one():
    (x, s), (y, t) = state(seed=1), state(seed=2)
    s[0], t[1], s[2, 1], t[2, 1] = -INF, -INF, -INF, INF
    out, lse = ops.merge_states([x, y], [s, t])
    assert torch.equal(out[0], y[0])
    assert torch.equal(lse[0], t[0])
    assert torch.equal(out[1], x[1])
    assert torch.equal(lse[1], s[1])
    assert (out[2, 1] == 0).all()
    assert lse[2, 1] == -INF
    want_out, want_lse = reference.merge_states([x, y], [s, t])
    torch.testing.assert_close(out, want_out.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-5, atol=1e-6)


def test_sinks_leave_an_empty_state_empty():
    out, lse = ops.merge_states(*zip(empty(), empty(), strict=True), sinks=torch.zeros(3))
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_the_inputs_may_be_the_output():
    (x, s), (y, t) = state(seed=1), state(seed=2)
    want, _ = ops.merge_states([x, y], [s, t])
    for place in (0, 1):
        parts = [x.clone(), y.clone()]
        got, _ = ops.merge_states(parts, [s, t], out=parts[place])
        assert got.data_ptr() == parts[place].data_ptr()
        assert torch.equal(got, want)


def test_any_strides():
    (x, s), (y, t) = state(seed=1), state(seed=2)
    want = ops.merge_states([x, y], [s, t])
    scattered = torch.zeros(3, 5, 2, 16).transpose(0, 1)[:, :, 1]
    scattered.copy_(x)
    got = ops.merge_states([scattered, y], [s.t().contiguous().t(), t])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@each_kernel
@each_phase
@each_dtype
@pytest.mark.parametrize("splits", [None, 3])
def test_rows_before_the_first_key(kernels, phase, dtype, splits):
    """Causal, 3 new tokens, 1 key: only the last row sees it."""
    step = scene(
        kernels,
        phase,
        [3],
        [1],
        dtype=dtype,
        options={"debug_splits": splits},
        values=lambda n: torch.full((n,), 5.0),
    )
    out, lse = step.run(torch.ones(3, 2, 16, dtype=dtype))
    assert (out[:2] == 0).all()
    assert (lse[:2] == -INF).all()
    assert torch.isfinite(lse[2]).all()
    assert_means(out[2:, 0, 0], [5.0])
    assert (step.run()[1][2] == 0).all()


@each_kernel
@each_phase
def test_no_keys_at_all(kernels, phase):
    step = scene(kernels, phase, [1, 2, 1], [0, 0, 0])
    out, lse = step.run(torch.ones(4, 2, 16))
    assert out.shape == (4, 2, 16)
    assert (out == 0).all()
    assert (lse == -INF).all()
