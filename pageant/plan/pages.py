"""Page tables and slots: which pages a plan reads, and where its new tokens are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pageant.plan.work import first_keys
from pageant.ranks import ALONE, ContextParallel
from pageant.types import bad

IntArray = np.ndarray[Any, Any]


class PageUse(NamedTuple):
    """The largest page id that any row can see, and whose it is; -1 where nothing is read."""

    largest: int = -1
    request: int = -1

    def check(self, num_pages: int) -> None:
        """Raise if the cache has no such page."""
        if self.largest >= num_pages:
            name = f"batch.page_table[{self.request}]"
            raise bad(name, self.largest, f"page ids below {num_pages}")


def page_use(
    page_table: IntArray,
    query_lens: IntArray,
    key_lens: IntArray,
    page_size: int,
    window: int | None,
    shard: ContextParallel = ALONE,
) -> PageUse:
    """The pages rows can see, checked to be no negative ids.

    Args:
        page_table: int [R, W].
        query_lens, key_lens: int64 [R], m and n.
        page_size: tokens a page.
        window: the widest of the plan; None if any layer sees everything.
        shard: which keys the pages hold.

    A window of 4 tokens over pages of 4: the first page of the second request may hold anything.

    >>> table = np.array([[7, 2], [-99, 5]])
    >>> page_use(table, np.array([1, 1]), np.array([6, 8]), page_size=4, window=4)
    PageUse(largest=7, request=0)
    """
    begin = shard.count(first_keys(query_lens, key_lens, window)) // page_size
    counts = np.where(query_lens > 0, -(-shard.count(key_lens) // page_size) - begin, 0)
    total = int(counts.sum())
    if total == 0:
        return PageUse()
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(total) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    ids = page_table[rows, columns]
    lowest, highest = int(ids.argmin()), int(ids.argmax())
    if ids[lowest] < 0:
        where = f"batch.page_table[{rows[lowest]}, {columns[lowest]}]"
        raise bad(where, int(ids[lowest]), "page ids from 0 up")
    return PageUse(int(ids[highest]), int(rows[highest]))


@dataclass
class WriteIndex:
    """Where each new token's keys and values go; planning its slot again may change it in place.

    Attributes:
        tokens: int64 [n], rows of k and v that are written; None if all of them are.
        pages, rows: int64 [n], page and row in the page of each.
        num_tokens: rows of k and v that the slot mapping speaks of.
        largest_slot: -1 where nothing is written.
    """

    tokens: torch.Tensor | None
    pages: torch.Tensor
    rows: torch.Tensor
    num_tokens: int
    largest_slot: int

    def check(self, num_slots: int) -> None:
        """Raise if the cache has no such slot."""
        if self.largest_slot >= num_slots:
            raise bad("batch.slot_mapping", self.largest_slot, f"slots up to {num_slots - 1}")


def write_index(
    slot_mapping: torch.Tensor, page_size: int, memory: torch.Tensor | None = None
) -> WriteIndex:
    """Split slots into page and row, leaving out the negative ones.

    Args:
        slot_mapping: int64 [T].
        page_size: tokens a page.
        memory: int64 [3, T], for the index to lie in; None allocates it.

    >>> index = write_index(torch.tensor([9, -1, 20]), page_size=4)
    >>> index.tokens.tolist(), index.pages.tolist(), index.rows.tolist()
    ([0, 2], [2, 5], [1, 0])
    """
    num_tokens, tokens, slots = slot_mapping.shape[0], None, slot_mapping
    if memory is None:
        memory = slot_mapping.new_empty(3, num_tokens)
    pages, rows, kept = memory.unbind()
    least, largest = map(int, slot_mapping.aminmax()) if num_tokens else (-1, -1)
    if least < 0:
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        count = len(written)
        pages, rows, tokens = pages[:count], rows[:count], kept[:count].copy_(written)
        slots = slot_mapping[written]
    torch.div(slots, page_size, rounding_mode="floor", out=pages)
    torch.remainder(slots, page_size, out=rows)
    return WriteIndex(tokens, pages, rows, num_tokens, max(largest, -1))
