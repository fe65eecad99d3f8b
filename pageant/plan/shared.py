"""The work of shared prefixes: rows of a group gathered to be one request over the common keys.

Whatever attends to requests can then compute them. Each row's result becomes a partial result of
its own request, merged with those of the keys that it alone has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageant.plan.prefix import SharedPrefix
from pageant.plan.work import (
    FIRST_PARTIAL,
    REQUEST,
    Lengths,
    WorkList,
    fill_decode,
)

IntArray = np.ndarray[Any, Any]

TILE_ROWS = 16  # gathered rows of one request; 32 took a twentieth longer with 4 heads of 128


@dataclass(frozen=True, eq=False)
class SharedWork:
    """Gathered requests (V of them, S rows together) and where their results belong.

    Attributes:
        prefixes: what is shared.
        query_start_loc: int32 [V + 1].
        key_lens: int32 [V].
        page_table: int32 [V, W].
        work: their work list.
        rows: int64 [S], the token each gathered row is of.
        slots: int64 [S], the row of the partial results, counted across all slots, it goes to.
        moved: float32 [S], how much nearer a key is to the gathered row than to the token.
    """

    prefixes: tuple[SharedPrefix, ...]
    query_start_loc: torch.Tensor
    key_lens: torch.Tensor
    page_table: torch.Tensor
    work: WorkList
    rows: IntArray
    slots: IntArray
    moved: torch.Tensor


def parts_of(prefixes: Sequence[SharedPrefix], num_requests: int) -> tuple[IntArray, IntArray]:
    """How many keys of each request are shared, and in how many parts; int64 [R] both.

    >>> inner = SharedPrefix(requests=(0, 2), level=1, first_key=8, num_keys=4, pages=(5,))
    >>> outer = SharedPrefix(requests=(0, 2, 3), level=0, first_key=0, num_keys=8, pages=(1, 9))
    >>> parts_of([outer, inner], num_requests=4)
    (array([12,  0, 12,  8]), array([2, 0, 2, 1]))
    """
    keys, parts = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    for prefix in prefixes:
        members = list(prefix.requests)
        keys[members] += prefix.num_keys
        parts[members] += 1
    return keys, parts


def share(
    prefixes: tuple[SharedPrefix, ...],
    starts: IntArray,
    key_lens: IntArray,
    own: WorkList,
    slot_rows: int,
) -> SharedWork:
    """Gather the rows of every group.

    Args:
        prefixes: the groups, not none.
        starts, key_lens: int64 [R + 1] and [R], of the batch.
        own: the work list of the keys that are not shared, where slots were given out.
        slot_rows: rows of a partial result.
    """
    groups = own.groups[: own.counts[1]]
    first_slot = dict(zip(groups[:, REQUEST].tolist(), groups[:, FIRST_PARTIAL], strict=True))
    rows, slots, moved, lens = [], [], [], []
    for prefix in prefixes:
        members = np.array(prefix.requests)
        query_lens = starts[members + 1] - starts[members]
        count = int(query_lens.sum())
        row = np.arange(count) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        first = np.array([first_slot[request] for request in prefix.requests]) + prefix.level
        rows.append(np.repeat(starts[members], query_lens) + row)
        slots.append(np.repeat(first * slot_rows, query_lens) + row)
        position = np.repeat(key_lens[members] - query_lens, query_lens) + row
        pieces = -(-count // TILE_ROWS)
        cuts = np.linspace(0, count, pieces + 1).astype(np.int64)
        lens.append(np.diff(cuts))
        # The last gathered row of each tile stands at the last shared key.
        gathered = prefix.num_keys + np.arange(count) - np.repeat(cuts[1:], lens[-1])
        moved.append(gathered + prefix.first_key - position)
    tiles = [len(part) for part in lens]
    query_lens = np.concatenate(lens)
    shared_keys = np.repeat([prefix.num_keys for prefix in prefixes], tiles)
    table = np.zeros((len(prefixes), max(len(prefix.pages) for prefix in prefixes)), np.int32)
    for line, prefix in zip(table, prefixes, strict=True):
        line[: len(prefix.pages)] = prefix.pages
    return SharedWork(
        prefixes=prefixes,
        query_start_loc=_int32(np.concatenate([[0], np.cumsum(query_lens)])),
        key_lens=_int32(shared_keys),
        page_table=_int32(np.repeat(table, tiles, axis=0)),
        work=_work(query_lens, shared_keys, len(own.share_start) - 1),
        rows=np.concatenate(rows),
        slots=np.concatenate(slots),
        moved=torch.from_numpy(np.concatenate(moved)).float(),
    )


def _work(query_lens: IntArray, key_lens: IntArray, workers: int) -> WorkList:
    count = len(query_lens)
    work = WorkList.empty(count + workers, workers)
    fill_decode(work, Lengths(0, count, query_lens, key_lens, np.ones(count, np.bool_)), None)
    return work


def _int32(array: IntArray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))
