"""New keys and values into their pages: encode all tokens at once, then one indexed store each.

page = slot // N, row = slot % N; where two tokens share a slot, either may win.
"""

from __future__ import annotations

import torch

from pageant.cache.layout import swizzled
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
    _kept: object = None,
) -> None:
    """Store tokens by slot.

    Args:
        k, v: [>= T, Hkv, D] and [>= T, Hkv, Dv], floating point; rows past T are ignored.
        cache: one layer's pages.
        index: where each token goes.
        scales: k_scale and v_scale, for formats they apply to.
        _kept: of use to writers that compile, not here.
    """
    encoded = []  # both sides, before either is stored
    for values, scale in zip((k, v), scales, strict=True):
        rows = values[: index.num_tokens] if index.tokens is None else values[index.tokens]
        encoded.append(encode(rows, cache.format, scale))
    for side, (codes, stored) in zip(cache.sides, encoded, strict=True):
        _whole(side.elements)[index.pages, index.rows] = _whole(codes)
        if stored is None or side.scales is None:
            continue
        if side.is_swizzled:
            at, columns = swizzled(index.rows, stored.shape[2])
            _whole(side.scales)[index.pages[:, None], at, :, columns] = _whole(stored).mT
        else:
            _whole(side.scales)[index.pages, index.rows] = _whole(stored)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: torch stores those by index faster, and on every device."""
    return x.view(STORED_AS[x.itemsize])
