"""Merging in one launch: the reference's answer, and what is kept bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant.kernels import reference
from pageant.kernels.triton import merge
from tests.inputs import BOUNDS, assert_close
from tests.kernels.cpu.test_merge import NOTHING, parts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def merged(outs, lses, sinks=None, out=None):
    """The kernel's state, on the CPU; `out` on the device, if it is given."""
    outs, lses = ([x.to(DEVICE) for x in given] for given in (outs, lses))
    if out is None:
        out = torch.full(outs[0].shape, torch.nan, dtype=outs[0].dtype, device=DEVICE)
    lse = torch.full(out.shape[:2], torch.nan, device=DEVICE)
    merge.merge_states(outs, lses, None if sinks is None else sinks.to(DEVICE), out, lse)
    return out.cpu(), lse.cpu()


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("sinks", [None, torch.tensor([-50.0, 0.0, 3.0])], ids=["", "sinks"])
@pytest.mark.parametrize("count", [1, 2, 5, merge.MOST_PARTS + 2])
@pytest.mark.parametrize("dtype", [*BOUNDS, torch.float64], ids=str)
def test_equals_reference(dtype, count, sinks):
    outs, lses = parts(count, dtype)
    lses[0][0, 0], lses[-1][1, 1] = NOTHING, torch.inf
    out, lse = merged(outs, lses, sinks)
    want_out, want_lse = reference.merge_states(outs, lses, sinks)
    assert out.dtype == dtype
    assert_close(out, want_out, BOUNDS.get(dtype, 1e-5))
    assert_close(lse, want_lse, 1e-6)


@pytest.mark.parametrize("empty", [NOTHING, torch.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("sinks", [None, torch.full((3,), NOTHING)], ids=["", "sinks"])
def test_empty_parts_change_no_bit(empty, place, sinks):
    (state, first, second), (lse, *others) = parts(3)
    state[0], lse[0], lse[1] = -0.0, -0.0, -88.0
    first[:], second[:] = torch.nan, torch.inf
    for other in others:
        other[:] = empty
    outs, lses = [first, second], list(others)
    outs.insert(place, state)
    lses.insert(place, lse)
    got, got_lse = merged(outs, lses, sinks)
    assert same_bits(got, state)
    assert same_bits(got_lse, lse)


def test_nothing_at_all_is_zero():
    outs, lses = parts(2)
    outs[0][:] = torch.nan
    for lse in lses:
        lse[:] = NOTHING
    for sinks in (None, torch.zeros(3), torch.full((3,), NOTHING)):
        out, lse = merged(outs, lses, sinks)
        assert same_bits(out, torch.zeros(5, 3, 8))
        assert (lse == NOTHING).all()


def test_a_part_far_below_counts_for_nothing():
    outs, _ = parts(3)
    lses = [torch.full((5, 3), size) for size in (-2e4, 3e4, -3e38)]
    out, lse = merged(outs, lses)
    assert same_bits(out, outs[1])
    assert same_bits(lse, lses[1])


@pytest.mark.parametrize("place", [0, 2])
def test_a_part_may_be_the_output(place):
    outs, lses = ([x.to(DEVICE) for x in given] for given in parts(3))
    want, _ = merged(outs, lses)
    got, _ = merged(outs, lses, out=outs[place])
    assert torch.equal(got, want)


def test_a_part_may_lie_across_the_output(monkeypatch):
    """Rows written over rows that other programs are still to read."""
    monkeypatch.setattr(merge, "PROGRAM", 8)
    outs, lses = parts(2)
    want, _ = merged(outs, lses)
    memory = torch.zeros(6, 3, 8, device=DEVICE)
    memory[:5] = outs[0]
    got, _ = merged([memory[:5], outs[1]], lses, out=memory[1:])
    assert torch.equal(got, want)


def test_rows_without_values_have_an_lse():
    outs, lses = parts(2)
    _, want = merged(outs, lses)
    _, lse = merged([x[..., :0] for x in outs], lses)
    assert torch.equal(lse, want)


@settings(max_examples=25)
@given(
    st.tuples(st.integers(1, 6), st.integers(0, 40), st.integers(1, 5), st.integers(1, 80)),
    st.booleans(),
    st.sampled_from((torch.float32, torch.float16)),
    st.sampled_from(("tokens", "heads", "apart", "one")),
    st.integers(0, 99),
)
def test_anything_goes(sizes, with_sinks, dtype, order, seed):
    count, tokens, heads, dim = sizes
    rng = torch.Generator().manual_seed(seed)

    def make(*shape):
        if order == "heads":
            return torch.randn(shape[::-1], generator=rng).permute(*range(len(shape))[::-1])
        if order == "apart":
            return torch.randn(*shape, 2, generator=rng)[..., 1]
        if order == "one":
            return torch.randn(shape[-1], generator=rng).expand(*shape)
        return torch.randn(*shape, generator=rng)

    outs = [make(tokens, heads, dim).to(dtype) for _ in range(count)]
    # Under sinks far above them rows become too small for float16 to hold to its usual precision.
    lses = [(make(tokens, heads) * 5).clamp(min=-6.0) for _ in range(count)]
    for lse in lses:
        lse[torch.rand(tokens, heads, generator=rng) < 0.3] = NOTHING
    sinks = torch.randn(heads, 2, generator=rng)[:, 0] if with_sinks else None
    out, lse = merged(outs, lses, sinks)
    want, want_lse = reference.merge_states(outs, lses, sinks)
    assert_close(out, want, 3 * BOUNDS[dtype])
    assert_close(lse, want_lse, 1e-5)
