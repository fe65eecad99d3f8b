"""Places of block scales: every byte of a swizzled tensor once, and back."""

import numpy as np
import pytest
import torch

from pageant.cache.out_scales import in_tiles, out_of_tiles, swizzled_columns


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (128, 12), (384, 8)])
def test_tiles_hold_every_scale_once(rows, columns):
    """The tiles by their shape: [row tile, block tile, row of 32, group of 32 rows, block]."""
    numbers = np.arange(rows * columns).reshape(rows, columns)
    tiles = numbers.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)
    places = in_tiles(torch.arange(rows)[:, None], torch.arange(columns), columns)
    assert (tiles.ravel()[places.numpy()] == numbers).all()
    back = out_of_tiles(places, columns)
    assert torch.equal(back[0], torch.arange(rows)[:, None].expand(rows, columns))
    assert torch.equal(back[1], torch.arange(columns).expand(rows, columns))
    everywhere = torch.arange(rows * columns)
    assert torch.equal(in_tiles(*out_of_tiles(everywhere, columns), columns), everywhere)


def test_columns_are_whole_tiles():
    assert [swizzled_columns(blocks) for blocks in (1, 3, 4, 5, 128)] == [4, 4, 4, 8, 128]
