"""New keys and values into their pages: encode all tokens at once, then one indexed store each.

page = slot // N, row = slot % N; where two tokens share a slot, either may win.
"""

from __future__ import annotations

import torch

from pageant.cache.pages import LayerCache
from pageant.cache.quantize import encode
from pageant.plan.pages import WriteIndex
from pageant.types import Scalar

STORED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def write_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    index: WriteIndex,
    scales: tuple[Scalar, Scalar] = (1.0, 1.0),
) -> None:
    """Store tokens by slot.

    Args:
        k, v: [>= T, Hkv, D] and [>= T, Hkv, Dv], floating point; rows past T are ignored.
        cache: one layer's pages.
        index: where each token goes.
        scales: k_scale and v_scale, used by quantised formats.
    """
    for values, pages, scale in ((k, cache.k, scales[0]), (v, cache.v, scales[1])):
        rows = values[: index.num_tokens] if index.tokens is None else values[index.tokens]
        codes = encode(rows, cache.format, scale)
        stored = STORED_AS[codes.itemsize]
        pages.view(stored)[index.pages, index.rows] = codes.view(stored)
