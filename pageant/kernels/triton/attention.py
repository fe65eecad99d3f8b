"""Attention on any NVIDIA GPU: decodes in equal shares, prefills in tiles; scores never stored.

For the formulas see ``kernels/cpu/attention.py``: they are the same, in powers of 2. A program of
decode walks the items of its share, which ``plan/on_device.py`` listed; what it finds of a tile
that other shares hold keys of is a partial result, and the last of them folds those in ascending
order. A program of prefill computes one tile; the longest come first.

Limits: unit content stride.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from pageant.cache.formats import Format
from pageant.cache.pages import Side
from pageant.kernels.call import AttentionCall
from pageant.kernels.triton import attention_tile as tiles
from pageant.kernels.triton import attention_tile_keys as keys
from pageant.kernels.triton.attention_tile import LOG2_E, Variant, attend, blocks_of, finish
from pageant.kernels.triton.common.widen import PLAIN, kind_of
from pageant.plan.bound import Bound, unchanged
from pageant.plan.device_groups import GroupWork
from pageant.plan.device_plan import DeviceWork
from pageant.plan.inputs import LayerParams
from pageant.plan.on_device import (
    BEGIN,
    CLOSER,
    END,
    ITEM,
    OPENER,
    PARTIAL,
    REQUEST,
    UNIT,
)
from pageant.plan.tiles import Tile, operand_dtype, power_of_2

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Of these no code depends on the value. (Inside tuples it always does.)
FREE = ["table", "table_step", "causal", "mask", "mask_step", "slopes", "sinks", "q_factor"]
FREE += ["k_factor", "value_factor", "num_requests", "threshold"]


@triton.jit
def _place(unit, C: tl.constexpr):
    """A unit's kv head, its first query head in the group, and its first token."""
    PIECES: tl.constexpr = (C.group + C.heads - 1) // C.heads
    piece = unit // C.kv_heads
    return unit % C.kv_heads, piece % PIECES * C.heads, piece // PIECES * C.tokens


@triton.jit
def _joined(parts, opener, closer, exists, C: tl.constexpr):
    """The rows of a tile whose parts lie in the slots of some shares, folded in ascending order.

    Other programs left them, so they are read past the first cache.
    """
    part_out, part_lse = parts
    ROWS: tl.constexpr = C.rows
    VALUES: tl.constexpr = C.padded_value_dim
    i = tl.arange(0, ROWS)
    d = tl.arange(0, VALUES)
    inside = exists[:, None] & (d < C.value_dim)[None, :]
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for share in range(opener, closer + 1):
        slot = 2 * share + (share == opener).to(tl.int32)
        at = slot.to(tl.int64) * ROWS + i
        lse = tl.load(part_lse + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
        out_at = part_out + at[:, None] * C.value_dim + d[None, :]
        out = tl.load(out_at, mask=inside, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        weight = tl.exp2(lse - base)
        acc = acc * decay[:, None] + out * weight[:, None]
        total = total * decay + weight
        peak = new_peak
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    return out, tl.where(peak == float("-inf"), peak, peak + tl.log2(total))


@triton.jit
def _with_prefix(out, lse, request, token, query_head, exists, prefix, C: tl.constexpr):
    """Rows over all their keys, made of those over the keys that their request has alone.

    Args:
        out, lse, token, query_head, exists: as `attend` returns them.
        request: whose rows.
        prefix: skips and shifts (see ``GroupWork``); float32 [rows, Hq, Dv], and [rows, Hq] in
            natural log, of gathered rows over the keys that a group shares.
        C: the variant.
    """
    VALUES: tl.constexpr = C.padded_value_dim
    HEADS: tl.constexpr = C.kv_heads * C.group
    skips, shifts, rows, lses = prefix
    is_shared = exists & (tl.load(skips + request) > 0)
    row = (token + tl.load(shifts + request)) * HEADS + query_head
    d = tl.arange(0, VALUES)
    inside = is_shared[:, None] & (d < C.value_dim)[None, :]
    shared_lse = tl.load(lses + row, mask=is_shared, other=float("-inf")) * LOG2_E
    shared_out = tl.load(rows + row[:, None] * C.value_dim + d[None, :], mask=inside, other=0.0)
    peak = tl.maximum(lse, shared_lse)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    own_weight = tl.exp2(lse - base)
    shared_weight = tl.exp2(shared_lse - base)
    total = own_weight + shared_weight
    some = tl.where(total > 0, total, 1.0)
    merged = (out * own_weight[:, None] + shared_out * shared_weight[:, None]) / some[:, None]
    return merged, tl.where(total > 0, base + tl.log2(some), lse)


@triton.jit(do_not_specialize=FREE)
def _decode(
    q, table, table_step, causal, mask, mask_step, out_to, lse_to, work, parts, gathered, prefix,
    starts, lens, sides, slopes, sinks, numbers, q_factor, k_factor, value_factor, value_scale,
    shard, C: tl.constexpr,
):  # fmt: skip
    """Program g walks share g: items, shares, arrivals; see `plan_step` and `attend`.

    Of the programs that hold parts of a tile, the one that comes last joins them. Rows that are
    `gathered` are of groups, over the keys they share; what came of those is the `prefix` of rows
    over the other keys. See `attend` and `_with_prefix`; None where nothing is shared.
    """
    items, shares, arrivals = work
    part_out, part_lse = parts
    g = tl.program_id(0)
    first = tl.load(shares + g * 2)
    count = tl.load(shares + g * 2 + 1)
    for number in range(first, first + count):
        item = items + number * ITEM
        request = tl.load(item + REQUEST)
        partial = tl.load(item + PARTIAL)
        head, first_head, first_token = _place(tl.load(item + UNIT), C)
        out, lse, token, query_head, exists = attend(
            request, head, first_head, first_token, tl.load(item + BEGIN), tl.load(item + END), q,
            starts, lens, (table, table_step), sides, causal, (mask, mask_step), slopes, numbers,
            (q_factor, k_factor), shard, gathered, C,
        )  # fmt: skip
        if partial < 0:
            if prefix is not None:
                out, lse = _with_prefix(out, lse, request, token, query_head, exists, prefix, C)
            finish(
                out, lse, token, query_head, exists, sinks, value_scale, value_factor, out_to,
                lse_to, C,
            )  # fmt: skip
        else:
            ROWS: tl.constexpr = C.rows
            VALUES: tl.constexpr = C.padded_value_dim
            i = partial.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            d = tl.arange(0, VALUES)
            at = part_out + i[:, None] * C.value_dim + d[None, :]
            tl.store(at, out, mask=exists[:, None] & (d < C.value_dim)[None, :])
            tl.store(part_lse + i, lse, mask=exists)
            opener = tl.load(item + OPENER)
            closer = tl.load(item + CLOSER)
            tl.debug_barrier()  # all threads have stored
            arrived = tl.atomic_add(arrivals + opener, 1, sem="acq_rel")
            if arrived == closer - opener:
                tl.store(arrivals + opener, 0)
                joined, joined_lse = _joined(parts, opener, closer, exists, C)
                if prefix is not None:
                    joined, joined_lse = _with_prefix(
                        joined, joined_lse, request, token, query_head, exists, prefix, C
                    )
                finish(
                    joined, joined_lse, token, query_head, exists, sinks, value_scale,
                    value_factor, out_to, lse_to, C,
                )  # fmt: skip


@triton.jit(do_not_specialize=FREE)
def _prefill(
    q, table, table_step, causal, mask, mask_step, out_to, lse_to, num_requests, threshold, starts,
    lens, sides, slopes, sinks, numbers, q_factor, k_factor, value_factor, value_scale, shard,
    C: tl.constexpr,
):  # fmt: skip
    """Program (tile, unit): the tiles of a request begin at number starts[r] // tokens + r."""
    TOKENS: tl.constexpr = C.tokens
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) // TOKENS + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    start = tl.load(starts + low)
    num_new = tl.load(starts + low + 1) - start
    first_token = (tile - start // TOKENS - low) * TOKENS
    if (num_new > threshold) & (first_token < num_new):
        head, first_head, _ = _place(tl.program_id(1), C)
        begin, end = blocks_of(low, first_token, starts, lens, numbers[2], causal, shard, C)
        out, lse, token, query_head, exists = attend(
            low, head, first_head, first_token, begin, end, q, starts, lens, (table, table_step),
            sides, causal, (mask, mask_step), slopes, numbers, (q_factor, k_factor), shard, None, C,
        )  # fmt: skip
        finish(
            out,
            lse,
            token,
            query_head,
            exists,
            sinks,
            value_scale,
            value_factor,
            out_to,
            lse_to,
            C,
        )


def run_decode(call: AttentionCall) -> None:
    """Attend to the rows of the requests that decode."""
    _ready(call, _Decode)(call)


def run_shared(_kernel: object, groups: GroupWork, call: AttentionCall) -> None:
    """Attend to the rows of decodes of which some share keys: over those, then over their own."""
    rows = call.workspace.shared
    assert rows is not None
    gathered = replace(
        call,
        out=rows.partial_out,
        lse=rows.partial_lse,
        query_start_loc=groups.starts,
        key_lens=groups.lens,
        causal=False,
        draft_mask=None,
        params=replace(call.params, window=None, sinks=None, value_scale=1.0, value_factor=None),
        work=groups.work,
    )
    _ready(gathered, _Decode, groups)(gathered)
    _ready(call, _Decode, groups)(call)


def run_prefill(call: AttentionCall) -> None:
    """Attend to the rows of the requests that do not decode."""
    _ready(call, _Prefill)(call)


def _ready(call: AttentionCall, phase: type[_Phase], groups: GroupWork | None = None) -> _Phase:
    """The phase's launches for such a call, made at the first one."""
    kind: tuple[Any, ...] = (phase, groups, call.work, _causality(call))
    # An fp8 query is converted by torch, which packs some: its strides are not the caller's.
    kind += (call.draft_mask is None, call.lse is None, call.q.stride())
    if kind not in call.kept:
        call.kept[kind] = phase(call, groups)
    ready: _Phase = call.kept[kind]
    return ready


def _causality(call: AttentionCall) -> int:
    if isinstance(call.causal, torch.Tensor):
        return int(tiles.CAUSAL_BY_REQUEST.value)
    return int(tiles.CAUSAL.value if call.causal else tiles.NON_CAUSAL.value)


class _Phase:
    """What every call of one kind has in common: its code, and the arguments that stay."""

    in_parts: bool

    def __init__(self, call: AttentionCall, groups: GroupWork | None) -> None:
        self.groups = groups
        params, cache, work = call.params, call.cache, call.work
        self.tile: Tile = work.tile
        self.variant = _variant(call, self.tile, in_parts=self.in_parts)
        self.strides = call.q.stride()[:2], call.out.stride()[:2]
        self.lse_strides = (0, 0) if call.lse is None else call.lse.stride()
        self.layer = (
            tuple([_side(side, cache.format) for side in cache.sides]),
            params.alibi_slopes,
            params.sinks,
            (params.score_scale, params.soft_cap or 1.0, params.window or 0),
            *params.score_factors,
            params.value_factor,
            params.value_scale,
            (call.shard.rank, call.shard.interleave),
            self.variant,
        )
        self.bind(call)

    def bind(self, call: AttentionCall) -> None:
        """Compile for such a call."""
        raise NotImplementedError

    def __call__(self, call: AttentionCall) -> None:
        """Launch."""
        raise NotImplementedError

    def rows(self, call: AttentionCall, raw: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The arguments from q to mask_step."""
        table, causal, mask = call.page_table, call.causal, call.draft_mask
        return (
            (raw(call.q), *self.strides[0]),
            raw(table),
            table.stride(0),
            raw(causal) if isinstance(causal, torch.Tensor) else None,
            *((None, 0) if mask is None else (raw(mask.view(torch.uint8)), mask.stride(0))),
        )

    def results(self, call: AttentionCall, raw: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The arguments out_to and lse_to."""
        return (raw(call.out), *self.strides[1]), (raw(call.lse), *self.lse_strides)


class _Decode(_Phase):
    in_parts = False

    def bind(self, call: AttentionCall) -> None:
        """Compile the walk over the shares."""
        work: DeviceWork = call.work
        parts = (call.workspace.partial_out, call.workspace.partial_lse)
        lists = (work.items, work.shares, work.arrivals)
        shared = self._shared(call)
        args = (lists, parts, *shared, call.query_start_loc, call.key_lens, *self.layer)
        self.walk = Bound(
            _decode, (*self.rows(call, unchanged), *self.results(call, unchanged), *args),
            call.q.device, num_warps=_walkers(self.tile, self.variant),
            num_stages=_ahead(self.tile, self.variant),
        )  # fmt: skip
        self.args, self.grid = self.walk.raw(args), (work.shares.shape[0], 1, 1)

    def __call__(self, call: AttentionCall) -> None:
        raw = self.walk.raw
        self.walk(self.grid, *self.rows(call, raw), *self.results(call, raw), *self.args)

    def _shared(self, call: AttentionCall) -> tuple[Any, Any]:
        """The arguments gathered and prefix."""
        groups, rows = self.groups, call.workspace.shared
        if groups is None or rows is None:
            return None, None
        if call.work is groups.work:
            return (groups.tokens, groups.positions), None
        return None, (groups.skips, groups.shifts, rows.partial_out, rows.partial_lse)


def _walkers(tile: Tile, variant: Variant) -> int:
    """Warps of a decode: more than the tile has where their registers would not hold everything."""
    is_widened = variant.kind != PLAIN.value
    bends_scores = variant.cap or variant.alibi
    if variant.draft_mask and (variant.window or bends_scores):
        return max(8, tile.warps)
    if is_widened and tile.rows >= 64:  # a tile of prefill, over keys that requests share
        return max(8, tile.warps)
    return max(4, tile.warps) if is_widened or variant.draft_mask or bends_scores else tile.warps


def _ahead(tile: Tile, variant: Variant) -> int:
    """Blocks of keys on their way in a decode: one where the scores leave no registers for more."""
    return 1 if tile.rows >= 128 and variant.cap and variant.alibi else tile.stages


class _Prefill(_Phase):
    in_parts = True

    def bind(self, call: AttentionCall) -> None:
        """Compile the tiles."""
        args = (call.work.threshold, call.query_start_loc, call.key_lens, *self.layer)
        rows, results = self.rows(call, unchanged), self.results(call, unchanged)
        self.tiles = Bound(
            _prefill, (*rows, *results, len(call.key_lens), *args), call.q.device,
            num_warps=self.tile.warps, num_stages=self.tile.stages,
        )  # fmt: skip
        self.args = self.tiles.raw(args)
        self.units = self.variant.kv_heads * -(-self.variant.group // self.variant.heads)

    def __call__(self, call: AttentionCall) -> None:
        raw, requests = self.tiles.raw, len(call.key_lens)
        grid = (call.work.num_tokens // self.tile.tokens + requests, self.units, 1)
        self.tiles(grid, *self.rows(call, raw), *self.results(call, raw), requests, *self.args)


def _variant(call: AttentionCall, tile: Tile, *, in_parts: bool) -> Variant:
    """What is compiled into the code for such a call."""
    params, fmt, values = call.params, call.cache.format, call.cache.sides[1]
    _, page_size, kv_heads, _ = call.cache.k.shape
    heads, dim = call.q.shape[1:]
    value_dim = call.out.shape[2]
    scales = keys.NO_SCALES if fmt.scale_dtype is None else keys.ROW_SCALES
    if fmt.scale_block:
        scales = keys.BLOCK_SCALES
    dtype = operand_dtype(call.q.dtype, fmt)
    least = 2 * fmt.scale_block or 16  # Triton 3.6 mixes up scales if a row has one block
    return Variant(
        tokens=tile.tokens,
        heads=tile.heads,
        rows=tile.rows,
        block=tile.block,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        page_size=page_size,
        dim=dim,
        padded_dim=max(least, power_of_2(dim)),
        value_dim=value_dim,
        padded_value_dim=max(least, 64 if tile.rows >= 64 else 0, power_of_2(value_dim)),
        kind=kind_of(fmt),
        native=tile.native_fp8,
        scales=scales.value,
        value_scales=(keys.SWIZZLED_SCALES if values.is_swizzled else scales).value,
        dtype=DTYPES[dtype],
        as_is=dtype == call.q.dtype and _is_positive(params),
        causal=_causality(call),
        draft_mask=call.draft_mask is not None,
        window=params.window is not None,
        cap=params.soft_cap is not None,
        alibi=params.alibi_slopes is not None,
        world=call.shard.world,
        in_parts=in_parts,
        is_far=call.cache.is_far,
    )


def _is_positive(params: LayerParams) -> bool:
    """Whether the host knows that the factor on scores is above 0, in float32 too."""
    return params.score_factors == (None, None) and params.score_scale >= 1e-30


def _side(side: Side, fmt: Format) -> tuple[Any, ...]:
    """Keys or values as `attend` takes them."""
    elements, scales, _ = side
    if fmt.bits <= 8 and fmt.exponent_bits:
        elements = elements.view(torch.uint8)
    if scales is None:
        return elements, None, elements.stride()[:3], (0, 0, 0)
    stored = scales.view(torch.uint8) if fmt.scale_block else scales
    return elements, stored, elements.stride()[:3], scales.stride()[:3]
