"""Compiled loops that plan on the CPU; ``compiled_plan.py`` says for which batches.

Their plain twins, in numpy, are in ``mistakes.py``, ``pages.py`` and ``work.py``. Sizes that may be
tuned are arguments: numba's cache sees no change in another file.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pageant.plan.work import (
    FIRST_PARTIAL,
    KEY_BEGIN,
    KEY_END,
    NUM_PARTIALS,
    PARTIAL,
    QUERY_BEGIN,
    QUERY_END,
    REQUEST,
)

# What `read` finds: columns of an int64 array.
WIDTH, PAGE, PAGE_REQUEST, WRITTEN, SLOT, DECODES, REAL, DECODE_TOKENS, FACTS = range(9)
Array = np.ndarray[Any, Any]
ROWS, TABLE, SLOTS, WORK, INT = "int32[::1]", "int32[:, :]", "int64[::1]", "int64[:, ::1]", "int64"


def jit(*signature: str, **options: Any) -> Any:
    """Compile, at once for a signature, and keep the code on disk where there is a place for it."""
    args = [f"({', '.join(signature)})"] if signature else []

    def compile_(function: Any) -> Any:
        try:
            return numba.njit(*args, cache=True, nogil=True, error_model="numpy", **options)(
                function
            )
        except RuntimeError:  # numba found no folder it may write to
            return numba.njit(*args, nogil=True, error_model="numpy", **options)(function)

    return compile_


@jit(ROWS, ROWS, TABLE, SLOTS, SLOTS, SLOTS)
def read(
    starts: Array, lens: Array, table: Array, slots: Array, bounds: Array, facts: Array
) -> bool:
    """Whether a batch has no mistake and shares no prefix; fills `facts` if so.

    Args:
        starts, lens, table, slots: of the batch, [R + 1], [R], [R, W] and [S].
        bounds: page size, decode threshold, most keys; the widest window or 0; least keys worth
            sharing; most tokens, new tokens of a request, and keys of a request; whether there are
            slots.
    """
    page_size, threshold, max_keys, window, worth, num_tokens, max_new, max_len, writes = bounds
    num_requests, width = len(lens), table.shape[1]
    facts[:] = 0
    facts[PAGE], facts[PAGE_REQUEST], facts[SLOT] = -1, -1, -1
    facts[DECODES], real = num_requests, starts[num_requests]
    if starts[0] != 0 or real > num_tokens or (writes and not real <= len(slots) <= num_tokens):
        return False
    total, longest = 0, 0
    for r in range(num_requests):
        m, n = np.int64(starts[r + 1]) - starts[r], np.int64(lens[r])
        pages = -(-n // page_size)
        if not 0 <= m <= max_new or not 0 <= n <= max_len or (m > 0 and pages > width):
            return False
        if max_new > threshold and m > threshold and facts[DECODES] == num_requests:
            facts[DECODES] = r
        total, longest = total + n, max(longest, n)
        first = min(max(n - m - window + 1, 0), n) // page_size if window else 0
        for column in range(first, pages if m > 0 else 0):
            page = table[r, column]
            if page < 0:
                return False
            if page > facts[PAGE]:
                facts[PAGE], facts[PAGE_REQUEST] = page, r
    if total > max_keys:
        return False
    for r in range(facts[DECODES]):  # two of them that begin with the same page
        if lens[r] >= max(worth, page_size) and starts[r + 1] > starts[r]:
            for other in range(r):
                if table[other, 0] == table[r, 0] and lens[other] >= max(worth, page_size):
                    return False
    for slot in slots:
        facts[WRITTEN] += slot >= 0
        facts[SLOT] = max(facts[SLOT], slot)
    facts[WIDTH] = min(width, -(-longest // page_size))
    facts[REAL], facts[DECODE_TOKENS] = real, starts[facts[DECODES]]
    return True


@jit(ROWS, ROWS, TABLE, SLOTS, INT, ROWS, ROWS, "int32[:, ::1]", WORK)
def copy(
    starts: Array,
    lens: Array,
    table: Array,
    slots: Array,
    page_size: int,
    to_starts: Array,
    to_lens: Array,
    to_table: Array,
    to_slots: Array,
) -> None:
    """Copy a batch; of the slots that are not negative go pages, rows and tokens."""
    to_starts[:], to_lens[:] = starts, lens
    for r in range(len(lens)):
        to_table[r] = table[r, : to_table.shape[1]]
    at = 0
    for token in range(len(slots)):
        if slots[token] >= 0:
            to_slots[0, at] = slots[token] // page_size
            to_slots[1, at] = slots[token] % page_size
            to_slots[2, at] = token
            at += 1


@jit()
def _tiles(starts: Array, lens: Array, r: int, window: int, key_tile: int) -> tuple[int, int]:
    """The first key a request's rows see, and its tiles of keys: at least one if it has rows."""
    m, n = np.int64(starts[r + 1]) - starts[r], np.int64(lens[r])
    first = min(max(n - m - window + 1, 0), n) if window else 0
    return first, max(1, -(-(n - first) // key_tile)) if m > 0 else 0


@jit(ROWS, ROWS, INT, INT, INT, INT, WORK, SLOTS, WORK, SLOTS)
def cut_decode(
    starts: Array,
    lens: Array,
    decodes: int,
    window: int,
    key_tile: int,
    min_share: int,
    items: Array,
    share_start: Array,
    groups: Array,
    counts: Array,
) -> None:
    """``work.fill_decode`` of the first requests."""
    total, workers = 0, len(share_start) - 1
    for r in range(decodes):
        total += _tiles(starts, lens, r, window, key_tile)[1]
    shares = min(max(total // min_share, 1), workers)
    count = parts = cut = begin = 0
    share, edge = 1, total // shares
    share_start[0] = 0
    for r in range(decodes):
        first, tiles = _tiles(starts, lens, r, window, key_tile)
        end, before = begin + tiles, parts
        low = begin
        while low < end:
            if low == edge and share < shares:
                share_start[share] = count
                share += 1
                edge = total * share // shares
            high = min(end, edge) if share < shares else end
            item = items[count]
            item[REQUEST], item[QUERY_BEGIN], item[QUERY_END] = r, 0, starts[r + 1] - starts[r]
            item[KEY_BEGIN] = first + (low - begin) * key_tile
            item[KEY_END] = min(np.int64(lens[r]), first + (high - begin) * key_tile)
            item[PARTIAL] = -1
            if high - low < tiles:
                item[PARTIAL] = parts
                parts += 1
            count, low = count + 1, high
        if parts > before:
            group = groups[cut]
            group[REQUEST], group[FIRST_PARTIAL], group[NUM_PARTIALS] = r, before, parts - before
            cut += 1
        begin = end
    share_start[share:] = count
    counts[0], counts[1] = count, cut


@jit(ROWS, ROWS, INT, INT, INT, "boolean", INT, WORK, SLOTS, SLOTS)
def cut_prefill(
    starts: Array,
    lens: Array,
    begin: int,
    end: int,
    window: int,
    sees_all: bool,
    query_tile: int,
    items: Array,
    share_start: Array,
    counts: Array,
) -> None:
    """``work.fill_prefill`` of some requests."""
    count, workers = 0, len(share_start) - 1
    for r in range(begin, end):
        m, n = np.int64(starts[r + 1]) - starts[r], np.int64(lens[r])
        for low in range(0, m, query_tile):
            high = min(m, low + query_tile)
            reach = n if sees_all else min(max(n - m + high, 0), n)
            first = min(max(n - m + low - window + 1, 0), n) if window else 0
            item = items[count]
            item[REQUEST], item[QUERY_BEGIN], item[QUERY_END] = r, low, high
            item[KEY_BEGIN], item[KEY_END], item[PARTIAL] = min(first, reach), reach, -1
            count += 1
    for worker in range(workers + 1):
        share_start[worker] = count * worker // workers
    counts[0], counts[1] = count, 0
