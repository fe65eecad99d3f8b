"""Attention on the CPU: few query rows at a time read each page, in the order it lies in memory.

For row i of a request with m new tokens and n keys, at position p = n - m + i, and query head h:

    s_j = score_scale * (q . k_j);  s = cap * tanh(s / cap);  s = s + slope_h * (j - p);  mask
    out = value_scale * sum_j e^(s_j - max) v_j / sum_j e^(s_j - max);  lse = max + ln sum

An item of the work list is a few rows of a request and a range of its keys. Keys go by in tiles:
the scores of every head, the softmax, then the values. Within a tile, a few rows of K (or V) at a
time are widened into a float32 buffer and used by all rows that share the head, so the cache is
read once whatever the group. Blocks follow memory, heads inside tokens where a token's heads lie
together and tokens inside heads otherwise, and are asked for ahead of their use. A scale stored for
a whole row multiplies the key's score and the value's weight; one stored for a block of elements
multiplies them as they are widened. An item that is a part of a request leaves a normalised part
and its lse in the workspace; `merge` folds the parts in ascending order. The sink enters once, when
a row is finished.

Layout: a cache is a flat array of its storage type and 64-bit strides, so all strides work and only
three variants are compiled (in ``attention_walk.py``): uint8, uint16 and float32 storage.

Limits: unit content stride; a work list names consecutive requests; scores, and sums of a row's
values, are numbers that float32 holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from pageant.cache.formats import FORMATS, Format
from pageant.cache.pages import Side
from pageant.cache.quantize import decode
from pageant.kernels.call import AttentionCall
from pageant.kernels.cpu import attention_walk as walk
from pageant.kernels.cpu.common import Array, as_float32, copy, flat, float32_rows, run_shares
from pageant.plan.work import KEY_BEGIN, KEY_END, QUERY_END, REQUEST

# Elements of K and V, for each row; below, torch's threads that still spin eat the gain.
THREAD_READS = 1 << 22
PIECES = 4  # of the work, for each thread
UNBOUNDED = 1 << 62
Sides = tuple[tuple[Any, ...], tuple[Any, ...]]  # keys and values as `walk` takes them
Share = tuple[Array, int, int]  # items, first kv head, last
NONE, NO_BYTES = np.empty(0, np.float32), np.empty(0, np.uint8)
NO_STEPS, NO_MASK = np.empty(0, np.uint64), np.empty((0, 0), np.bool_)
TABLE = decode(torch.arange(256, dtype=torch.uint8), None, FORMATS["fp8_e4m3"]).numpy()


def run(
    call: AttentionCall,
    common: AttentionCall | None = None,
    hand_out: Callable[[], None] | None = None,
) -> None:
    """Attend to every row the work list names; rows of other requests are not touched.

    Args:
        call: what to compute.
        common: to be computed beside it, over the same cache, and finished first; or None.
        hand_out: called then, to put results of `common` where `call` merges them.
    """
    _run(call, common, hand_out)


def run_invariant(call: AttentionCall) -> None:
    """The same, and what is computed for a row depends on the row and the keys it sees alone.

    Tiles of keys begin at multiples of KEY_TILE, whatever the window; no row's keys are split:
    threads share heads; and every row, one of two or of four, goes through the same sums.
    """
    _run(call, is_invariant=True)


def _run(
    call: AttentionCall,
    common: AttentionCall | None = None,
    hand_out: Callable[[], None] | None = None,
    *,
    is_invariant: bool = False,
) -> None:
    if call.work.counts[0] == 0:
        return
    sides = _sides(call)
    own = _make_ready(call, sides, is_invariant=is_invariant)
    if common is None or hand_out is None:
        _walk_all([own])
    else:
        shared = _make_ready(common, sides)
        _walk_all([shared, own])
        shared.finish()
        hand_out()
    own.finish()


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A call with work as compiled code takes it, to be walked and then finished.

    Attributes:
        items: int64 [items, 6], of the work list.
        heads: of keys and values.
        row_reads: elements of K and V that one row reads of one key, in all heads.
        workers: how many threads may walk.
        walked: what `walk` takes after a share.
        finish: merges parts, and puts rows where the caller wants them.
    """

    items: Array
    heads: int
    row_reads: int
    workers: int
    walked: tuple[Any, ...]
    finish: Callable[[], None]


def _make_ready(call: AttentionCall, sides: Sides, *, is_invariant: bool = False) -> _Ready:
    """Prepare a call; `sides` are those of its cache, which several calls may have in common."""
    work = call.work
    num_items, num_groups = work.counts.tolist()
    items, first_token = work.items[:num_items], call.query_start_loc.numpy()
    first, last = items[0, REQUEST], items[-1, REQUEST] + 1
    tokens = slice(int(first_token[first]), int(first_token[last]))
    out = float32_rows(call.out, tokens.stop)
    wanted = torch.empty(out.shape[:2]) if call.lse is None else call.lse
    lse = float32_rows(wanted, tokens.stop)
    sinks = call.params.sinks
    results = (NONE if sinks is None else sinks.contiguous().numpy(), out.numpy(), lse.numpy())
    parts = (call.workspace.partial_out.numpy(), call.workspace.partial_lse.numpy())

    def finish() -> None:
        if num_groups:
            walk.merge(work.groups[:num_groups], first_token, *parts, *results)
        if out is not call.out:
            copy(call.out[tokens], out[tokens])
        if lse is not wanted:
            copy(wanted[tokens], lse[tokens])

    heads, size = call.cache.k.shape[2:]
    return _Ready(
        items=items,
        heads=heads,
        row_reads=heads * (size + call.cache.v.shape[3]),
        workers=len(work.share_start) - 1,
        walked=(*_constants(call, sides, tokens.stop, is_invariant), *results, *parts),
        finish=finish,
    )


def _walk_all(calls: Sequence[_Ready]) -> None:
    """Walk the items of all calls, in several threads where that is worth it."""
    ends = [
        np.cumsum((call.items[:, KEY_END] - call.items[:, KEY_BEGIN]) * call.items[:, QUERY_END])
        for call in calls
    ]
    pairs, workers = list(zip(calls, ends, strict=True)), calls[0].workers
    if sum(int(end[-1]) * call.row_reads for call, end in pairs) < THREAD_READS:
        workers = 1
    pieces = 1 if workers == 1 else PIECES * workers // len(calls)
    tasks = [(call, share) for call, end in pairs for share in _shares(call, end, pieces)]
    run_shares(_walk_share, tasks, workers)


def _walk_share(task: tuple[_Ready, Share]) -> None:
    call, share = task
    walk.walk(share, *call.walked)


def _shares(call: _Ready, ends: Array, pieces: int) -> list[Share]:
    """Pieces of about equal work.

    ends: int64 [items], the work of all items up to and with each.
    """
    items, heads = call.items, call.heads
    if pieces == 1:
        return [(items, 0, heads)]
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) // pieces).tolist()
    bounds = sorted({0, *cuts, len(items)})
    parts = min(heads, -(-pieces // (len(bounds) - 1)))
    edges = [heads * part // parts for part in range(parts + 1)]
    pairs = itertools.product(itertools.pairwise(bounds), itertools.pairwise(edges))
    return [(items[a:b], first, last) for (a, b), (first, last) in pairs]


def _sides(call: AttentionCall) -> Sides:
    """Of the call's cache."""
    keys, values = call.cache.sides
    fmt = call.cache.format
    return _side(keys, fmt, call.q.shape[2]), _side(values, fmt, call.out.shape[2])


def _constants(
    call: AttentionCall, sides: Sides, num_tokens: int, is_invariant: bool
) -> tuple[Any, ...]:
    """What `walk` reads, from first_token to slopes."""
    params, mask, causal = call.params, call.draft_mask, call.causal
    factor = _too_small(call.cache.format)
    return (
        call.query_start_loc.numpy(),
        call.key_lens.numpy(),
        flat(call.page_table),
        _geometry(call, is_invariant),
        *sides,
        as_float32(call.q[:num_tokens]).numpy(),
        np.full(len(call.key_lens), causal) if isinstance(causal, bool) else causal.numpy(),
        NO_MASK if mask is None else mask.contiguous().numpy(),
        np.array(
            (params.score_scale * factor, params.value_scale * factor, params.soft_cap or 0.0),
            np.float32,
        ),
        NONE if params.alibi_slopes is None else params.alibi_slopes.contiguous().numpy(),
    )


def _geometry(call: AttentionCall, is_invariant: bool) -> Array:
    """int64, in the order in which `walk` unpacks it."""
    _, page_size, heads, _ = call.cache.k.shape
    strides, window = call.cache.k.stride(), call.params.window
    heads_inside = heads == 1 or strides[2] < strides[1]
    window = UNBOUNDED if window is None else window
    table_stride = call.page_table.stride(0)
    numbers = (heads, page_size, table_stride, window, heads_inside, is_invariant)
    shard = call.shard
    return np.array((*numbers, shard.rank, shard.world, shard.interleave), np.int64)


def _side(side: Side, fmt: Format, head_dim: int) -> tuple[Any, ...]:
    """Keys or values as `walk` takes them: geometry, order, and what is stored.

    geometry: int64, strides of a page and of a token, of elements and of scales; whether the scales
    are swizzled; strides of a head, of both. order: int64 [D], where a widened row has each
    element. Stored: elements; one scale a row, float32, or a block, uint8; the value of each byte
    that is a scale; uint64 [blocks], a block's scale from its row's first; int64 (storage units a
    row, kind, strides of a head).
    """
    elements, scales, is_swizzled = side
    strides = elements.stride()
    scale_strides = (0, 0, 0) if scales is None else scales.stride()[:3]
    order, steps, row_scales, block_scales = np.arange(head_dim), NO_STEPS, NONE, NO_BYTES
    if scales is not None and fmt.scale_block:
        order = order // 2 + order % 2 * (head_dim // 2)
        block_scales, steps = flat(scales), np.arange(scales.shape[3], dtype=np.uint64)
        if is_swizzled:
            steps = steps // (len(steps) // 4) * scale_strides[1] + steps % (len(steps) // 4) * 4
            steps = steps.astype(np.uint64)
    elif scales is not None:
        row_scales = flat(scales)
    geometry = (*strides[:2], *scale_strides[:2], is_swizzled, strides[2], scale_strides[2])
    numbers = (elements.shape[3], _kind(fmt), strides[2], scale_strides[2])
    return (
        np.array(geometry, np.int64),
        order,
        (flat(elements), row_scales, block_scales, TABLE, steps, np.array(numbers, np.int64)),
    )


@lru_cache
def _kind(fmt: Format) -> int:
    """How `walk` widens the format.

    >>> _kind(FORMATS["bf16"]) == walk.UPPER_HALF, _kind(FORMATS["int8"]) == walk.INTEGER
    (True, True)
    """
    kinds = {
        (32, 8): walk.FLOAT,
        (16, 8): walk.UPPER_HALF,
        (16, 5): walk.HALF,
        (8, 5): walk.HALF,
        (8, 4): walk.E4M3,
        (8, 0): walk.INTEGER,
        (4, 2): walk.E2M1,
    }
    return kinds[fmt.bits, fmt.exponent_bits]


@lru_cache
def _too_small(fmt: Format) -> float:
    """What widened values are multiplied by later; their exponents are biased as float16's are.

    >>> _too_small(FORMATS["fp8_e4m3"]), _too_small(FORMATS["nvfp4"]), _too_small(FORMATS["fp16"])
    (256.0, 16384.0, 1.0)
    """
    if fmt.exponent_bits in (0, 8):
        return 1.0
    return 2.0 ** (16 - (1 << fmt.exponent_bits - 1))
