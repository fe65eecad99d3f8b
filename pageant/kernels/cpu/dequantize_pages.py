"""Cached keys and values as plain numbers, request by request; ``ops.dequantize_pages``."""

from __future__ import annotations

import torch

from pageant.cache.layout import swizzled
from pageant.cache.pages import LayerCache, Side
from pageant.cache.quantize import dequantize
from pageant.types import Scalar

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch indexes those on every device


def dequantize_pages(
    cache: LayerCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scales: tuple[Scalar, Scalar],
    out: LayerCache,
) -> None:
    """Fill page r * W + c of `out` from page page_table[r, c], as far as the request has tokens.

    Args:
        cache: one layer's pages, any format.
        page_table: int32 [R, W], checked.
        seq_lens: int32 [R], checked.
        scales: k_scale and v_scale, for formats they apply to.
        out: [R * W, N, Hkv, ..], a format without scales.
    """
    page_size, width = cache.page_size, page_table.shape[1]
    request, token = (torch.arange(width * page_size) < seq_lens[:, None]).nonzero(as_tuple=True)
    column, row = token // page_size, token % page_size
    page = page_table[request, column].long()
    for side, to, scale in zip(cache.sides, out.sides, scales, strict=True):
        codes = side.elements.view(INTEGERS[side.elements.itemsize])[page, row]
        stored = None if side.scales is None else _scales(side, side.scales, page, row)
        factor = scale if cache.format.uses_layer_scales else 1.0
        values = dequantize(codes, stored, cache.format.name, factor)
        to.elements[request * width + column, row] = values.to(to.elements.dtype)


def _scales(
    side: Side, scales: torch.Tensor, page: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """Stored scales of some tokens: [n, Hkv], or [n, Hkv, blocks]."""
    whole = scales.view(INTEGERS[scales.itemsize])
    if not side.is_swizzled:
        return whole[page, row].view(scales.dtype)
    rows, columns = swizzled(row, scales.shape[3])
    return whole[page[:, None], rows, :, columns].mT.contiguous().view(scales.dtype)
