"""Where the block scales of an nvfp4 output lie: row by row, or in the tiles tensor cores read.

A tile holds the scales of 128 rows by 4 blocks in 512 bytes; four groups of 32 rows lie side by
side in it. Tiles follow one another along the blocks, then along the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_ROWS, TILE_BLOCKS = 128, 4
GROUP_ROWS = 32
TILE = TILE_ROWS * TILE_BLOCKS


@dataclass(frozen=True, eq=False)
class SwizzledScales:
    """Block scales of an nvfp4 output, in tiles of 128 rows by 4 blocks.

    A plain tensor given to ``run(out_scales=…)`` is linear; this says that it is not. The columns
    past the last block, and rows of no token, are left alone.

    Attributes:
        scales: float8_e4m3fn [rows, columns], contiguous; rows a multiple of 128, columns the
            blocks of a token, Hq * Dv / 16, rounded up to a multiple of 4.
        start_row: the row of the batch's first token.
    """

    scales: torch.Tensor
    start_row: int = 0


OutScales = torch.Tensor | SwizzledScales


def swizzled_columns(num_blocks: int) -> int:
    """Columns of a swizzled tensor for so many blocks a token.

    >>> swizzled_columns(6), swizzled_columns(8)
    (8, 8)
    """
    return -(-num_blocks // TILE_BLOCKS) * TILE_BLOCKS


def in_tiles(rows: torch.Tensor, blocks: torch.Tensor, columns: int) -> torch.Tensor:
    """Byte of each row's and block's scale in a swizzled tensor.

    Args:
        rows, blocks: int64, of shapes that broadcast.
        columns: of the tensor, a multiple of 4.

    >>> in_tiles(torch.tensor([[0], [1], [32], [128]]), torch.tensor([0, 1, 4]), columns=8).tolist()
    [[0, 1, 512], [16, 17, 528], [4, 5, 516], [1024, 1025, 1536]]
    """
    tile = rows // TILE_ROWS * (columns // TILE_BLOCKS) + blocks // TILE_BLOCKS
    row = rows % GROUP_ROWS * (TILE // GROUP_ROWS)
    group = rows % TILE_ROWS // GROUP_ROWS * TILE_BLOCKS
    return tile * TILE + row + group + blocks % TILE_BLOCKS


def out_of_tiles(places: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and block whose scale lies at each byte: the inverse of `in_tiles`.

    >>> out_of_tiles(torch.tensor([0, 516, 1025]), columns=8)
    (tensor([  0,  32, 128]), tensor([0, 4, 1]))
    """
    tile, byte = places // TILE, places % TILE
    tiles = columns // TILE_BLOCKS
    row, group = byte // (TILE // GROUP_ROWS), byte % (TILE // GROUP_ROWS) // TILE_BLOCKS
    rows = tile // tiles * TILE_ROWS + group * GROUP_ROWS + row
    return rows, tile % tiles * TILE_BLOCKS + byte % TILE_BLOCKS
