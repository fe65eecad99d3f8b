"""Attention on any NVIDIA GPU: decodes in equal shares, prefills in tiles; scores never stored.

For the formulas see ``kernels/cpu/attention.py``: they are the same, in powers of 2. A program of
decode walks the items of its share, which ``plan/on_device.py`` listed; what it finds of a tile
that other shares hold keys of is a partial result, and `_join` folds those in ascending order. A
program of prefill computes one tile; the longest come first.

Limits: unit content stride.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pageant.cache.formats import Format
from pageant.cache.pages import Side
from pageant.kernels.call import AttentionCall
from pageant.kernels.triton import attention_tile as tiles
from pageant.kernels.triton.attention_tile import Variant, attend, blocks_of, finish
from pageant.kernels.triton.common.widen import kind_of
from pageant.plan.device_plan import DeviceWork
from pageant.plan.on_device import BEGIN, END, ITEM, JOIN, PARTIAL, REQUEST, UNIT
from pageant.plan.tiles import Tile, operand_dtype, power_of_2

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
VARYING = ["num_requests", "out_to", "lse_to", "pages"]


@triton.jit
def _place(unit, C: tl.constexpr):
    """A unit's kv head, its first query head in the group, and its first token."""
    PIECES: tl.constexpr = (C.group + C.heads - 1) // C.heads
    piece = unit // C.kv_heads
    return unit % C.kv_heads, piece % PIECES * C.heads, piece // PIECES * C.tokens


@triton.jit(do_not_specialize=VARYING)
def _decode(
    work, q, starts, lens, pages, sides, causal, masks, slopes, sinks, numbers, factors,
    value_scale, shard, out_to, lse_to, parts, C: tl.constexpr,
):  # fmt: skip
    """Program g walks share g: items, shares; see `plan_step` and `attend`."""
    items, shares = work
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
            starts, lens, pages, sides, causal, masks, slopes, numbers, (factors[0], factors[1]),
            shard, C,
        )  # fmt: skip
        if partial < 0:
            finish(
                out, lse, token, query_head, exists, sinks, value_scale, factors[2], out_to,
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


@triton.jit(do_not_specialize=VARYING)
def _join(work, starts, sinks, factors, value_scale, out_to, lse_to, parts, C: tl.constexpr):
    """Program g joins the parts of the tile that share g continues, if it is the first to."""
    items, joins = work
    part_out, part_lse = parts
    ROWS: tl.constexpr = C.rows
    VALUES: tl.constexpr = C.padded_value_dim
    HEADS: tl.constexpr = C.heads
    g = tl.program_id(0)
    number = tl.load(joins + g * JOIN)
    if number >= 0:
        opener = tl.load(joins + g * JOIN + 1)
        closer = tl.load(joins + g * JOIN + 2)
        item = items + number * ITEM
        request = tl.load(item + REQUEST)
        head, first_head, first_token = _place(tl.load(item + UNIT), C)
        start = tl.load(starts + request)
        num_new = tl.load(starts + request + 1) - start
        i = tl.arange(0, ROWS)
        own = first_token + i // HEADS
        within = first_head + i % HEADS
        exists = (i < C.tokens * HEADS) & (own < num_new) & (within < C.group)
        d = tl.arange(0, VALUES)
        inside = exists[:, None] & (d < C.value_dim)[None, :]
        acc = tl.zeros([ROWS, VALUES], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for share in range(opener, closer + 1):
            slot = 2 * share + (share == opener).to(tl.int32)
            at = slot.to(tl.int64) * ROWS + i
            lse = tl.load(part_lse + at, mask=exists, other=float("-inf"))
            out = tl.load(part_out + at[:, None] * C.value_dim + d[None, :], mask=inside, other=0.0)
            new_peak = tl.maximum(peak, lse)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay = tl.exp2(peak - base)
            weight = tl.exp2(lse - base)
            acc = acc * decay[:, None] + out * weight[:, None]
            total = total * decay + weight
            peak = new_peak
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        lse = tl.where(peak == float("-inf"), peak, peak + tl.log2(total))
        token = (start + own).to(tl.int64)
        finish(
            out, lse, token, head * C.group + within, exists, sinks, value_scale, factors[2],
            out_to, lse_to, C,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _prefill(
    q, starts, lens, pages, sides, causal, masks, slopes, sinks, numbers, factors, value_scale,
    shard, out_to, lse_to, num_requests, threshold, C: tl.constexpr,
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
            low, head, first_head, first_token, begin, end, q, starts, lens, pages, sides, causal,
            masks, slopes, numbers, (factors[0], factors[1]), shard, C,
        )  # fmt: skip
        finish(
            out, lse, token, query_head, exists, sinks, value_scale, factors[2], out_to, lse_to, C
        )


def run_decode(call: AttentionCall) -> None:
    """Attend to the rows of the requests that decode."""
    work: DeviceWork = call.work
    tile, shared, variant = _arguments(call, work.tile, in_parts=False)
    parts = (call.workspace.partial_out, call.workspace.partial_lse)
    grid = (work.shares.shape[0],)
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
    _decode[grid]((work.items, work.shares), *shared, *_results(call), parts, variant, **options)
    _join[grid](
        (work.items, work.joins), call.query_start_loc, call.params.sinks, shared[-3], shared[-2],
        *_results(call), parts, variant, num_warps=4,
    )  # fmt: skip


def run_prefill(call: AttentionCall) -> None:
    """Attend to the rows of the requests that do not decode."""
    work: DeviceWork = call.work
    tile, shared, variant = _arguments(call, work.tile, in_parts=True)
    requests = len(call.key_lens)
    units = variant.kv_heads * -(-variant.group // variant.heads)
    _prefill[(work.num_tokens // tile.tokens + requests, units)](
        *shared, *_results(call), requests, work.threshold, variant,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _results(call: AttentionCall) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where rows go, with strides of token and head: outputs, and lse."""
    lse = (None, 0, 0) if call.lse is None else (call.lse, *call.lse.stride())
    return (call.out, *call.out.stride()[:2]), lse


def _arguments(
    call: AttentionCall, tile: Tile, *, in_parts: bool
) -> tuple[Tile, tuple[Any, ...], Variant]:
    """What both kernels are given, from q to shard, and what is compiled into them."""
    params, cache, mask = call.params, call.cache, call.draft_mask
    fmt = cache.format
    keys, values = cache.sides
    by_request = isinstance(call.causal, torch.Tensor)
    _, page_size, kv_heads, _ = cache.k.shape
    heads, dim = call.q.shape[1:]
    value_dim = call.out.shape[2]
    by_row = tiles.ROW_SCALES.value if fmt.scale_dtype is not None else tiles.NO_SCALES.value
    scales = tiles.BLOCK_SCALES.value if fmt.scale_block else by_row
    causal = tiles.CAUSAL_BY_REQUEST if by_request else tiles.CAUSAL
    least = 2 * fmt.scale_block or 16  # Triton 3.6 mixes up scales if a row has one block
    variant = Variant(
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
        scales=scales,
        value_scales=tiles.SWIZZLED_SCALES.value if values.is_swizzled else scales,
        dtype=DTYPES[operand_dtype(call.q.dtype, fmt)],
        causal=(tiles.NON_CAUSAL if call.causal is False else causal).value,
        draft_mask=mask is not None,
        window=params.window is not None,
        cap=params.soft_cap is not None,
        alibi=params.alibi_slopes is not None,
        world=call.shard.world,
        in_parts=in_parts,
    )
    shared = (
        (call.q, *call.q.stride()[:2]),
        call.query_start_loc,
        call.key_lens,
        (call.page_table, call.page_table.stride(0), cache.num_pages),
        (_side(keys, fmt), _side(values, fmt)),
        call.causal if by_request else None,
        None if mask is None else (mask.view(torch.uint8), mask.stride(0)),
        params.alibi_slopes,
        params.sinks,
        (params.score_scale, params.soft_cap or 1.0, params.window or 0),
        (*params.score_factors, params.value_factor),
        params.value_scale,
        (call.shard.rank, call.shard.interleave),
    )
    return tile, shared, variant


def _side(side: Side, fmt: Format) -> tuple[Any, ...]:
    """Keys or values as `attend` takes them."""
    elements, scales, _ = side
    if fmt.bits <= 8 and fmt.exponent_bits:
        elements = elements.view(torch.uint8)
    if scales is None:
        return elements, None, elements.stride()[:3], (0, 0, 0)
    stored = scales.view(torch.uint8) if fmt.scale_block else scales
    return elements, stored, elements.stride()[:3], scales.stride()[:3]
