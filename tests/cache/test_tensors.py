"""Which tensors are taken, and which share memory: against elements counted one by one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant.cache.tensors import (
    check_tensor,
    overlaps_itself,
    rows_meet,
    same_memory,
    span,
    spans_meet,
)
from pageant.types import ArgumentError

MEMORY = torch.zeros(400)


@st.composite
def views(draw):
    """A tensor [m, n, D] somewhere in MEMORY, mostly of unit content stride."""
    sizes = draw(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)))
    strides = draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    content = draw(st.sampled_from([1, 1, 1, 0, 2, 5]))
    return MEMORY.as_strided(sizes, (*strides, content), draw(st.integers(0, 40)))


def elements(x):
    """Offset in MEMORY of every element."""
    sizes, strides = x.shape, x.stride()
    grid = np.indices(sizes).reshape(3, -1)
    return x.storage_offset() + sum(i * step for i, step in zip(grid, strides, strict=True))


@given(a=views(), b=views())
def test_shared_elements(a, b):
    mine, theirs = (np.atleast_1d(elements(x)) for x in (a, b))
    assert rows_meet(a, b) == bool(set(mine.tolist()) & set(theirs.tolist()))
    if rows_meet(a, b):
        assert spans_meet(a, b)


@given(x=views())
def test_elements_that_are_one(x):
    found = np.atleast_1d(elements(x)).tolist() if x.numel() else []
    assert overlaps_itself(x) == (len(set(found)) < len(found))
    if found:
        start = MEMORY.data_ptr()
        assert span(x) == (start + 4 * min(found), start + 4 * (max(found) + 1))


@given(a=views(), b=views())
def test_same_memory(a, b):
    fits = a.shape[1:] == b.shape[1:]
    if same_memory(a, b):
        assert fits
        both = min(len(a), len(b))
        assert np.array_equal(elements(a[:both]), elements(b[:both]))
    assert same_memory(a, a)


def test_memory_that_is_shared_across_storages():
    array = np.zeros((4, 8), np.float32)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[2:])
    assert rows_meet(whole, part)
    assert not rows_meet(whole[:2], part)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (None, "x is None; allowed: a tensor of torch.float32"),
        ([1.0], "x is [1.0]; allowed: a tensor of torch.float32"),
        (list(range(99)), "x is 'a list'; allowed: a tensor of torch.float32"),
        (np.zeros((50, 50)), "x is 'a ndarray'; allowed: a tensor of torch.float32"),
        (torch.zeros(2, 3).to_sparse(), "x is torch.sparse_coo; allowed: a strided tensor"),
        (
            torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
            "x is 'nested'; allowed: a strided tensor",
        ),
        (torch.zeros(2, 3).half(), "x is torch.float16; allowed: torch.float32"),
        (torch.zeros(2), "x is 'a tensor of shape [2]'; allowed: one of 2 dimensions"),
        (torch.zeros(2, 3, device="meta"), "x is 'meta'; allowed: a tensor on cpu"),
        (torch.zeros(2, 3).requires_grad_(), "requires grad"),
    ],
)
def test_values_that_are_no_such_tensor(x, said):
    with pytest.raises(ArgumentError) as caught:
        check_tensor("x", x, (torch.float32,), dims=2, device=torch.device("cpu"))
    assert caught.value.argument == "x"
    assert said in str(caught.value)
    check_tensor("x", torch.zeros(2, 3), (torch.float32,), dims=2, device=torch.device("cpu"))
