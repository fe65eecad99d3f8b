"""New keys and values into their pages, quantised on the way.

    page = slot // N, row = slot % N; bytes as ``cache/quantize.py`` defines them

A program takes a few rows, each one token of one head, of the keys or of the values: all bytes are
read once and written once. Slots that are negative or past the pool are skipped; where two tokens
share a slot, either may win, and elements and scales may then be of different ones.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from pageant.cache.formats import FORMATS
from pageant.cache.pages import LayerCache, Side
from pageant.kernels.triton.common.encode import (
    cast,
    encode_blocks,
    encode_plain,
    encode_rows,
    load_scale,
    pack,
)
from pageant.kernels.triton.common.scalars import kernel_scale
from pageant.plan.bound import Bound
from pageant.plan.copies import DeviceWrites
from pageant.types import Scalar

TILE = 2048  # elements a program: 16 a thread, one block of nvfp4
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["slots", "slots_step", "num_tokens", "num_slots"])
def write_kernel(
    k,
    k_token,
    k_head,
    k_content,
    v,
    v_token,
    v_head,
    v_content,
    slots,
    slots_step,
    num_tokens,
    num_slots,
    keys,
    keys_page,
    keys_row,
    keys_head,
    values,
    values_page,
    values_row,
    values_head,
    k_scales,
    k_scales_page,
    k_scales_row,
    k_scales_head,
    v_scales,
    v_scales_page,
    v_scales_row,
    v_scales_head,
    k_scale,
    v_scale,
    D: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    TOP: tl.constexpr,
    OTHER_TOP: tl.constexpr,
):
    """Grid: ceil(T * HEADS / rows a program), 2; keys first. Pointers to bytes are to uint8.

    Names of strides, in elements: of what, and along which axis. A scale is a number, a pointer,
    or None for 1; TOP is 0 unless elements have four bits.
    """
    if tl.program_id(1) == 0:
        _write_side(
            k,
            (k_token, k_head, k_content),
            keys,
            (keys_page, keys_row, keys_head),
            k_scales,
            (k_scales_page, k_scales_row, k_scales_head),
            k_scale,
            slots,
            slots_step,
            num_tokens,
            num_slots,
            D,
            HEADS,
            PAGE_SIZE,
            TILE,
            QUANTIZED,
            EXPONENT_BITS,
            MANTISSA_BITS,
            MAX,
            TOP,
            OTHER_TOP,
            False,
        )
    else:
        _write_side(
            v,
            (v_token, v_head, v_content),
            values,
            (values_page, values_row, values_head),
            v_scales,
            (v_scales_page, v_scales_row, v_scales_head),
            v_scale,
            slots,
            slots_step,
            num_tokens,
            num_slots,
            DV,
            HEADS,
            PAGE_SIZE,
            TILE,
            QUANTIZED,
            EXPONENT_BITS,
            MANTISSA_BITS,
            MAX,
            TOP,
            OTHER_TOP,
            SWIZZLED,
        )


@triton.jit
def _write_side(
    x,
    x_strides,
    elements,
    element_strides,
    scales,
    scale_strides,
    scale,
    slots,
    slots_step,
    num_tokens,
    num_slots,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX: tl.constexpr,
    TOP: tl.constexpr,
    OTHER_TOP: tl.constexpr,
    SWIZZLED: tl.constexpr,
):
    WIDTH: tl.constexpr = triton.next_power_of_2(D)
    ROWS: tl.constexpr = TILE // WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    is_row = token < num_tokens
    slot = tl.load(slots + token * slots_step, mask=is_row, other=-1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    # Loaded for skipped tokens too, so as not to wait for the slots.
    values = tl.load(
        x
        + (token * x_strides[0] + head * x_strides[1])[:, None]
        + (column.to(tl.int64) * x_strides[2])[None, :],
        mask=is_row[:, None] & (column < D)[None, :],
        other=0.0,
    )
    is_kept = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_kept, slot, 0)
    page, at = slot // PAGE_SIZE, slot % PAGE_SIZE
    place = page * element_strides[0] + at * element_strides[1] + head * element_strides[2]
    target = elements + place[:, None] + column[None, :]
    kept = is_kept[:, None] & (column < D)[None, :]
    if not QUANTIZED:
        tl.store(target, cast(values, elements.dtype.element_ty), mask=kept)
    else:
        values = values.to(tl.float32)
        if TOP > 0.0:
            BLOCKS: tl.constexpr = WIDTH // 16
            blocks = tl.reshape(values, [ROWS, BLOCKS, 16])
            codes, found = encode_blocks(blocks, load_scale(scale), TOP, OTHER_TOP)
            byte = tl.arange(0, WIDTH // 2)
            tl.store(
                elements + place[:, None] + byte[None, :],
                pack(codes, ROWS, WIDTH // 2),
                mask=is_kept[:, None] & (byte < D // 2)[None, :],
            )
            block = tl.arange(0, BLOCKS)[None, :]
            COUNT: tl.constexpr = (D + 15) // 16
            at, spot = at[:, None], block
            if SWIZZLED:
                QUARTER: tl.constexpr = COUNT // 4
                spot = block % QUARTER * 4 + at % 4
                at = at // 4 * 4 + block // QUARTER
            base = (page * scale_strides[0] + head * scale_strides[2])[:, None]
            tl.store(
                scales + base + at * scale_strides[1] + spot,
                found.to(tl.uint8),
                mask=is_kept[:, None] & (block < COUNT),
            )
        elif scales is not None:
            codes, found = encode_rows(values, EXPONENT_BITS, MANTISSA_BITS, MAX)
            tl.store(target, codes.to(elements.dtype.element_ty), mask=kept)
            place = page * scale_strides[0] + at * scale_strides[1] + head * scale_strides[2]
            tl.store(scales + place, found, mask=is_kept)
        else:
            codes = encode_plain(values, scale, EXPONENT_BITS, MANTISSA_BITS, MAX)
            tl.store(target, codes.to(tl.uint8), mask=kept)


def write_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    slots: torch.Tensor,
    scales: tuple[Scalar, Scalar] = (1.0, 1.0),
    kept: dict[Any, Any] | None = None,
) -> None:
    """Store tokens by slot, in one launch; nothing waits for the device.

    Args:
        k, v: [>= T, Hkv, D] and [>= T, Hkv, Dv], float32, float16 or bfloat16, any strides; rows
            past T are ignored.
        cache: one layer's pages.
        slots: int64 [T], on the device. Token t goes to row slot % N of page slot // N; one whose
            slot is negative or past the pool is skipped.
        scales: k_scale and v_scale, for formats they apply to; tensors may lie anywhere.
        kept: see ``AttentionCall.kept``; the scales are those of the first call.
    """
    num_tokens, num_slots = slots.shape[0], cache.num_pages * cache.page_size
    if num_tokens == 0:
        return
    ready = None if kept is None else kept.get("write")
    if ready is None:
        fixed = _fixed(k, v, cache, scales)
        given = (k, *k.stride(), v, *v.stride(), slots, slots.stride(0), num_tokens, num_slots)
        kernel = Bound(write_kernel, (*given, *fixed), k.device, **OPTIONS)
        ready = kernel, kernel.raw(fixed), (k.stride(), v.stride())
        if kept is not None:
            kept["write"] = ready
    kernel, fixed, (k_strides, v_strides) = ready
    raw, longest = kernel.raw, triton.next_power_of_2(max(k.shape[2], v.shape[2]))
    kernel(
        (-(-num_tokens * k.shape[1] // (TILE // longest)), 2, 1),
        raw(k), *k_strides, raw(v), *v_strides, raw(slots), slots.stride(0), num_tokens, num_slots,
        *fixed,
    )  # fmt: skip


def write_planned(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    writes: DeviceWrites,
    scales: tuple[Scalar, Scalar],
    kept: dict[Any, Any] | None = None,
) -> None:
    """Store the new tokens of a plan."""
    write_pages(k, v, cache, writes.slots, scales, kept)


def _fixed(
    k: torch.Tensor, v: torch.Tensor, cache: LayerCache, scales: tuple[Scalar, Scalar]
) -> tuple[Any, ...]:
    """The kernel's arguments from `keys` on."""
    keys, values = cache.sides
    scaled = cache.format.uses_layer_scales
    return (
        *_elements(keys),
        *_elements(values),
        *_scales(keys),
        *_scales(values),
        *(map(kernel_scale, scales) if scaled else (None, None)),
        k.shape[2],
        v.shape[2],
        k.shape[1],
        cache.page_size,
        values.is_swizzled,
        TILE,
        *constants(cache.format.name),
    )


@functools.cache
def constants(name: str) -> tuple[Any, ...]:
    """What of a format is compiled in: from QUANTIZED to OTHER_TOP."""
    fmt = FORMATS[name]
    tops = (*fmt.block_tops, 0.0, 0.0)
    bits = fmt.exponent_bits, fmt.mantissa_bits
    return (fmt.quantized, *bits, fmt.max_value, tops[0], tops[1])


def _elements(side: Side) -> tuple[Any, ...]:
    """Pointer, and strides along pages, rows and heads; eight-bit floats as bytes."""
    elements = side.elements
    if elements.itemsize == 1 and elements.is_floating_point():
        elements = elements.view(torch.uint8)
    return elements, *elements.stride()[:3]


def _scales(side: Side) -> tuple[Any, ...]:
    scales = side.scales
    if scales is None:
        return None, 0, 0, 0
    if scales.itemsize == 1:
        scales = scales.view(torch.uint8)
    return scales, *scales.stride()[:3]
