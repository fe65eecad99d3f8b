"""Flat lists of pages: what a loop over the requests would write, and nothing more."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant.kernels.cpu import page_indices as cpu
from pageant.kernels.triton import page_indices as fast

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNTOUCHED = -77


def by_hand(lens, table, page_size):
    indptr, indices, last = [0], [], []
    for size, row in zip(lens, table, strict=True):
        count = -(-size // page_size)
        indices += row[:count]
        indptr.append(len(indices))
        last.append(size - (count - 1) * page_size if count else 0)
    return indptr, indices, last


def run(module, lens, table, page_size, device):
    table = (
        torch.tensor(table, dtype=torch.int32)
        .reshape(len(lens), len(table[0]) if table else 0)
        .to(device)
    )
    sizes = (len(lens) + 1, table.numel() + 2, len(lens))
    out = tuple(torch.full((n,), UNTOUCHED, dtype=torch.int32, device=device) for n in sizes)
    lens = torch.tensor(lens, dtype=torch.int32, device=device)
    module.page_indices(lens, table, page_size, out)
    return tuple(x.tolist() for x in out)


def check(lens, table, page_size):
    indptr, indices, last = by_hand(lens, table, page_size)
    room = sum(map(len, table)) + 2
    want = (indptr, indices + [UNTOUCHED] * (room - len(indices)), last)
    assert run(cpu, lens, table, page_size, torch.device("cpu")) == want
    assert run(fast, lens, table, page_size, DEVICE) == want


@pytest.mark.parametrize(
    ("lens", "table", "page_size"),
    [
        ([6, 4], [[7, -5], [5, -1]], 4),
        ([0, 0], [[0], [0]], 1),
        ([3, 0, 9], [[0, 0, 9], [1, 2, 3], [2, 1, 0]], 3),
        ([], [], 16),
        ([0, 0], [[], []], 16),
        ([1], [[4]], 131072),
    ],
)
def test_by_hand(lens, table, page_size):
    check(lens, table, page_size)


def test_more_than_a_program_takes(monkeypatch):
    monkeypatch.setattr(fast, "COLUMNS", 4)
    lens = [(7 * i) % 23 for i in range(13)]
    check(lens, [list(range(100 * i, 100 * i + 11)) for i in range(13)], 2)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_anything_goes(page_size, width, data):
    lens = data.draw(st.lists(st.integers(0, width * page_size), max_size=8))
    ids = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=width, max_size=width)
    check(lens, [data.draw(ids) for _ in lens], page_size)


def test_tensors_of_any_strides():
    table = torch.arange(24, dtype=torch.int32).view(6, 4).T[::2].to(DEVICE)  # [2, 6]
    lens = torch.tensor([5, 99, 12, 99], dtype=torch.int32, device=DEVICE)[::2]
    out = tuple(
        torch.full((2 * n,), UNTOUCHED, dtype=torch.int32, device=DEVICE) for n in (3, 12, 2)
    )
    fast.page_indices(lens, table, 2, tuple(x[::2] for x in out))
    assert [x[::2].tolist() for x in out] == [
        [0, 3, 9],
        [0, 4, 8, 2, 6, 10, 14, 18, 22, *[UNTOUCHED] * 3],
        [1, 2],
    ]
    assert all((x[1::2] == UNTOUCHED).all() for x in out)


def test_lengths_the_host_cannot_see_stay_within_the_table():
    lens, table = [-7, 2**31 - 1, 1], [[1, 2], [3, 4], [5, 6]]
    assert run(fast, lens, table, 4, DEVICE)[0] == [0, 0, 2, 3]
    assert run(fast, lens, table, 4, DEVICE)[2] == [0, 4, 1]
