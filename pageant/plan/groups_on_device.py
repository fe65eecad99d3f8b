"""Which decodes begin with the same keys, found where the tables are: three launches a step.

Two requests share a key if their tables hold the same page id at its place. Of some depths (see
`Grouping`) each request takes the one that saves it most: of `depth` keys that `count` requests
have in common, each reads a count-th part. Requests of one depth and the same page there are a
group, led by the first of them, and share as many keys as all of them have in common. So of nested
groups a request is in that which saves it most, and one that has much less in common with a group
than the others stays out of it.

Only keys before a request's first new token count, which all its rows see, and they see them all
unless a window hides the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from pageant.plan.on_device import MANY, lengths_of
from pageant.plan.tiles import power_of_2

FEW = tl.constexpr(64)  # requests looked at together, each at every depth
PAGES = tl.constexpr(1024)  # of two tables compared at a time
# Of these no code depends on the value: they vary from batch to batch.
FREE = ["starts", "lens", "table", "step", "width", "num_requests", "max_tokens", "max_len"]


@dataclass(frozen=True)
class Grouping:
    """How groups are found.

    Attributes:
        page_size: tokens a page.
        least: the smallest depth, in tokens, a multiple of 4 and of the block; the others are four
            in each doubling: 5, 6, 7 and 8 quarters of it, 10, 12, 14 and 16 ..
        most: no depth is larger.
        padded: a power of 2, at least as many as there are depths.
        block: what a group shares is a multiple of so many keys.
    """

    page_size: int
    least: int
    most: int
    padded: int
    block: int

    @classmethod
    def of(cls, page_size: int, least: int, max_len: int, block: int) -> Grouping:
        """For requests of at most so many keys.

        >>> Grouping.of(page_size=16, least=256, max_len=700, block=64)
        Grouping(page_size=16, least=256, most=700, padded=8, block=64)
        """
        doublings = max(max_len // least, 1).bit_length()
        return cls(page_size, least, max_len, power_of_2(4 * doublings), block)


@triton.jit
def _cached(lengths, request, live, rule, G: tl.constexpr):
    """How many keys a request might share."""
    starts, lens = lengths
    bounds, width, threshold, window = rule
    _start, m, n = lengths_of(starts, lens, request, live, bounds)
    shares = live & (m > 0) & (m <= threshold) & ((window == 0) | (n <= window))
    cached = tl.minimum(tl.maximum(n - m, 0), width * G.page_size)
    return tl.where(shares, cached, 0)


@triton.jit(do_not_specialize=FREE)
def choose_depths(
    starts, lens, table, step, width, num_requests, max_tokens, max_len, windows, threshold,
    depths, capacity, G: tl.constexpr,
):  # fmt: skip
    """Program (r, w): the depth at which request r would share in window w.

    Args:
        starts, lens: int32 [R + 1] and [R], the batch's.
        table, step, width: its page table, int32, with the stride and number of columns.
        num_requests: R.
        max_tokens, max_len: bounds on tokens, and on keys of a request.
        windows: int32, 0 for none.
        threshold: most new tokens of a decode.
        depths: int32 [windows, capacity], written: in tokens, 0 for none.
        capacity: requests that arrays have room for.
        G: how groups are found.
    """
    r = tl.program_id(0)
    w = tl.program_id(1)
    K: tl.constexpr = G.padded
    QUARTER: tl.constexpr = G.least // 4
    lengths = (starts, lens)
    rule = ((max_tokens, max_len), width, threshold, tl.load(windows + w))
    mine = _cached(lengths, r, True, rule, G)
    k = tl.arange(0, K)
    depth = ((k % 4 + 4) * QUARTER).to(tl.int64) << (k // 4)
    reached = (depth <= mine) & (depth <= G.most)
    column = (depth - 1) // G.page_size
    page = tl.load(table + r.to(tl.int64) * step + column, mask=reached, other=0)
    count = tl.zeros([K], tl.int32)
    for first in range(0, num_requests, FEW):
        other = first + tl.arange(0, FEW)
        cached = _cached(lengths, other, other < num_requests, rule, G)
        both = reached[:, None] & (depth[:, None] <= cached[None, :])
        at = table + other.to(tl.int64)[None, :] * step + column[:, None]
        same = both & (tl.load(at, mask=both, other=0) == page[:, None])
        count += tl.sum(same.to(tl.int32), 1)
    saved = tl.where(reached, depth - depth // tl.maximum(count, 1), 0)
    most = tl.max(saved, 0)
    best = tl.min(tl.where(saved == most, depth, G.most), 0)
    tl.store(depths + w * capacity + r, tl.where(most > 0, best, 0))


@triton.jit(do_not_specialize=FREE)
def find_leaders(
    starts, lens, table, step, width, num_requests, max_tokens, max_len, windows, threshold,
    depths, leaders, commons, capacity, G: tl.constexpr,
):  # fmt: skip
    """Program (r, w): whom request r follows in window w, and the keys they have in common.

    Tables that part and then meet again may leave a leader without followers: a group of one.

    Args:
        starts .. depths, capacity, G: as in `choose_depths`, which wrote the depths.
        leaders: int32 [windows, capacity], written: a request, perhaps r itself, or -1.
        commons: int32 [windows, capacity], written: in tokens.
    """
    r = tl.program_id(0)
    w = tl.program_id(1)
    lengths = (starts, lens)
    rule = ((max_tokens, max_len), width, threshold, tl.load(windows + w))
    mine = depths + w * capacity
    depth = tl.load(mine + r)
    leader = -1
    common = 0
    if depth > 0:
        column = (depth - 1) // G.page_size
        row = table + r.to(tl.int64) * step
        page = tl.load(row + column)
        kin = 0
        lowest = num_requests
        for first in range(0, num_requests, MANY):
            other = first + tl.arange(0, MANY)
            same = tl.load(mine + other, mask=other < num_requests, other=0) == depth
            at = table + other.to(tl.int64) * step + column
            same = same & (tl.load(at, mask=same, other=0) == page)
            kin += tl.sum(same.to(tl.int32), 0)
            lowest = tl.minimum(lowest, tl.min(tl.where(same, other, num_requests), 0))
        if kin > 1:
            common = _cached(lengths, r, True, rule, G)
            common = tl.minimum(common, _cached(lengths, lowest, True, rule, G))
            pages = (common + G.page_size - 1) // G.page_size
            leading = table + lowest.to(tl.int64) * step
            done = tl.where(lowest == r, pages, 0)
            while done < pages:
                columns = done + tl.arange(0, PAGES)
                live = columns < pages
                one = tl.load(row + columns, mask=live, other=0)
                two = tl.load(leading + columns, mask=live, other=0)
                end = tl.min(tl.where(one != two, columns, pages), 0)
                common = tl.minimum(common, end * G.page_size)
                done = tl.where(end < pages, pages, done + PAGES)
            leader = tl.where(common >= depth, lowest, -1)
    tl.store(leaders + w * capacity + r, leader)
    tl.store(commons + w * capacity + r, common)


@triton.jit(do_not_specialize=FREE)
def lay_out(
    starts, lens, num_requests, max_tokens, max_len, leaders, commons, groups, rows, capacity,
    room, G: tl.constexpr,
):  # fmt: skip
    """Program (r, w): the group that r leads in window w, and the place of r's rows in its own.

    Args:
        starts, lens, num_requests .. max_len, capacity, G: as in `choose_depths`.
        leaders, commons: as `find_leaders` wrote them.
        groups: int32, written: offsets [windows, capacity + 1] and keys [windows, capacity], rows
            and shared keys of the group each request leads (none of most); skips and shifts
            [windows, capacity], how many first keys a request shares, and what is to be added to
            the number of one of its tokens for its place among the gathered rows.
        rows: int32 [windows, room], written: token and position of each gathered row.
        room: for gathered rows.
    """
    r = tl.program_id(0)
    w = tl.program_id(1)
    offsets, keys, skips, shifts = groups
    tokens, positions = rows
    bounds = (max_tokens, max_len)
    mine = w * capacity
    leader = tl.load(leaders + mine + r)
    before = tl.zeros([MANY], tl.int32)
    place = tl.zeros([MANY], tl.int32)
    total = tl.zeros([MANY], tl.int32)
    shared = tl.full([MANY], 0x7FFFFFFF, tl.int32)
    for first in range(0, num_requests, MANY):
        other = first + tl.arange(0, MANY)
        live = other < num_requests
        _start, m, _n = lengths_of(starts, lens, other, live, bounds)
        their = tl.load(leaders + mine + other, mask=live, other=-1)
        common = tl.load(commons + mine + other, mask=live, other=0)
        m = tl.where(their >= 0, m, 0)
        before += tl.where(their < r, m, 0)
        place += tl.where((their < leader) | ((their == leader) & (other < r)), m, 0)
        total += m
        shared = tl.minimum(shared, tl.where(their == leader, common, shared))
    num_keys = tl.where(leader >= 0, tl.min(shared, 0) // G.block * G.block, 0)
    tl.store(offsets + w * (capacity + 1) + r, tl.sum(before, 0))
    tl.store(keys + mine + r, tl.where(leader == r, num_keys, 0))
    tl.store(skips + mine + r, num_keys)
    if r == num_requests - 1:
        tl.store(offsets + w * (capacity + 1) + num_requests, tl.sum(total, 0))
    if leader >= 0:
        start, new, n = lengths_of(starts, lens, r, True, bounds)
        at = tl.sum(place, 0)
        tl.store(shifts + mine + r, at - start)
        for i in range(new):
            tl.store(tokens + w * room + at + i, start + i)
            tl.store(positions + w * room + at + i, n - new + i)
