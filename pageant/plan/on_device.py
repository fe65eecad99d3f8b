"""Planning where the lengths are: one launch a step, and nothing read back.

Decodes: the blocks of keys of all tiles (request, then kv head), laid end to end, are cut into
equal contiguous shares, one for each program of the kernel. So a share leaves at most two partial
results: of the tile it begins within, and of the one it ends within. Prefills need no list: their
tiles are found from the first tokens of the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

REQUEST, UNIT, BEGIN, END, PARTIAL, OPENER, CLOSER = (tl.constexpr(i) for i in range(7))
ITEM = tl.constexpr(7)  # int32 numbers an item
MANY = tl.constexpr(256)  # requests looked at together


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How decodes are cut.

    Attributes:
        tokens, block: of a tile: new tokens, and keys at a time.
        units: tiles that a tile's tokens are spread over.
        world: ranks that share the keys.
        splits: parts each tile is cut into; 0 cuts by work.
        least: blocks of a share, where there is enough for fewer shares.
        skips: whether some first keys are computed elsewhere.
    """

    tokens: int
    block: int
    units: int
    world: int
    splits: int
    least: int
    skips: bool = False


@triton.jit
def held(tokens, shard, WORLD: tl.constexpr):
    """How many of a sequence's first tokens the rank holds; see ``ContextParallel.count``."""
    if WORLD == 1:
        return tokens
    else:
        rank, interleave = shard
        rounds = tokens // (interleave * WORLD) * interleave
        rest = tokens - rounds * WORLD - rank * interleave
        return rounds + tl.minimum(tl.maximum(rest, 0), interleave)


@triton.jit
def lengths_of(starts, lens, request, live, bounds):
    """First token, new tokens and keys of requests, within the bounds of the buffers."""
    max_tokens, max_len = bounds
    start = tl.load(starts + request, mask=live, other=0)
    end = tl.load(starts + request + 1, mask=live, other=0)
    n = tl.load(lens + request, mask=live, other=0)
    start = tl.minimum(tl.maximum(start, 0), max_tokens)
    end = tl.minimum(tl.maximum(end, start), max_tokens)
    return start, end - start, tl.minimum(tl.maximum(n, 0), max_len)


@triton.jit
def _work(starts, lens, request, live, rule, C: tl.constexpr):
    """Decode's tiles of each request, the first block they see, and how many (at least one)."""
    bounds, threshold, window, shard, skips = rule
    _start, m, n = lengths_of(starts, lens, request, live, bounds)
    decodes = live & (m > 0) & (m <= threshold)
    units = tl.where(decodes, (m + C.tokens - 1) // C.tokens * C.units, 0)
    low = tl.where(window > 0, tl.minimum(tl.maximum(n - m - window + 1, 0), n), 0)
    first = held(low, shard, C.world) // C.block
    if C.skips:
        first = tl.maximum(first, tl.load(skips + request, mask=live, other=0) // C.block)
    blocks = (held(n, shard, C.world) + C.block - 1) // C.block - first
    return units, first, tl.maximum(blocks, 1)


@triton.jit(do_not_specialize=["starts", "lens", "num_requests", "max_tokens", "max_len"])
def plan_step(
    starts, lens, num_requests, max_tokens, max_len, own_starts, own_lens, items, shares, arrivals,
    windows, threshold, shard, capacity, skips, C: tl.constexpr,
):  # fmt: skip
    """Program (g, w) plans share g of window w; those of window 0 also copy the lengths.

    Args:
        starts, lens: int32 [R + 1] and [R], the batch's.
        num_requests: R.
        max_tokens, max_len: bounds on tokens, and on keys of a request.
        own_starts, own_lens: where they are copied to, within the bounds; or None.
        items: int32 [windows, capacity, ITEM]: request, unit (its tile among those of a request),
            first and last block, slot of the partial result or -1; of a part, the first and last
            share that hold parts of its tile. Slots are 2 g, and 2 g + 1 for a first part.
        shares: int32 [windows, G, 2]: first item and number of items.
        arrivals: int32 [windows, G], becomes 0: of the tile that begins in share g and ends in a
            later one, how many parts there are by now.
        windows: int32, 0 for none.
        threshold, shard, capacity: most new tokens of a decode; rank and interleave; items of a
            window.
        skips: int32 [windows, ..], a request's first keys to leave out, and its stride; or None.
        C: how decodes are cut.
    """
    g = tl.program_id(0)
    w = tl.program_id(1)
    SPLITS: tl.constexpr = C.splits
    bounds = (max_tokens, max_len)
    left_out = lens if skips is None else skips[0] + w * skips[1]
    rule = (bounds, threshold, tl.load(windows + w), shard, left_out)
    if own_starts is not None:
        last = tl.where(w == 0, num_requests, -1)
        for first in range(g * MANY, last + 1, tl.num_programs(0) * MANY):
            request = first + tl.arange(0, MANY)
            live = request < num_requests
            start, m, n = lengths_of(starts, lens, request, live, bounds)
            tl.store(own_starts + request, start, mask=live)
            tl.store(own_lens + request, n, mask=live)
            tl.store(own_starts + request + 1, start + m, mask=request == num_requests - 1)
            tl.store(own_starts + request, start, mask=(request == 0) & (num_requests == 0))
    num_blocks = tl.zeros([1], tl.int64)
    num_units = tl.zeros([1], tl.int64)
    for first in range(0, num_requests, MANY):
        request = first + tl.arange(0, MANY)
        units, _, blocks = _work(starts, lens, request, request < num_requests, rule, C)
        num_blocks += tl.sum(units.to(tl.int64) * blocks, 0)
        num_units += tl.sum(units.to(tl.int64), 0)
    all_blocks = tl.sum(num_blocks, 0)
    all_units = tl.sum(num_units, 0)
    programs = tl.num_programs(0).to(tl.int64)
    if SPLITS > 0:
        used = all_units * SPLITS
        begin = g.to(tl.int64) // SPLITS
        end = begin + 1
    else:
        used = tl.minimum(programs, tl.maximum((all_blocks + C.least - 1) // C.least, 1))
        begin = g * all_blocks // used
        end = (g + 1) * all_blocks // used
    share_at = shares + (w * programs + g) * 2
    tl.store(arrivals + w * programs + g, 0)
    if (g >= used) | (begin >= end):
        tl.store(share_at, 0)
        tl.store(share_at + 1, 0)
    else:
        # Requests wholly before each end of the share, and what they hold, in blocks or in units.
        before = tl.zeros([1], tl.int64)
        done = tl.zeros([1], tl.int64)
        units_before = tl.zeros([1], tl.int64)
        last_done = tl.zeros([1], tl.int64)
        last_units = tl.zeros([1], tl.int64)
        last_blocks = tl.full([1], 1, tl.int64)
        base = tl.zeros([1], tl.int64)
        for first in range(0, num_requests, MANY):
            request = first + tl.arange(0, MANY)
            live = request < num_requests
            units, _, blocks = _work(starts, lens, request, live, rule, C)
            units = units.to(tl.int64)
            size = units * (1 if SPLITS > 0 else blocks)
            after = base + tl.cumsum(size, 0)
            base += tl.sum(size, 0)
            is_before = live & (after <= begin)
            before += tl.sum(is_before.to(tl.int64), 0)
            done += tl.sum(tl.where(is_before, size, 0), 0)
            units_before += tl.sum(tl.where(is_before, units, 0), 0)
            ends_before = live & (after <= end - 1)
            last_done += tl.sum(tl.where(ends_before, size, 0), 0)
            last_units += tl.sum(tl.where(ends_before, units, 0), 0)
            holds = live & (after > end - 1) & (after - size <= end - 1)
            last_blocks += tl.sum(tl.where(holds, blocks - 1, 0), 0)
        r = tl.sum(before, 0).to(tl.int32)
        skipped = begin - tl.sum(done, 0)
        units_done = tl.sum(units_before, 0)
        units, first_block, blocks = _work(starts, lens, r, True, rule, C)
        if SPLITS > 0:
            part = g % SPLITS
            item_at = items + (w * capacity + g) * ITEM
            tl.store(item_at + REQUEST, r)
            tl.store(item_at + UNIT, skipped.to(tl.int32))
            cut = blocks * part // SPLITS
            next_cut = blocks * (part + 1) // SPLITS
            cut = tl.where(cut == next_cut, blocks, cut)  # an empty part begins past all blocks
            tl.store(item_at + BEGIN, first_block + cut)
            tl.store(item_at + END, first_block + tl.maximum(cut, next_cut))
            tl.store(item_at + PARTIAL, tl.where(SPLITS == 1, -1, 2 * g + (part == 0)))
            tl.store(item_at + OPENER, g - part)
            tl.store(item_at + CLOSER, g - part + SPLITS - 1)
            tl.store(share_at, g)
            tl.store(share_at + 1, 1)
        else:
            unit = (skipped // blocks).to(tl.int32)
            at = (skipped % blocks).to(tl.int32)
            last_unit = tl.sum(last_units + (end - 1 - last_done) // last_blocks, 0)
            count = (last_unit - units_done - unit + 1).to(tl.int32)
            item = (units_done + unit + g).to(tl.int32)
            tl.store(share_at, item)
            tl.store(share_at + 1, count)
            origin = begin - at  # the tile's first block
            left = (end - begin).to(tl.int32)
            for k in range(count):
                take = tl.minimum(left, blocks - at)
                item_at = items + (w * capacity + item + k) * ITEM
                tl.store(item_at + REQUEST, r)
                tl.store(item_at + UNIT, unit)
                tl.store(item_at + BEGIN, first_block + at)
                tl.store(item_at + END, first_block + at + take)
                whole = (at == 0) & (take == blocks)
                tl.store(item_at + PARTIAL, tl.where(whole, -1, 2 * g + (at == 0)))
                opener = ((origin + 1) * used - 1) // all_blocks
                closer = ((origin + blocks) * used - 1) // all_blocks
                tl.store(item_at + OPENER, opener.to(tl.int32))
                tl.store(item_at + CLOSER, closer.to(tl.int32))
                origin += blocks
                left -= take
                at = 0
                unit += 1
                if (unit == units) & (k + 1 < count):
                    unit = 0
                    r += 1
                    units, first_block, blocks = _work(starts, lens, r, True, rule, C)
                    while units == 0:
                        r += 1
                        units, first_block, blocks = _work(starts, lens, r, True, rule, C)


@triton.jit(do_not_specialize=["parents", "mask", "stride", "width"])
def draw_trees(parents, starts, mask, stride, width, CHUNK: tl.constexpr):
    """Draft masks from trees: program (request, i) draws the row of the request's new token i.

    Args:
        parents: int32 [T], index of each token's parent among its request's, -1 for none.
        starts: int32 [R + 1].
        mask: bool [T, width] of row stride `stride`: a token sees itself and its ancestors.
        CHUNK: columns at a time.
    """
    request = tl.program_id(0)
    own = tl.program_id(1)
    start = tl.load(starts + request)
    if own < tl.load(starts + request + 1) - start:
        row = mask + (start + own).to(tl.int64) * stride
        for first in range(0, width, CHUNK):
            column = first + tl.arange(0, CHUNK)
            seen = column == own
            node = tl.minimum(tl.load(parents + start + own), own - 1)
            while node >= 0:
                seen = seen | (column == node)
                node = tl.minimum(tl.load(parents + start + node), node - 1)
            tl.store(row + column, seen.to(tl.int8), mask=column < width)
