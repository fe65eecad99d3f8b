"""Merging: the formula, the empty parts, and what is kept bit for bit."""

from __future__ import annotations

import pytest
import torch

from pageant.kernels import reference
from pageant.kernels.merge import merge_states
from pageant.types import ArgumentError
from tests.inputs import BOUNDS, assert_close

NOTHING = -torch.inf


def parts(
    count: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random states [5, 3, 8], as views that are not contiguous."""
    rng = torch.Generator().manual_seed(count)
    outs = []
    for _ in range(count):
        outs.append(torch.randn(3, 5, 9, generator=rng).to(dtype).transpose(0, 1)[..., 1:])
    return outs, [3 * torch.randn(3, 5, generator=rng).T + 5 for _ in range(count)]


@pytest.mark.parametrize("sinks", [None, torch.tensor([-50.0, 0.0, 3.0])], ids=["", "sinks"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_equals_reference(dtype: torch.dtype, count: int, sinks: torch.Tensor | None) -> None:
    outs, lses = parts(count, dtype)
    lses[0][0, 0], lses[-1][1, 1] = NOTHING, torch.inf
    out, lse = merge_states(outs, lses, sinks)
    want_out, want_lse = reference.merge_states(outs, lses, sinks)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(out, want_out, BOUNDS[dtype])
    assert_close(lse, want_lse, 1e-6)


@pytest.mark.parametrize("empty", [NOTHING, torch.inf])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_part_changes_no_bit(empty: float, first: bool) -> None:
    (state, garbage), (lse, other) = parts(2)
    state[0], lse[0] = -0.0, -0.0
    garbage[:] = torch.nan
    other[:] = empty
    order = slice(None, None, 1 if first else -1)
    got, got_lse = merge_states([state, garbage][order], [lse, other][order])
    assert torch.equal(got.contiguous().view(torch.int32), state.contiguous().view(torch.int32))
    assert torch.equal(got_lse.view(torch.int32), lse.contiguous().view(torch.int32))


@pytest.mark.parametrize("level", [1e3, 1e5, 1e30, -1e30])
def test_weights_are_whole_whatever_the_level(level: float) -> None:
    """Of parts that are all ones, any average is ones."""
    outs = [torch.ones(2, 3, 8) for _ in range(2)]
    lses = [torch.full((2, 3), level), torch.full((2, 3), level) + 3]
    got, _ = merge_states(outs, lses)
    assert (got - 1).abs().max() <= 1e-6


def test_nothing_at_all_is_zero() -> None:
    outs, lses = parts(2)
    outs[0][:] = torch.nan
    for lse in lses:
        lse[:] = NOTHING
    for sinks in (None, torch.zeros(3), torch.full((3,), NOTHING)):
        out, lse = merge_states(outs, lses, sinks)
        assert (out == 0).all()
        assert not out.signbit().any()
        assert (lse == NOTHING).all()


def test_inputs_may_be_the_output() -> None:
    outs, lses = parts(3)
    want, _ = merge_states(outs, lses)
    got, _ = merge_states(outs, lses, out=outs[1])
    assert got.data_ptr() == outs[1].data_ptr()
    assert torch.equal(got, want)


def test_splitting_further_changes_little() -> None:
    outs, lses = parts(4)
    whole, whole_lse = merge_states(outs, lses)
    left, right = merge_states(outs[:2], lses[:2]), merge_states(outs[2:], lses[2:])
    out, lse = merge_states([left[0], right[0]], [left[1], right[1]])
    assert_close(out, whole, 1e-6)
    assert_close(lse, whole_lse, 1e-6)


def test_parts_that_do_not_fit_are_named() -> None:
    (a, b), (s, t) = parts(2)
    for arguments, name in (
        (([], []), "outs"),
        (([a, b], [s]), "lses"),
        (([a, b[:4]], [s, t]), "outs[1]"),
        (([a, b], [s, t[:, :2]]), "lses[1]"),
        (([a[0]], [s]), "outs[0]"),
        (([a], [s], torch.zeros(2)), "sinks"),
        (([a], [s], None, b[1:]), "out"),
    ):
        with pytest.raises(ArgumentError) as caught:
            merge_states(*arguments)
        assert caught.value.argument == name
