"""The warp of a Gluon decode that copies pages ahead of those that compute, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from pageant.kernels.gluon.common.variant import (
    BLOCK_SCALES,
    ROW_SCALES,
    held,
    next_stage,
    place,
    range_of,
)
from pageant.plan.on_device import ITEM, REQUEST, UNIT

AT_ONCE = gl.constexpr(8)  # page ids looked up together


@gluon.jit
def copy_ahead(
    keys, values, key_scales, value_scales, key_boxes, value_boxes, key_scale_boxes,
    value_scale_boxes, full, empty, table, table_step, items, shares, lens, shard,
    C: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of a share's tiles, in order, as stages become free.

    Of a page past a request's last one no id is read; rows past its end are copied, and masked
    where they are used.

    Args:
        keys, values: descriptors of [P, Hkv, N, words], in boxes [1, kv_heads, box, words].
        key_scales, value_scales: descriptors of [P, Hkv, N * blocks] bytes or [P, Hkv, N] floats.
        key_boxes, ..: shared memory, [stages * boxes, 1, kv_heads, box, ..].
        full, empty: barriers of each stage.
        table, table_step, items, shares, lens, shard: as `decode` takes them.
        C: the variant.
    """
    CHUNK: gl.constexpr = C.boxes if C.boxes < AT_ONCE else AT_ONCE
    g = gl.program_id(0)
    first = gl.load(shares + 2 * g)
    count = gl.load(shares + 2 * g + 1)
    stage = 0
    phase = 1
    for number in range(first, first + count):
        item = items + number * ITEM
        request = gl.load(item + REQUEST)
        head, _, _ = place(gl.load(item + UNIT), C)
        begin, end = range_of(item)
        num_keys = held(gl.load(lens + request), shard, C.world)
        last_page = gl.maximum(num_keys - 1, 0) // C.page_size
        pages = table + request.to(gl.int64) * table_step
        for block in range(begin, end):
            for chunk in range(C.boxes // CHUNK):
                token = block * C.block + chunk * (CHUNK * C.box)
                ids = ()
                for i in gl.static_range(CHUNK):
                    page = gl.minimum((token + i * C.box) // C.page_size, last_page)
                    ids = ids + (gl.load(pages + page),)  # type: ignore[assignment] # noqa: RUF005
                mbarrier.wait(empty.index(stage), phase)
                bar = full.index(stage)
                mbarrier.expect(bar, C.bytes, pred=chunk == 0)
                for i in gl.static_range(CHUNK):
                    at = [ids[i], head, (token + i * C.box) % C.page_size, 0]
                    slot = stage * C.boxes + chunk * CHUNK + i
                    tma.async_copy_global_to_shared(keys, at, bar, key_boxes.index(slot))
                    if C.scales == BLOCK_SCALES:
                        row = (token + i * C.box) % C.page_size
                        spot = [ids[i], head, row * C.blocks]
                        to = key_scale_boxes.index(slot)
                        tma.async_copy_global_to_shared(key_scales, spot, bar, to)
                    if C.scales == ROW_SCALES:
                        spot = [ids[i], head, (token + i * C.box) % C.page_size]
                        to = key_scale_boxes.index(slot)
                        tma.async_copy_global_to_shared(key_scales, spot, bar, to)
                for i in gl.static_range(CHUNK):
                    at = [ids[i], head, (token + i * C.box) % C.page_size, 0]
                    slot = stage * C.boxes + chunk * CHUNK + i
                    tma.async_copy_global_to_shared(values, at, bar, value_boxes.index(slot))
                    if C.scales == BLOCK_SCALES:
                        row = (token + i * C.box) % C.page_size
                        spot = [ids[i], head, row * C.value_blocks]
                        to = value_scale_boxes.index(slot)
                        tma.async_copy_global_to_shared(value_scales, spot, bar, to)
                    if C.scales == ROW_SCALES:
                        spot = [ids[i], head, (token + i * C.box) % C.page_size]
                        to = value_scale_boxes.index(slot)
                        tma.async_copy_global_to_shared(value_scales, spot, bar, to)
            stage, phase = next_stage(stage, phase, C.stages)
