"""Decodes on Hopper: pages come by TMA, a warp a kv head multiplies, parts are joined afterwards.

For the formulas see ``kernels/cpu/attention.py``: they are the same, in powers of 2. A program
walks the items of its share, which ``plan/on_device.py`` listed, one after the other through one
ring of stages; see ``decode_attend.py``. Parts of a tile that several shares hold keys of are
joined by the program that comes last. Where tiles are few, one of them has a hundred parts, too
much for one program: then a second, small launch joins, whose programs each take a slice of the
tile that goes on into their share.

Limits: strides and addresses of the cache are multiples of 16 bytes; scales stored with a page lie
token by token for each head. The portable kernel takes over where those of a wrapped cache do not.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pageant.cache.formats import Format
from pageant.cache.pages import Side
from pageant.kernels.call import AttentionCall
from pageant.kernels.gluon.common.boxes import (
    box_layout,
    row_scales_view,
    rows_view,
    scales_view,
)
from pageant.kernels.gluon.common.replan import Replanned
from pageant.kernels.gluon.common.variant import (
    BLOCK_SCALES,
    CAUSAL,
    CAUSAL_BY_REQUEST,
    NO_SCALES,
    NON_CAUSAL,
    ROW_SCALES,
    Variant,
)
from pageant.kernels.gluon.common.widen import E2M1, E4M3, E5M2, INTEGER, PLAIN
from pageant.kernels.gluon.decode_attend import attend_all
from pageant.kernels.gluon.decode_copy import copy_ahead
from pageant.kernels.gluon.decode_join import join_parts
from pageant.plan.bound import Bound, unchanged
from pageant.plan.device_groups import GroupWork
from pageant.plan.device_plan import DeviceWork
from pageant.plan.hopper_tiles import HopperTile
from pageant.plan.tiles import power_of_2

COPIER_REGISTERS = gl.constexpr(40)
# Of these no code depends on the value. (Inside tuples it always does.)
FREE = [
    "joins",
    "table",
    "table_step",
    "causal",
    "mask",
    "mask_step",
    "slopes",
    "sinks",
    "q_factor",
]
FREE += ["k_factor", "value_factor"]
OPERANDS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
ELEMENTS = {**OPERANDS, torch.int8: gl.int8, torch.int16: gl.int16, torch.float32: gl.float32}
ALIGNED = 16  # bytes, of what a copy reads
JOINERS = 4  # programs that join tiles, for each share
FEW_PARTS = 4  # of a tile, on average, which the program that comes last joins
BOX_BYTES = 128  # where a copy may write, in multiples


@gluon.jit(do_not_specialize=FREE)
def _decode(
    keys, values, key_scales, value_scales, q, table, table_step, causal, mask, mask_step, out_to,
    lse_to, work, joins, parts, starts, lens, slopes, sinks, numbers, q_factor, k_factor,
    value_factor, value_scale, shard, C: gl.constexpr,
):  # fmt: skip
    """Program g walks share g; see `copy_ahead` and `attend_all` for the arguments."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    W: gl.constexpr = C.warps
    T: gl.constexpr = C.tokens
    BOXES: gl.constexpr = C.stages * C.boxes
    key_boxes = gl.allocate_shared_memory(
        keys.dtype, [BOXES, 1, C.kv_heads, C.box, C.words], keys.layout
    )
    value_boxes = gl.allocate_shared_memory(
        values.dtype, [BOXES, 1, C.kv_heads, C.box, C.value_words], values.layout
    )
    key_view = key_boxes._reinterpret(
        keys.dtype,
        [C.stages, W, T, C.words],
        rows_view(C.kv_heads, C.groups, T, C.box, C.words, 2),
    )
    value_view = value_boxes._reinterpret(
        values.dtype,
        [C.stages, W, T, C.value_words],
        rows_view(C.kv_heads, C.groups, T, C.box, C.value_words, 2),
    )
    if C.scales == BLOCK_SCALES:
        key_scale_boxes = gl.allocate_shared_memory(
            key_scales.dtype, [BOXES, 1, C.kv_heads, C.box * C.blocks], key_scales.layout
        )
        value_scale_boxes = gl.allocate_shared_memory(
            value_scales.dtype, [BOXES, 1, C.kv_heads, C.box * C.value_blocks], value_scales.layout
        )
        key_scale_view = key_scale_boxes._reinterpret(
            gl.int32,
            [C.stages, W, T, C.blocks // 4],
            scales_view(C.kv_heads, C.groups, T, C.box, C.blocks),
        )
        value_scale_view = value_scale_boxes._reinterpret(
            gl.int32,
            [C.stages, W, T, C.value_blocks // 4],
            scales_view(C.kv_heads, C.groups, T, C.box, C.value_blocks),
        )
    elif C.scales == ROW_SCALES:
        SCALES: gl.constexpr = row_scales_view(C.kv_heads, C.groups, T, C.box)
        key_scale_boxes = gl.allocate_shared_memory(
            key_scales.dtype, [BOXES, 1, C.kv_heads, C.box], key_scales.layout
        )
        value_scale_boxes = gl.allocate_shared_memory(
            value_scales.dtype, [BOXES, 1, C.kv_heads, C.box], value_scales.layout
        )
        key_scale_view = key_scale_boxes._reinterpret(gl.float32, [C.stages, W, T], SCALES)
        value_scale_view = value_scale_boxes._reinterpret(gl.float32, [C.stages, W, T], SCALES)
    else:
        key_scale_boxes, value_scale_boxes = key_boxes, value_boxes
        key_scale_view, value_scale_view = key_view, value_view
    if C.stores_queries:
        PLANE: gl.constexpr = [C.planes, W, C.columns, C.words]
        queries = gl.allocate_shared_memory(C.dtype, PLANE, box_layout(PLANE[1:], C.dtype))
    else:
        queries = key_view
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [C.stages, 1], BARRIER)
    STAGES: gl.constexpr = C.stages
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_all, (
                (key_view, value_view, key_scale_view, value_scale_view, queries), full, empty, q,
                out_to, lse_to, work, joins, parts, starts, lens, causal, (mask, mask_step),
                slopes, sinks, numbers, (q_factor, k_factor), value_scale, value_factor, shard, C,
            )),
            (copy_ahead, (
                keys, values, key_scales, value_scales, key_boxes, value_boxes, key_scale_boxes,
                value_scale_boxes, full, empty, table, table_step, work[0], work[1], lens, shard, C,
            )),
        ],
        [1],
        [COPIER_REGISTERS],
    )  # fmt: skip


def run_decode(call: AttentionCall) -> None:
    """Attend to the rows of the requests that decode."""
    by_request = isinstance(call.causal, torch.Tensor)
    kind: tuple[Any, ...] = (_Ready, call.work, by_request or call.causal)
    # An fp8 query is converted by torch, which packs some: its strides are not the caller's.
    kind += (by_request, call.draft_mask is None, call.lse is None, call.q.stride())
    if kind not in call.kept:
        call.kept[kind] = _Ready(call) if can_copy(call) else _elsewhere(call)
    call.kept[kind](call)


def run_shared(_kernel: object, groups: GroupWork, call: AttentionCall) -> None:
    """Attend to the rows of decodes of which some share keys, by the portable kernel."""
    kind = (run_shared, call.work, groups)
    if kind not in call.kept:
        call.kept[kind] = _elsewhere(call, groups)
    call.kept[kind](call)


def _elsewhere(call: AttentionCall, groups: GroupWork | None = None) -> Replanned:
    """The portable kernel, which reads any cache and whose requests may share keys."""
    tile, shares = call.work.tile, call.work.shares.shape[0]
    sets = call.cache.k.shape[2] // tile.kv_heads
    units = sets * -(-(call.q.shape[1] // call.cache.k.shape[2]) // tile.heads)
    requests = (call.work.items.shape[0] - shares) // (
        units * -(-call.work.threshold // tile.tokens)
    )
    portable = import_module("pageant.kernels.triton.attention")
    run = portable.run_decode if groups is None else partial(portable.run_shared, None, groups)
    return Replanned(call, max(requests, len(call.key_lens)), run, groups)


def can_copy(call: AttentionCall) -> bool:
    """Whether TMA can read the cache as it lies, and the kernel the order of its scales."""
    for elements, scales, is_swizzled in call.cache.sides:
        if is_swizzled or not _is_aligned(elements, (0, 1, 2)):
            return False
        if scales is not None:
            width = 1 if scales.dim() == 3 else scales.shape[3]
            box = call.work.tile.kv_heads * call.work.tile.box(scales.shape[1]) * width
            lie_together = scales.shape[1] == 1 or scales.stride(1) == width
            if box * scales.element_size() % BOX_BYTES or not lie_together:
                return False
            if not _is_aligned(scales, (0, 2)):
                return False
    return True


def _is_aligned(x: torch.Tensor, axes: tuple[int, ...]) -> bool:
    steps = [x.stride(axis) * x.element_size() for axis in axes if x.shape[axis] > 1]
    return all(step % ALIGNED == 0 for step in (*steps, x.data_ptr()))


class _Ready:
    """What every call of one kind has in common: its code, and the arguments that stay."""

    def __init__(self, call: AttentionCall) -> None:
        work: DeviceWork = call.work
        assert isinstance(work.tile, HopperTile)
        params, self.strides = call.params, (call.q.stride()[:2], call.out.stride()[:2])
        self.lse_strides = (0, 0) if call.lse is None else call.lse.stride()
        variant = _variant(call, work.tile)
        lists = (work.items, work.shares)
        shares = work.shares.shape[0]
        tiles = variant.units * -(-work.threshold // variant.query_tokens)  # of a request
        # Of fewer requests each tile has many parts: too much for one program to join.
        self.many = 1 + shares // (FEW_PARTS * tiles)
        parts = (call.workspace.partial_out, call.workspace.partial_lse)
        numbers = (
            params.alibi_slopes,
            params.sinks,
            (params.score_scale, params.soft_cap or 1.0, params.window or 0),
            *params.score_factors,
            params.value_factor,
            params.value_scale,
            (call.shard.rank, call.shard.interleave),
            variant,
        )
        walked = (parts, call.query_start_loc, call.key_lens, *numbers)
        factors = (params.sinks, params.value_factor, params.value_scale)
        joined = (*lists, parts, call.query_start_loc, *factors, variant)
        descriptors = _descriptors(call, variant)
        rows, results = self._rows(call, unchanged), self._results(call, unchanged)
        self.walk = Bound(
            _decode, (*rows, *results, (*lists, work.arrivals), 1, *walked), call.q.device,
            descriptors, num_warps=variant.warps, launch_pdl=True,
        )  # fmt: skip
        self.join = Bound(
            join_parts, (*results, *joined), call.q.device, num_warps=4, launch_pdl=True
        )
        self.lists = self.walk.raw((*lists, work.arrivals))
        self.walked, self.joined = self.walk.raw(walked), self.join.raw(joined)
        self.grid, self.joiners = (shares, 1, 1), (shares, JOINERS, 1)

    def __call__(self, call: AttentionCall) -> None:
        """Launch."""
        rows, results = self._rows(call, self.walk.raw), self._results(call, self.walk.raw)
        joins = len(call.key_lens) >= self.many
        self.walk(self.grid, *rows, *results, self.lists, int(joins), *self.walked)
        if not joins:
            self.join(self.joiners, *results, *self.joined)

    def _rows(self, call: AttentionCall, raw: Any) -> tuple[Any, ...]:
        """The arguments from q to mask_step."""
        table, causal, mask = call.page_table, call.causal, call.draft_mask
        return (
            (raw(call.q), *self.strides[0]),
            raw(table),
            table.stride(0),
            raw(causal) if isinstance(causal, torch.Tensor) else None,
            *((None, 0) if mask is None else (raw(mask.view(torch.uint8)), mask.stride(0))),
        )

    def _results(self, call: AttentionCall, raw: Any) -> tuple[Any, ...]:
        """The arguments out_to and lse_to."""
        return (raw(call.out), *self.strides[1]), (raw(call.lse), *self.lse_strides)


def _variant(call: AttentionCall, tile: HopperTile) -> Variant:
    """What is compiled into the code for such a call."""
    params, fmt = call.params, call.cache.format
    _, page_size, kv_heads, _ = call.cache.k.shape
    if isinstance(call.causal, torch.Tensor):
        causal = CAUSAL_BY_REQUEST
    else:
        causal = CAUSAL if call.causal else NON_CAUSAL
    by_row = NO_SCALES if fmt.scale_dtype is None else ROW_SCALES
    kind = kind_of(fmt)
    planes = max(1, 16 // fmt.bits)
    box = tile.box(page_size)
    least = BOX_BYTES // (2 * tile.kv_heads * box)
    wanted = [power_of_2(dim // planes) for dim in (call.q.shape[2], call.out.shape[2])]
    words = [max(least, count) for count in wanted]
    return Variant(
        kv_heads=tile.kv_heads,
        groups=tile.groups,
        tokens=tile.block // tile.groups,
        columns=tile.columns,
        stages=max(1, tile.stages * sum(wanted) // sum(words)),
        stores_queries=tile.stores_queries,
        page_size=page_size,
        box=box,
        heads=tile.heads,
        query_tokens=tile.tokens,
        all_kv_heads=kv_heads,
        group=call.q.shape[1] // kv_heads,
        dim=call.q.shape[2],
        value_dim=call.out.shape[2],
        words=words[0],
        value_words=words[1],
        planes=planes,
        kind=kind,
        scales=(BLOCK_SCALES if fmt.scale_block else by_row).value,
        blocks=fmt.num_scales(call.q.shape[2]),
        value_blocks=fmt.num_scales(call.out.shape[2]),
        dtype=OPERANDS[call.q.dtype] if kind == PLAIN.value else gl.float16,
        causal=causal.value,
        draft_mask=call.draft_mask is not None,
        window=params.window is not None,
        cap=params.soft_cap is not None,
        alibi=params.alibi_slopes is not None,
        world=call.shard.world,
    )


def kind_of(fmt: Format) -> int:
    """How the format is widened."""
    if fmt.bits > 8:
        return int(PLAIN.value)
    return int({4: E4M3, 5: E5M2, 0: INTEGER, 2: E2M1}[fmt.exponent_bits].value)


def _descriptors(call: AttentionCall, variant: Variant) -> tuple[Any, ...]:
    """Descriptors of keys, values and their scales, as `copy_ahead` takes them."""
    sides = zip(
        call.cache.sides,
        (variant.words, variant.value_words),
        (variant.blocks, variant.value_blocks),
        strict=True,
    )
    pairs = [(_elements(side, words, variant), _scales(side, blocks, variant))
             for side, words, blocks in sides]  # fmt: skip
    return (*[elements for elements, _ in pairs], *[scales for _, scales in pairs])


def _elements(side: Side, words: int, variant: Variant) -> TensorDescriptor:
    """A descriptor of keys or values [P, Hkv, N, words]."""
    x = side.elements
    if variant.planes > 1:
        x = x.view(torch.int16)
    pages, size, heads, width = x.shape
    step = x.stride()
    return _descriptor(
        x,
        [pages, heads, size, width],
        [step[0], step[2], step[1], 1],
        [1, variant.kv_heads, variant.box, words],
    )


def _scales(side: Side, blocks: int, variant: Variant) -> TensorDescriptor | None:
    """A descriptor of stored scales: [P, Hkv, N * blocks] of bytes, or [P, Hkv, N]."""
    x = side.scales
    if x is None:
        return None
    pages, size, heads = x.shape[:3]
    step = x.stride()
    if x.dim() == 4:
        x, size, width = x.view(torch.int8), size * blocks, blocks
    else:
        width = 1
    return _descriptor(
        x, [pages, heads, size], [step[0], step[2], 1], [1, variant.kv_heads, variant.box * width]
    )


def _descriptor(
    x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
) -> TensorDescriptor:
    steps = zip(shape[:-1], strides, strict=False)
    strides = [*[ALIGNED if size == 1 else step for size, step in steps], 1]  # of one, none counts
    return TensorDescriptor(x, shape, strides, block, box_layout(block, ELEMENTS[x.dtype]))
