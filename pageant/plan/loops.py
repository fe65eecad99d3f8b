"""Compiled loops that plan on the CPU; ``compiled_plan.py`` says for which batches.

Their plain twins, in numpy, are in ``mistakes.py``, ``pages.py`` and ``work.py``. Sizes that may be
tuned are arguments: numba's cache sees no change in another file.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

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

Array = np.ndarray[Any, Any]
# One int64 array tells `plan_step` what stays from step to step. First it is told what was found.
PAGE, PAGE_REQUEST, WRITTEN, SLOT, DECODES, REAL, DECODE_TOKENS, FACTS = range(8)
ROWS, TABLE, SLOTS, INT = "int32[::1]", "int32[:, :]", "int64[::1]", "int64"
# Then: page size, decode threshold, most keys of a batch, widest window or 0, whether decodes are
# cut as prefills are; workers, keys of a tile, tiles of the least share, rows of a tile; pages of a
# request that are copied, and how many windows there are.
PAGE_SIZE, THRESHOLD, MAX_KEYS, WIDEST, INVARIANT, WORKERS = range(6)
KEYS, LEAST, QUERIES, WIDTH, NUM_WINDOWS, FIXED = range(6, 12)


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


@intrinsic
def _pointer(typing_context, address):
    """The address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@jit()
def _read(starts, lens, table, slots, tokens, max_new, max_len, worth, fixed, facts):
    """Whether a batch has no mistake and shares no prefix; fills `facts` if so."""
    page_size, threshold = fixed[PAGE_SIZE], fixed[THRESHOLD]
    max_keys, window = fixed[MAX_KEYS], fixed[WIDEST]
    num_requests, width = len(lens), table.shape[1]
    facts[:] = 0
    facts[PAGE], facts[PAGE_REQUEST], facts[SLOT] = -1, -1, -1
    facts[DECODES], real = num_requests, starts[num_requests]
    if starts[0] != 0 or not real <= len(slots) <= tokens:
        return False
    total = 0
    for r in range(num_requests):
        m, n = np.int64(starts[r + 1]) - starts[r], np.int64(lens[r])
        pages = -(-n // page_size)
        if not 0 <= m <= max_new or not 0 <= n <= max_len or (m > 0 and pages > width):
            return False
        if max_new > threshold and m > threshold and facts[DECODES] == num_requests:
            facts[DECODES] = r
        total += n
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
    facts[REAL], facts[DECODE_TOKENS] = real, starts[facts[DECODES]]
    return True


@jit()
def _copy(starts, lens, table, slots, fixed, places):
    """Copy a batch, page ids as far as they count; of slots not negative go pages, rows, tokens."""
    requests, page_size, width = len(lens), fixed[PAGE_SIZE], fixed[WIDTH]
    to_starts = carray(_pointer(places[0]), requests + 1, np.int32)
    to_lens = carray(_pointer(places[1]), requests, np.int32)
    to_table = carray(_pointer(places[2]), (requests, width), np.int32)
    to_slots = carray(_pointer(places[3]), (3, len(slots)), np.int64)
    to_starts[requests] = starts[requests]
    for r in range(requests):  # not slices: numba spends three seconds on what they may raise
        to_starts[r], to_lens[r] = starts[r], lens[r]
        for column in range(min(width, -(-np.int64(lens[r]) // page_size))):
            to_table[r, column] = table[r, column]
    at = 0
    for token in range(len(slots)):
        if slots[token] >= 0:
            to_slots[0, at] = slots[token] // page_size
            to_slots[1, at] = slots[token] % page_size
            to_slots[2, at] = token
            at += 1


@jit()
def _tiles(starts, lens, r, window, key_tile):
    """The first key a request's rows see, and its tiles of keys: at least one if it has rows."""
    m, n = np.int64(starts[r + 1]) - starts[r], np.int64(lens[r])
    first = min(max(n - m - window + 1, 0), n) if window else 0
    return first, max(1, -(-(n - first) // key_tile)) if m > 0 else 0


@jit()
def _cut_decode(starts, lens, decodes, window, fixed, items, share_start, groups, counts):
    """``work.fill_decode`` of the first requests."""
    workers, key_tile, min_share, total = fixed[WORKERS], fixed[KEYS], fixed[LEAST], 0
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


@jit()
def _cut_prefill(starts, lens, part, fixed, items, share_start, counts):
    """``work.fill_prefill`` of some requests."""
    begin, end, window, sees_all = part
    workers, query_tile, count = fixed[WORKERS], fixed[QUERIES], 0
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


@jit(ROWS, ROWS, TABLE, SLOTS, INT, INT, INT, INT, INT, INT, SLOTS)
def plan_step(
    starts, lens, table, slots, requests, tokens, max_new, max_len, sees_all, worth, known
):
    """Plan a batch; False, and only facts written, if it has a mistake or may share keys.

    Args:
        starts, lens, table, slots: of the batch, [R + 1], [R], [R, W] and [S].
        requests, tokens, max_new, max_len: the host's R and bounds.
        sees_all: whether rows see keys after their own.
        worth: least keys worth sharing.
        known: room for facts; see FIXED; windows; addresses of the copies of starts, lens, table
            and slots; then for each window of items, share_start, groups and counts of its decodes,
            and of items, share_start and counts of its prefills.
    """
    facts, fixed = known[:FACTS], known[FACTS : FACTS + FIXED]
    if len(starts) != requests + 1 or len(lens) != requests or len(table) != requests:
        return False
    if not _read(starts, lens, table, slots, tokens, max_new, max_len, worth, fixed, facts):
        return False
    num_windows = fixed[NUM_WINDOWS]
    windows = known[FACTS + FIXED : FACTS + FIXED + num_windows]
    places = known[FACTS + FIXED + num_windows :]
    _copy(starts, lens, table, slots, fixed, places)
    rows, decodes = fixed[WORKERS] + 1, facts[DECODES]
    for index in range(num_windows):
        window, at = windows[index], 4 + 7 * index
        items = carray(_pointer(places[at]), (1, 6), np.int64)
        share_start = carray(_pointer(places[at + 1]), rows, np.int64)
        groups = carray(_pointer(places[at + 2]), (1, 3), np.int64)
        counts = carray(_pointer(places[at + 3]), 2, np.int64)
        if fixed[INVARIANT]:
            part = 0, decodes, window, sees_all
            _cut_prefill(starts, lens, part, fixed, items, share_start, counts)
        else:
            _cut_decode(starts, lens, decodes, window, fixed, items, share_start, groups, counts)
        items = carray(_pointer(places[at + 4]), (1, 6), np.int64)
        share_start = carray(_pointer(places[at + 5]), rows, np.int64)
        counts = carray(_pointer(places[at + 6]), 2, np.int64)
        part = decodes, requests, window, sees_all
        _cut_prefill(starts, lens, part, fixed, items, share_start, counts)
    return True
