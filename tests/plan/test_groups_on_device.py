"""Groups found by kernels: as by their plain definition, whatever the tables hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from triton import language as tl

from pageant.plan import groups_on_device as module
from pageant.plan.groups_on_device import Grouping, choose_depths, find_leaders, lay_out

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4
MOST_KEYS = 96
GROUPING = Grouping.of(page_size=PAGE, least=8, max_len=MOST_KEYS, block=8)
THRESHOLD = 3
ROOM_REQUESTS = 2  # more than a batch has


@dataclass(frozen=True)
class Step:
    """Lengths (new tokens, keys) and tables of a batch."""

    lengths: tuple[tuple[int, int], ...]
    table: Any
    windows: tuple[int, ...] = (0,)
    grouping: Grouping = GROUPING


def found(step: Step) -> list[dict[str, list[int]]]:
    """What the kernels write, for each window."""
    count, windows = len(step.lengths), len(step.windows)
    capacity = count + ROOM_REQUESTS
    room = capacity * THRESHOLD

    def new(*size: int) -> torch.Tensor:
        return torch.full(size, -777, dtype=torch.int32, device=DEVICE)

    def given_(values: Any) -> torch.Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32, device=DEVICE)

    query_lens = [m for m, _ in step.lengths]
    starts = given_(np.concatenate([[0], np.cumsum(query_lens)]))
    table = given_(step.table)
    lengths = (starts, given_([n for _, n in step.lengths]))
    tables = (*lengths, table, table.stride(0), table.shape[1])
    bounds = (count, sum(query_lens), step.grouping.most)
    rule = (*tables, *bounds, given_(step.windows), THRESHOLD)
    depths, leaders, commons = (new(windows, capacity) for _ in range(3))
    groups = (new(windows, capacity + 1), *(new(windows, capacity) for _ in range(3)))
    rows = (new(windows, room), new(windows, room))
    grid = (count, windows)
    choose_depths[grid](*rule, depths, capacity, step.grouping)
    find_leaders[grid](*rule, depths, leaders, commons, capacity, step.grouping)
    lay_out[grid](*lengths, *bounds, leaders, commons, groups, rows, capacity, room, step.grouping)
    names = ("starts", "lens", "skips", "shifts", "tokens", "positions")
    written = dict(zip(names, (*groups, *rows), strict=True))
    return [{name: x[w].tolist() for name, x in written.items()} for w in range(windows)]


def expected(step: Step, window: int) -> dict[int, tuple[list[int], int]]:
    """By the definition: each group's members and shared keys, by its leader."""
    g, table = step.grouping, step.table
    width = len(table[0]) if len(table) else 0
    cached = []
    for m, n in step.lengths:
        can = 0 < m <= THRESHOLD and not 0 < window < n
        cached.append(min(max(n - m, 0), width * g.page_size) if can else 0)

    def page(request: int, depth: int) -> int:
        return int(table[request][(depth - 1) // g.page_size])

    def kin(request: int, depth: int) -> list[int]:
        others = range(len(cached))
        return [o for o in others if cached[o] >= depth and page(o, depth) == page(request, depth)]

    depths = []
    for request in range(len(cached)):
        best = (0, 0)
        for depth in (g.least * q << k for k in range(9) for q in (4, 5, 6, 7)):
            depth //= 4
            if depth <= g.most and cached[request] >= depth:
                saved = depth - depth // len(kin(request, depth))
                best = max(best, (saved, -depth))
        depths.append(-best[1] if best[0] else 0)

    def common(one: int, two: int) -> int:
        most = min(cached[one], cached[two])
        keys = range(most)
        return next(
            (j // g.page_size * g.page_size for j in keys if page(one, j + 1) != page(two, j + 1)),
            most,
        )

    groups: dict[int, list[int]] = {}
    for request, depth in enumerate(depths):
        if depth:
            alike = [o for o in kin(request, depth) if depths[o] == depth]
            if len(alike) > 1 and common(alike[0], request) >= depth:
                groups.setdefault(alike[0], []).append(request)
    return {
        leader: (members, min(common(leader, o) for o in members) // g.block * g.block)
        for leader, members in groups.items()
    }


def compare(step: Step) -> int:
    """See that the kernels follow the definition; returns how many groups there are."""
    count, most = len(step.lengths), 0
    starts = np.concatenate([[0], np.cumsum([m for m, _ in step.lengths])]).tolist()
    for window, got in zip(step.windows, found(step), strict=True):
        groups = expected(step, window)
        most = max(most, len(groups))
        tokens, positions = [], []
        lens, skips, first = [0] * count, [0] * count, [0]
        for leader in range(count):
            members, keys = groups.get(leader, ([], 0))
            for member in members:
                m, n = step.lengths[member]
                skips[member] = keys
                assert got["shifts"][member] == len(tokens) - starts[member]
                tokens += range(starts[member], starts[member] + m)
                positions += range(n - m, n)
            lens[leader] = keys
            first.append(len(tokens))
        assert got["lens"][:count] == lens
        assert got["skips"][:count] == skips
        assert got["starts"][: count + 1] == first
        assert got["tokens"][: len(tokens)] == tokens
        assert got["positions"][: len(tokens)] == positions
        assert set(got["tokens"][len(tokens) :]) <= {-777}
        assert set(got["lens"][count:]) == {-777}
    return most


def tables(*rows: list[int], width: int = 24) -> Any:
    """Rows of pages; what a row does not name is its own."""
    return [
        row + [1000 * (r + 1) + i for i in range(width - len(row))] for r, row in enumerate(rows)
    ]


A, B, C = list(range(100, 124)), list(range(200, 224)), list(range(300, 324))
WORKED = {
    "a group beside a stranger": (
        [(1, 40), (1, 41), (1, 50)],
        tables(A[:8], A[:8], B),
        {0: ([0, 1], 32)},
    ),
    "not neighbours, led by the first": (
        [(1, 40), (2, 43), (1, 50), (1, 40)],
        tables(B[:4], A[:8], [], A[:8]),
        {1: ([1, 3], 32)},
    ),
    "two groups": (
        [(1, 40), (1, 40), (1, 40), (1, 40)],
        tables(B[:8], A[:4], A[:4], B[:8]),
        {0: ([0, 3], 32), 1: ([1, 2], 16)},
    ),
    "one that has a little less in common takes part": (
        [(1, 90)] * 3,
        tables(A[:22], A[:22], A[:20]),
        {0: ([0, 1, 2], 80)},
    ),
    "one that has much less stays out": (
        [(1, 90)] * 3,
        tables(A[:10], A[:22], A[:22]),
        {1: ([1, 2], 88)},
    ),
    "of nested groups that which saves most: the inner": (
        [(1, 80)] * 4,
        tables(A[:2] + B[:16], A[:2] + B[:16], A[:2] + C[:16], A[:2] + C[:16]),
        {0: ([0, 1], 72), 2: ([2, 3], 72)},
    ),
    "of nested groups that which saves most: the outer": (
        [(1, 80)] * 6,
        tables(A[:11] + B[:3], A[:11] + B[:3], *[A[:11]] * 4),
        {0: ([0, 1, 2, 3, 4, 5], 40)},
    ),
    "the first key of its own ends what is shared": (
        [(3, 34), (3, 35)],
        tables(A, A),
        {0: ([0, 1], 24)},
    ),
    "as far as the last key before": ([(1, 33), (1, 33)], tables(A, A), {0: ([0, 1], 32)}),
    "less than the least": ([(1, 8), (1, 8)], tables(A, A), {}),
    "no decodes": ([(4, 40), (4, 40), (0, 40)], tables(A, A, A), {}),
    "a decode beside prefills": ([(4, 40), (1, 40), (2, 41)], tables(A, A, A), {1: ([1, 2], 32)}),
    "the same pages elsewhere": ([(1, 40), (1, 40)], tables(A[:4], [7, *A[:4]]), {}),
    "the same after a difference: led by none, so alone": (
        [(1, 90), (1, 90)],
        tables(A, [7, *A[1:]]),
        {0: ([0], 88)},
    ),
    "after a difference in one of three": (
        [(1, 90)] * 3,
        tables(A, A[:20] + B[20:], [7, *A[1:]]),
        {0: ([0, 1], 80)},
    ),
    "keys beyond the table": ([(1, 90), (1, 90)], tables(A[:4], A[:4], width=4), {0: ([0, 1], 16)}),
    "no keys": ([(1, 0), (1, 1)], tables(A, A), {}),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name):
    lengths, table, want = WORKED[name]
    step = Step(tuple(lengths), table)
    assert expected(step, 0) == want
    compare(step)


def test_windows_that_hide_the_first_key():
    """Of three, one sees it within 40 keys, and two within 41."""
    step = Step(((1, 41), (1, 40), (1, 41)), tables(A, A, A), windows=(39, 40, 41, 0))
    groups = [expected(step, window) for window in step.windows]
    assert [len(group) for group in groups] == [0, 0, 1, 1]
    compare(step)


def test_more_requests_than_are_looked_at_together(monkeypatch):
    """The first and the last share, and all between in pairs."""
    pairs = 149
    if DEVICE.type == "cpu":  # interpreted: kernels may be changed, and take their time
        monkeypatch.setattr(module, "MANY", tl.constexpr(4))
        monkeypatch.setattr(module, "FEW", tl.constexpr(2))
        pairs = 5
    rows = [[7 + i // 2] * 5 for i in range(2 * pairs)]
    table = tables(B[:8], *rows, B[:8], width=9)
    step = Step(((1, 34),) * len(table), table)
    assert len(expected(step, 0)) == pairs + 1
    compare(step)


def test_tables_longer_than_are_compared_at_once():
    """Of 1,500 pages of one token, number 1,402 differs, or the first."""
    grouping = Grouping.of(page_size=1, least=512, max_len=1600, block=4)
    pages = list(range(1500))
    table = [pages, [*pages[:1402], 9999, *pages[1403:]], [3333, *pages[1:]]]
    lengths = ((1, 1500), (1, 1501), (1, 1501))
    step = Step(lengths, table, grouping=grouping)
    assert expected(step, 0) == {0: ([0, 1], 1400)}
    compare(step)


@st.composite
def steps(draw: Any) -> Step:
    """Rows that begin with a part of an earlier row; now and then one page differs."""
    count = draw(st.integers(1, 7))
    width = draw(st.integers(1, 24))
    rows: list[list[int]] = []
    for request in range(count):
        row = [1000 * (request + 1) + i for i in range(width)]
        if rows and draw(st.integers(0, 3)):
            common = draw(st.integers(0, width))
            row[:common] = rows[draw(st.integers(0, request - 1))][:common]
        if draw(st.integers(0, 7)) == 0:
            row[draw(st.integers(0, width - 1))] = -5
        rows.append(row)
    lengths = tuple(
        (
            draw(st.sampled_from((0, 1, 1, 1, 2, 3, 4))),
            draw(st.one_of(st.integers(0, MOST_KEYS), st.integers(60, MOST_KEYS))),
        )
        for _ in range(count)
    )
    windows = draw(st.sampled_from(((0,), (0, 70), (50, 0))))
    block = draw(st.sampled_from((1, 4, 8)))
    page_size = draw(st.sampled_from((1, 3, 4, 7)))
    grouping = Grouping.of(page_size, least=8, max_len=MOST_KEYS, block=block)
    return Step(lengths, rows, windows, grouping)


@settings(max_examples=150)
@given(steps())
def test_as_by_definition(step: Step):
    event(f"groups: {compare(step)}")
