"""Finished rows in the form a quantised output has: a step of its own, after both phases.

    fp8_e4m3: code = sat(x / out_scale)
    nvfp4:    y = out_scale * x;  sf = e4m3(absmax(y) / 6);  code = e2m1(y / sf)

All in float32 with IEEE division, to nearest, ties to even, saturating. An nvfp4 block is 16
elements of one head; one of sf 0 is zeros. code * sf / out_scale is what was meant: out_scale
multiplies here, where a cache's scale divides.

Layout: nvfp4 codes lie two a byte, the even element low; scales as ``cache/out_scales.py`` says.
"""

from __future__ import annotations

import torch

from pageant.cache.formats import FORMATS
from pageant.cache.out_scales import OutScales, SwizzledScales, in_tiles
from pageant.cache.quantize import encode
from pageant.plan.inputs import LayerParams

# Elements at a time, so that what is computed on the way stays small. Torch shares operations on
# more than 1 << 15 among its threads; those spin for a while after, which few rows are not worth.
PIECE, SHARED_PIECE = 1 << 15, 1 << 18
MANY = 1 << 20  # elements of all rows, from which on threads are


def quantize_out(
    rows: torch.Tensor,
    out: torch.Tensor,
    scales: OutScales | None,
    params: LayerParams,
    end: torch.Tensor | None = None,
    _kept: object = None,
) -> None:
    """Write rows as params.out_format stores them; rows of `out` and `scales` past them stay.

    Args:
        rows: float32 [T, Hq, Dv].
        out: float8_e4m3fn [>= T, Hq, Dv], or uint8 [>= T, Hq, Dv / 2] for nvfp4.
        scales: of nvfp4, e4m3 [>= T, Hq * Dv / 16] or swizzled; None for fp8.
        params: out_format and out_scale.
        end: int32 [1], how many of the rows are no padding; None: all.
        _kept: of use to kernels that compile, not here.
    """
    rows = rows if end is None else rows[: int(end)]
    piece_size = PIECE if rows.numel() < MANY else SHARED_PIECE
    step = max(1, piece_size // max(1, rows[:1].numel()))
    for first in range(0, rows.shape[0], step):
        piece = rows[first : first + step]
        here = slice(first, first + piece.shape[0])
        if scales is None:
            out[here], _ = encode(piece, FORMATS[params.out_format], params.out_scale)
            continue
        out[here], found = encode(piece * params.out_scale, FORMATS[params.out_format])
        assert found is not None
        found = found.flatten(1)
        if isinstance(scales, SwizzledScales):
            places = _places(scales, here, found.shape[1]).to(found.device)
            scales.scales.view(torch.uint8).view(-1)[places] = found.view(torch.uint8)
        else:
            scales[here] = found


def _places(scales: SwizzledScales, tokens: slice, num_blocks: int) -> torch.Tensor:
    """int64 [tokens, blocks]: the byte of each scale."""
    rows = scales.start_row + torch.arange(tokens.start, tokens.stop)[:, None]
    return in_tiles(rows, torch.arange(num_blocks), scales.scales.shape[1])
