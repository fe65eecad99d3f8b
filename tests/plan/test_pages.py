"""Pages of a plan: ids some row can see are checked, all others may hold anything."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant.plan.pages import PageUse, page_use, write_index
from pageant.types import ArgumentError

JUNK = -(2**31)


@st.composite
def tables(draw):
    """Lengths, and a table that holds ids where they are needed and junk elsewhere."""
    page = draw(st.integers(1, 6))
    window = draw(st.one_of(st.none(), st.integers(1, 20)))
    count = draw(st.integers(0, 5))
    rows = np.array([draw(st.integers(0, 4)) for _ in range(count)], dtype=np.int64)
    lens = np.array([draw(st.integers(0, 30)) for _ in range(count)], dtype=np.int64)
    width = draw(st.integers(-(-int(lens.max(initial=0)) // page), 32))
    table = np.full((count, width), JUNK)
    needed = {}
    for r, (m, n) in enumerate(zip(rows, lens, strict=True)):
        for row in range(m):
            position = n - m + row
            first = 0 if window is None else max(0, position - window + 1)
            for key in range(first, n):
                needed.setdefault((r, key // page), draw(st.integers(0, 99)))
    for at, page_id in needed.items():
        table[at] = page_id
    return page, window, rows, lens, table, needed


@given(tables(), st.data())
def test_only_needed_ids_are_read(case, data):
    page, window, rows, lens, table, needed = case
    use = page_use(table, rows, lens, page, window)
    assert use.largest == max(needed.values(), default=-1)
    if not needed:
        assert use == PageUse()
        return
    assert use.largest in table[use.request]
    at = data.draw(st.sampled_from(sorted(needed)))
    table[at] = -3
    with pytest.raises(ArgumentError, match="page ids from 0 up") as caught:
        page_use(table, rows, lens, page, window)
    assert caught.value.argument == f"batch.page_table[{at[0]}, {at[1]}]"


def test_use_names_the_request():
    use = page_use(np.array([[1, 2], [9, 0]]), np.ones(2, int), np.array([8, 3]), 4, None)
    assert use == PageUse(largest=9, request=1)
    use.check(10)
    with pytest.raises(ArgumentError, match="9; allowed: page ids below 9") as caught:
        use.check(9)
    assert caught.value.argument == "batch.page_table[1]"
    PageUse().check(0)


@given(st.lists(st.integers(-5, 10**12), max_size=20), st.integers(1, 1000))
def test_write_index(slots, page):
    index = write_index(torch.tensor(slots, dtype=torch.int64), page)
    kept = [(token, slot) for token, slot in enumerate(slots) if slot >= 0]
    tokens = list(range(len(slots))) if index.tokens is None else index.tokens.tolist()
    assert tokens == [token for token, _ in kept]
    got = index.pages * page + index.rows
    assert got.tolist() == [slot for _, slot in kept]
    assert ((index.rows >= 0) & (index.rows < page)).all()
    assert index.num_tokens == len(slots)
    assert index.largest_slot == max((slot for _, slot in kept), default=-1)
