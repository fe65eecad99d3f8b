"""Which requests share which pages, from the tables; and that a wrong hint is noticed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageant.plan import prefix
from pageant.plan.prefix import LEVELS, RULES, Rule, check_hint, is_worth, shared_prefixes
from pageant.plan.shared import TILE_ROWS, parts_of, share
from pageant.plan.work import Lengths, WorkList, fill_decode
from pageant.types import ArgumentError

PAGE = 4


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "RULES", (Rule(members=2, tokens=1, because="a test"),))


def found(table, visible, page_size=PAGE):
    """Requests, first key and number of keys of each group."""
    groups = shared_prefixes(np.array(table), np.array(visible), page_size)
    return [(group.requests, group.first_key, group.num_keys) for group in groups]


WORKED = {
    "one group beside a stranger": (
        [[7, 8, 1], [7, 8, 2], [5, 3, 0]],
        [9, 12, 8],
        [((0, 1), 0, 8)],
    ),
    "not neighbours": ([[7, 1], [5, 2], [7, 3]], [8, 8, 8], [((0, 2), 0, 4)]),
    "two groups": ([[7, 1], [5, 2], [7, 3], [5, 4]], [8] * 4, [((0, 2), 0, 4), ((1, 3), 0, 4)]),
    "two levels": (
        [[7, 8, 1], [7, 8, 2], [7, 9, 3], [7, 9, 4]],
        [12] * 4,
        [((0, 1, 2, 3), 0, 4), ((0, 1), 4, 4), ((2, 3), 4, 4)],
    ),
    "a request that ends where the others part": (
        [[7, 8], [7, 8], [7, 0]],
        [8, 8, 4],
        [((0, 1, 2), 0, 4), ((0, 1), 4, 4)],
    ),
    "pages that are not full do not count": ([[7, 8], [7, 8]], [7, 8], [((0, 1), 0, 4)]),
    "no full page": ([[7], [7]], [3, 4], []),
    "the same page elsewhere": ([[1, 7], [7, 2]], [8, 8], []),
    "the same after a difference": ([[1, 7], [2, 7]], [8, 8], []),
    "one request": ([[7, 8]], [8], []),
    "no request": (np.zeros((0, 3), np.int32), [], []),
    "no keys": (np.zeros((3, 0), np.int32), [0, 0, 0], []),
    "nothing visible": ([[7], [7]], [-3, 0], []),
}


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name):
    table, visible, want = WORKED[name]
    assert found(table, np.array(visible, np.int64)) == want


@st.composite
def tables(draw):
    """Few different pages, so that much is shared."""
    count, width = draw(st.integers(0, 8)), draw(st.integers(0, 5))
    ids = st.integers(0, draw(st.integers(0, 2)))
    table = [[draw(ids) for _ in range(width)] for _ in range(count)]
    visible = [draw(st.integers(-2, width * PAGE)) for _ in range(count)]
    return np.array(table, np.int32).reshape(count, width), np.array(visible, np.int64)


def common(table, visible, requests):
    """Full pages that all these requests begin with."""
    most = max(0, min(int(visible[r]) // PAGE for r in requests))
    rows = [table[r, :most].tolist() for r in requests]
    return next(
        (i for i in range(most) if len({row[i] for row in rows}) > 1),
        most,
    )


def maximal(table, visible):
    """All sets of two and more that share pages no larger set shares, as far as they share them."""
    sets = {}
    for request in range(len(table)):
        for depth in range(1, max(0, int(visible[request]) // PAGE) + 1):
            start = table[request, :depth].tolist()
            kin = [
                r
                for r in range(len(table))
                if visible[r] // PAGE >= depth and table[r, :depth].tolist() == start
            ]
            if len(kin) > 1:
                sets[tuple(kin)] = common(table, visible, kin)
    return sets


@pytest.mark.usefixtures("_always")
@given(tables())
def test_as_by_brute_force(case):
    table, visible = case
    want = maximal(table, visible)
    groups = shared_prefixes(table, visible, PAGE)
    got = {group.requests: (group.first_key + group.num_keys) // PAGE for group in groups}
    # Nested sets deeper than LEVELS are left out, nothing else.
    deep = {kin for kin in want if sum(set(kin) <= set(other) for other in want) > LEVELS}
    assert got == {kin: depth for kin, depth in want.items() if kin not in deep}
    for group in groups:
        begin = group.first_key // PAGE
        around = [other for other in want if set(other) > set(group.requests)]
        assert group.level == len(around)
        assert begin == max((want[other] for other in around), default=0)
        for request in group.requests:
            pages = table[request, begin : begin + len(group.pages)].tolist()
            assert pages == list(group.pages)
    assert [group.level for group in groups] == sorted(group.level for group in groups)


def test_what_is_not_worth_it_at_one_level_counts_at_the_next():
    first = [[0, *range(10, 10 + 70)]] * 4
    second = [[0, *range(100, 100 + 70)]] * 4
    groups = found(np.array(first + second), [71 * 16] * 8, page_size=16)
    assert groups == [((0, 1, 2, 3), 0, 71 * 16), ((4, 5, 6, 7), 0, 71 * 16)]


def test_a_group_too_small_for_any_rule():
    table = np.tile(np.arange(200), (2, 1))
    assert found(table, [3200, 3200], page_size=16) == [((0, 1), 0, 3200)]
    assert found(table[:, :31], [500, 500], page_size=16) == []


def test_rules_ask_for_less_of_larger_groups():
    members = [rule.members for rule in RULES]
    tokens = [rule.tokens for rule in RULES]
    assert members == sorted(set(members))
    assert tokens == sorted(set(tokens), reverse=True)
    for rule in RULES:
        assert is_worth(rule.members, rule.tokens)
        assert not is_worth(rule.members, rule.tokens - 1)
        assert not is_worth(min(members) - 1, rule.tokens)
        assert rule.because


def test_nothing_shared_is_found_out_fast():
    table = np.arange(512 * 64).reshape(512, 64)
    visible = np.full(512, 64 * 16)
    started = time.perf_counter()
    for _ in range(20):
        assert shared_prefixes(table, visible, 16) == ()
    assert (time.perf_counter() - started) / 20 < 0.002


@pytest.mark.usefixtures("_always")
@given(tables(), st.data())
def test_every_key_of_every_row_is_computed_once(case, data):
    """Own items and shared parts cover each row's keys, each in a slot of its own."""
    table, visible = case
    count, slot_rows, workers = len(table), 3, 2
    rows = np.array([data.draw(st.integers(1, 3)) for _ in range(count)], np.int64)
    keys = np.maximum(visible, 0) + rows
    starts = np.concatenate([[0], np.cumsum(rows)])
    prefixes = shared_prefixes(table, visible, PAGE)
    if not prefixes:
        return
    own = WorkList.empty(count + workers, workers)
    shared_keys, parts = parts_of(prefixes, count)
    sees_all = np.zeros(count, np.bool_)
    fill_decode(own, Lengths(0, count, rows, keys, sees_all, shared_keys, parts), None)
    work = share(prefixes, starts, keys, own, slot_rows)

    begin_of = {}
    slots_of = {}
    for request, first, pieces in own.groups[: own.counts[1]].tolist():
        slots_of[request] = list(range(first, first + pieces))
    taken = []
    for request, _, _, first_key, _, slot in own.items[: own.counts[0]].tolist():
        begin_of.setdefault(request, first_key)
        assert (slot < 0) == (request not in slots_of)
        taken += [slot * slot_rows + row for row in range(rows[request]) if slot >= 0]
    assert begin_of == dict(enumerate(shared_keys.tolist()))
    assert sorted(taken + work.slots.tolist()) == sorted(
        slot * slot_rows + row
        for request, slots in slots_of.items()
        for slot in slots
        for row in range(rows[request])
    )

    # Gathered requests: positions differ from the tokens' by `moved`, keys by first_key.
    lens = np.diff(work.query_start_loc.numpy())
    assert lens.max() <= TILE_ROWS
    place = 0
    at = iter(zip(lens.tolist(), work.key_lens.tolist(), strict=True))
    for group in prefixes:
        left = sum(int(rows[r]) for r in group.requests)
        while left:
            m, n = next(at)
            left -= m
            assert n == group.num_keys
            for i in range(m):
                token = int(work.rows[place])
                request = int(np.searchsorted(starts, token, side="right")) - 1
                assert request in group.requests
                assert work.slots[place] // slot_rows in slots_of[request]
                position = keys[request] - rows[request] + token - starts[request]
                assert work.moved[place] == n - m + i + group.first_key - position
                place += 1
    assert place == len(work.rows)


TABLE = np.array([[7, 8, 1], [7, 8, 2], [5, 3, 0], [7, 9, 4]])
KEYS = np.array([11, 12, 8, 12])


@pytest.mark.parametrize(
    "hint", [(8, 8, 0, 4), (0, 0, 0, 0), (11, 8, 3, 7), (1, 0, 0, 0), (4, 8, 2, 0)]
)
def test_right_hints(hint):
    check_hint(np.array(hint), TABLE, KEYS, PAGE)


@pytest.mark.parametrize(
    ("hint", "request_", "allowed"),
    [
        ((12, 8, 0, 4), 0, "0 to 11, as page_table[0] begins with 2 full pages"),
        ((8, 12, 0, 4), 1, "0 to 11"),
        ((8, 8, 4, 4), 2, "0 to 3, as page_table[2] begins with 0 full pages"),
        ((8, 8, 0, 8), 3, "0 to 7, as page_table[3] begins with 1 full pages"),
        ((8, 8, -1, 4), 2, "0 to 3"),
        ((8, 8, 0, 10**6), 3, "0 to 7"),
    ],
)
def test_wrong_hints(hint, request_, allowed):
    with pytest.raises(ArgumentError) as caught:
        check_hint(np.array(hint), TABLE, KEYS, PAGE)
    name = f"batch.shared_prefix_lens[{request_}]"
    assert caught.value.argument == name
    assert str(caught.value).startswith(f"{name} is {hint[request_]}; allowed: {allowed}")


@given(tables(), st.data())
def test_hints_by_brute_force(case, data):
    table, keys = case[0], np.maximum(case[1], 0)
    count = len(table)
    hint = np.array([data.draw(st.integers(0, 6 * PAGE)) for _ in range(count)], np.int64)
    most = [
        max((common(table, keys, (r, other)) for other in range(count) if other != r), default=0)
        for r in range(count)
    ]
    wrong = [r for r in range(count) if hint[r] // PAGE > most[r]]
    if wrong:
        with pytest.raises(ArgumentError, match=rf"\[{wrong[0]}\] is {hint[wrong[0]]};"):
            check_hint(hint, table, keys, PAGE)
    else:
        check_hint(hint, table, keys, PAGE)
