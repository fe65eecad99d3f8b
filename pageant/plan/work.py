"""Work lists: which rows and keys each share of a kernel walks.

Decode cuts the keys of all requests, laid end to end, into equal contiguous shares; a request that
a cut goes through leaves partial results, merged afterwards. Prefill cuts query rows into tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pageant.ranks import ALONE, ContextParallel

IntArray = np.ndarray[Any, Any]

REQUEST, QUERY_BEGIN, QUERY_END, KEY_BEGIN, KEY_END, PARTIAL = range(6)
FIRST_PARTIAL, NUM_PARTIALS = 1, 2

KEY_TILE = 64  # keys; the grain of decode shares
MIN_SHARE = 8  # tiles; below this a second thread costs more than it brings
QUERY_TILE = 16  # rows of a prefill item; 8 took up to a tenth longer, 32 as long


@dataclass(frozen=True)
class WorkList:
    """Work of one phase for one window, in arrays of fixed address that planning fills.

    Attributes:
        items: int64 [capacity, 6], columns REQUEST, QUERY_BEGIN, QUERY_END (rows of the request),
            KEY_BEGIN, KEY_END, PARTIAL (slot of a partial result, or -1: the item is whole).
        share_start: int64 [workers + 1]; worker w walks items share_start[w] to share_start[w + 1].
        groups: int64 [capacity, 3], columns REQUEST, FIRST_PARTIAL, NUM_PARTIALS, one row for each
            request cut in several.
        counts: int64 [2]: items and groups in use.
    """

    items: IntArray
    share_start: IntArray
    groups: IntArray
    counts: IntArray

    @classmethod
    def empty(cls, capacity: int, workers: int) -> WorkList:
        """Room for `capacity` items in `workers` shares."""
        return cls(
            np.zeros((capacity, 6), np.int64),
            np.zeros(workers + 1, np.int64),
            np.zeros((capacity, 3), np.int64),
            np.zeros(2, np.int64),
        )

    @property
    def has_work(self) -> bool:
        """Whether there is any item."""
        return bool(self.counts[0])

    def clear(self) -> None:
        """No work at all."""
        self.counts[:] = 0
        self.share_start[:] = 0


@dataclass(frozen=True)
class Lengths:
    """One phase's requests, as arrays over all requests of the batch.

    Attributes:
        first, last: the phase's requests are first to last.
        query_lens, key_lens: int64 [R], m and n.
        sees_all: bool [R], rows may see keys after their own position (non-causal, draft masks).
        shared_keys, shared_parts: int64 [R]: so many first keys are computed elsewhere, and leave
            so many partial results, for which decode keeps slots; None: none are.
        shard: which keys this rank holds; items count those alone.
    """

    first: int
    last: int
    query_lens: IntArray
    key_lens: IntArray
    sees_all: IntArray
    shared_keys: IntArray | None = None
    shared_parts: IntArray | None = None
    shard: ContextParallel = ALONE


def first_keys(query_lens: IntArray, key_lens: IntArray, window: int | None) -> IntArray:
    """int64 [R]: the earliest key any row of each request can see.

    >>> first_keys(np.array([1, 2, 2]), np.array([256, 6, 1]), window=128)
    array([128,   0,   0])
    """
    if window is None:
        return np.zeros_like(key_lens)
    return np.clip(key_lens - query_lens - window + 1, 0, key_lens)


def fill_decode(
    work: WorkList, lengths: Lengths, window: int | None, debug_splits: int | None = None
) -> None:
    """Cut the phase's keys into one equal share a worker; `debug_splits` cuts each request instead.

    A request's slots are one after another: those for shared parts, then its own.

    One request of 2,048 keys in two shares, then one of 64: the first is cut once, so it leaves two
    partial results that one group names.

    >>> work = WorkList.empty(capacity=8, workers=2)
    >>> lens = np.array([2048, 64])
    >>> fill_decode(work, Lengths(0, 2, np.ones(2, int), lens, np.zeros(2, bool)), window=None)
    >>> work.items[: work.counts[0]].tolist()
    [[0, 0, 1, 0, 1024, 0], [0, 0, 1, 1024, 2048, 1], [1, 0, 1, 0, 64, -1]]
    >>> work.share_start.tolist(), work.groups[: work.counts[1]].tolist()
    ([0, 1, 3], [[0, 0, 2]])
    """
    work.clear()
    part = slice(lengths.first, lengths.last)
    rows, keys = lengths.query_lens[part], lengths.key_lens[part]
    begin, parts = lengths.shard.count(first_keys(rows, keys, window)), np.zeros_like(rows)
    keys = lengths.shard.count(keys)
    if lengths.shared_keys is not None and lengths.shared_parts is not None:
        begin, parts = np.maximum(begin, lengths.shared_keys[part]), lengths.shared_parts[part]
    tile = KEY_TILE if debug_splits is None else 1
    tiles = np.where(rows > 0, np.maximum(1, -(-(keys - begin) // tile)), 0)
    starts = np.concatenate([[0], np.cumsum(tiles)])
    total, workers = int(starts[-1]), len(work.share_start) - 1
    if total == 0:
        return
    if debug_splits is None:
        shares = min(max(total // MIN_SHARE, 1), workers)
        cuts = total * np.arange(1, shares) // shares
    else:
        shares = 1
        steps = tiles[:, None] * np.arange(1, debug_splits) // debug_splits
        cuts = (starts[:-1, None] + steps).ravel()
    edges = np.unique(np.concatenate([starts, cuts]))
    low, high = edges[:-1], edges[1:]
    owner = np.searchsorted(starts, low, side="right") - 1
    whole = (low == starts[owner]) & (high == starts[owner + 1]) & (parts[owner] == 0)
    kept = np.cumsum(parts)  # slots for shared parts, up to and with those of each request
    count = len(low)
    items = work.items[:count]
    items[:, REQUEST] = owner + lengths.first
    items[:, QUERY_BEGIN] = 0
    items[:, QUERY_END] = rows[owner]
    items[:, KEY_BEGIN] = begin[owner] + (low - starts[owner]) * tile
    items[:, KEY_END] = np.minimum(keys[owner], begin[owner] + (high - starts[owner]) * tile)
    items[:, PARTIAL] = np.where(whole, -1, np.cumsum(~whole) - 1 + kept[owner])
    bounds = np.concatenate([[0], cuts, [total]]) if debug_splits is None else [0, total]
    work.share_start[: shares + 1] = np.searchsorted(low, bounds)
    work.share_start[shares + 1 :] = count
    cut, first, pieces = np.unique(owner[~whole], return_index=True, return_counts=True)
    first, pieces = first + (kept - parts)[cut], pieces + parts[cut]
    work.groups[: len(cut)] = np.stack([cut + lengths.first, first, pieces], axis=1)
    work.counts[:] = count, len(cut)


def fill_prefill(work: WorkList, lengths: Lengths, window: int | None) -> None:
    """Cut the phase's query rows into tiles, each with the keys its rows can see.

    >>> work = WorkList.empty(capacity=4, workers=1)
    >>> lens = np.array([20])
    >>> fill_prefill(work, Lengths(0, 1, lens, lens, np.zeros(1, bool)), window=None)
    >>> work.items[:2].tolist()
    [[0, 0, 16, 0, 16, -1], [0, 16, 20, 0, 20, -1]]
    """
    work.clear()
    part = slice(lengths.first, lengths.last)
    rows, keys, sees_all = (
        lengths.query_lens[part],
        lengths.key_lens[part],
        lengths.sees_all[part],
    )
    tiles = -(-rows // QUERY_TILE)
    owner = np.repeat(np.arange(len(rows)), tiles)
    count = len(owner)
    index = np.arange(count) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    items = work.items[:count]
    items[:, REQUEST] = owner + lengths.first
    items[:, QUERY_BEGIN] = index * QUERY_TILE
    items[:, QUERY_END] = np.minimum(rows[owner], items[:, QUERY_BEGIN] + QUERY_TILE)
    m, n = rows[owner], keys[owner]
    reach = np.where(sees_all[owner], n, np.clip(n - m + items[:, QUERY_END], 0, n))
    begin = first_keys(m - items[:, QUERY_BEGIN], n, window)
    items[:, KEY_BEGIN] = lengths.shard.count(np.minimum(begin, reach))
    items[:, KEY_END] = lengths.shard.count(reach)
    items[:, PARTIAL] = -1
    work.share_start[:] = count * np.arange(len(work.share_start)) // (len(work.share_start) - 1)
    work.counts[:] = count, 0
