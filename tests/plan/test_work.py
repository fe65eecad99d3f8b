"""Work lists: every row and every key it can see in exactly one item, and fair shares."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from pageant.plan.buffers import make_work, make_workspace
from pageant.plan.work import (
    KEY_BEGIN,
    KEY_END,
    KEY_TILE,
    PARTIAL,
    QUERY_BEGIN,
    QUERY_END,
    QUERY_TILE,
    REQUEST,
    Lengths,
    fill_decode,
    fill_prefill,
    first_keys,
)
from pageant.types import Features, Limits, Options, Shape

SHAPE = Shape(num_q_heads=2, num_kv_heads=1, head_dim=16)
WINDOWS = st.one_of(st.none(), st.integers(1, 40), st.integers(40, 5000))
NUMBERS = st.integers(0, 9)


@st.composite
def lengths(draw, most_rows):
    """Requests, of which a middle part belongs to the phase."""
    count = draw(st.integers(0, 12))
    keys = st.one_of(st.integers(0, 5), st.integers(0, 300), st.integers(0, 20_000))
    rows = [draw(st.integers(0, most_rows)) for _ in range(count)]
    lens = [draw(keys) for _ in range(count)]
    first = draw(st.integers(0, count))
    last = draw(st.integers(first, count))
    sees_all = [draw(st.booleans()) for _ in range(count)]
    return Lengths(
        first,
        last,
        np.array(rows, dtype=np.int64),
        np.array(lens, dtype=np.int64),
        np.array(sees_all, dtype=bool),
    )


def room(phase, part, window, workers, splits=None):
    """The work list and workspace an Attention with just these limits has, full of old numbers."""
    options = Options(debug_splits=splits)
    rows = int(part.query_lens[part.first : part.last].sum())
    limits = Limits(max_requests=max(1, len(part.query_lens)), max_tokens=max(1, rows))
    features = Features(windows=(window,))
    work = make_work(limits, features, options, workers)[phase, window]
    for array in (work.items, work.groups, work.counts, work.share_start):
        array[:] = -77
    return work, make_workspace(SHAPE, limits, features, options, torch.device("cpu"), 8, workers)


def sight(row, m, n, window, sees_all):
    """Keys row i of m sees: from the definition, as a range."""
    position = n - m + row
    begin = 0 if window is None else max(0, position - window + 1)
    end = n if sees_all else min(n, position + 1)
    return (min(begin, end), end) if end > 0 else (0, 0)


@given(
    lengths(most_rows=8),
    WINDOWS,
    st.integers(1, 9),
    st.one_of(st.none(), st.none(), st.integers(1, 9)),
)
def test_decode(part, window, workers, splits):
    work, workspace = room("decode", part, window, workers, splits)
    fill_decode(work, part, window, splits)
    num_items, num_groups = work.counts.tolist()
    items, groups = work.items[:num_items].tolist(), work.groups[:num_groups].tolist()
    event(f"cut requests: {min(num_groups, 3)}")

    # Requests in order, each with all its rows, its keys tiled without gap or overlap.
    by_request = {}
    for item in items:
        by_request.setdefault(item[REQUEST], []).append(item)
    asked = [r for r in range(part.first, part.last) if part.query_lens[r] > 0]
    assert list(by_request) == asked
    for request, pieces in by_request.items():
        m, n = int(part.query_lens[request]), int(part.key_lens[request])
        earliest = 0 if window is None else min(max(0, n - m - window + 1), n)
        assert pieces[0][KEY_BEGIN] == earliest
        assert pieces[-1][KEY_END] == n
        for a, b in pairwise(pieces):
            assert a[KEY_END] == b[KEY_BEGIN]
        for piece in pieces:
            assert (piece[QUERY_BEGIN], piece[QUERY_END]) == (0, m)
            assert piece[KEY_BEGIN] < piece[KEY_END] or n == earliest

    # Partial results: of cut requests only, one after another, within the workspace.
    slots = [item[PARTIAL] for item in items if item[PARTIAL] != -1]
    assert slots == list(range(len(slots)))
    assert len(slots) <= workspace.partial_out.shape[0]
    assert all(m <= workspace.partial_out.shape[1] for m in part.query_lens)
    cut = [r for r, pieces in by_request.items() if len(pieces) > 1]
    want = [[r, by_request[r][0][PARTIAL], len(by_request[r])] for r in cut]
    assert groups == want
    for request, pieces in by_request.items():
        whole = [piece[PARTIAL] == -1 for piece in pieces]
        assert whole == [len(pieces) == 1] * len(pieces), request
    if splits is not None:
        for pieces in by_request.values():
            count = max(1, pieces[-1][KEY_END] - pieces[0][KEY_BEGIN])
            assert len(pieces) == min(splits, count)

    check_shares(work, num_items)
    if splits is None:
        check_balance(work, workers)


def check_shares(work, num_items):
    """One contiguous run of items a worker, all of them together."""
    shares = work.share_start.tolist()
    assert shares == sorted(shares)
    assert shares[-1] == num_items
    assert num_items == 0 or shares[0] == 0


def check_balance(work, workers):
    """Busy shares differ by one tile at most; a few keys more or less at the requests' ends."""
    tiles = []
    for first, last in pairwise(work.share_start.tolist()):
        share = work.items[first:last]
        keys = share[:, KEY_END] - share[:, KEY_BEGIN]
        tiles.append(int(np.maximum(1, -(-keys // KEY_TILE)).sum()))
    busy = [count for count in tiles if count]
    assert len(tiles) == workers
    assert tiles == busy + [0] * (workers - len(busy))
    assert max(busy, default=0) - min(busy, default=0) <= 1


@given(lengths(most_rows=1500), WINDOWS)
def test_prefill(part, window):
    work, _ = room("prefill", part, window, workers=1)
    fill_prefill(work, part, window)
    num_items, num_groups = work.counts.tolist()
    assert num_groups == 0
    rows_done = dict.fromkeys(range(part.first, part.last), 0)
    order = []
    for item in work.items[:num_items].tolist():
        request = item[REQUEST]
        order.append(request)
        m, n = int(part.query_lens[request]), int(part.key_lens[request])
        begin, end = item[QUERY_BEGIN], item[QUERY_END]
        assert begin == rows_done[request]
        assert begin < end <= m
        assert end - begin <= QUERY_TILE
        rows_done[request] = end
        assert item[PARTIAL] == -1
        seen = [
            sight(row, m, n, window, part.sees_all[request]) for row in {begin, end - 1, begin + 1}
        ]
        seen = [
            keys for row, keys in zip({begin, end - 1, begin + 1}, seen, strict=True) if row < end
        ]
        seen = [(a, b) for a, b in seen if a < b]
        # Exactly what its rows can see: not a key less, not a key more.
        assert 0 <= item[KEY_BEGIN] <= item[KEY_END] <= n
        if seen:
            first_row, last_row = begin, end - 1
            earliest = min(
                a
                for a, b in (
                    sight(r, m, n, window, part.sees_all[request]) for r in range(begin, end)
                )
                if a < b
            )
            assert item[KEY_BEGIN] == earliest, (first_row, last_row)
            assert item[KEY_END] == max(b for _, b in seen)
    assert order == sorted(order)
    for request, done in rows_done.items():
        assert done == part.query_lens[request]
    check_shares(work, num_items)


@given(st.integers(0, 50), st.integers(0, 50), WINDOWS)
def test_first_keys(m, n, window):
    got = int(first_keys(np.array([m]), np.array([n]), window)[0])
    visible = [
        sight(row, m, n, window, sees_all=True)[0]
        for row in range(m)
        if n and sight(row, m, n, window, sees_all=True)[0] < n
    ]
    if m and n:
        assert got == min(visible, default=n)
