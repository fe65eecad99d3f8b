"""The views of shared memory find every element where TMA puts it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pageant.kernels.gluon.common.boxes import (
    row_scales_view,
    rows_view,
    scales_view,
    swizzle_of,
)


def written(rows: int, row_bytes: int) -> dict[int, tuple[int, int]]:
    """Row and byte of each address of a box, by the rules of CUDA's tensor maps.

    With a swizzle of S bytes, columns of S bytes follow each other, a row of one after the other;
    address bits 4 and on are exchanged by an exclusive or with bits 7 and on.
    """
    swizzle = swizzle_of(rows, row_bytes)
    width = swizzle or row_bytes
    mask = swizzle // 16 - 1 if swizzle else 0
    places = {}
    for row in range(rows):
        for byte in range(row_bytes):
            address = byte // width * rows * width + row * width + byte % width
            places[address ^ ((address >> 7 & mask) << 4)] = (row, byte)
    return places


def coordinates(bases: Sequence[Sequence[int]], offset: int) -> tuple[int, ...]:
    found = [0] * len(bases[0])
    for bit, basis in enumerate(bases):
        if offset >> bit & 1:
            found = [a ^ b for a, b in zip(found, basis, strict=True)]
    return tuple(found)


SHAPES = [
    # heads, groups, tokens of a warp, tokens of a box, words of a row
    (8, 1, 16, 16, 128),
    (8, 1, 32, 16, 64),
    (8, 1, 16, 1, 128),
    (4, 2, 16, 8, 64),
    (1, 8, 16, 16, 128),
    (1, 8, 16, 128, 64),
    (1, 8, 16, 1, 128),
    (2, 4, 32, 64, 32),
    (4, 1, 16, 16, 256),
    (8, 1, 64, 16, 16),
]


@pytest.mark.parametrize(("heads", "groups", "tokens", "box", "words"), SHAPES)
def test_rows(heads: int, groups: int, tokens: int, box: int, words: int) -> None:
    view = rows_view(heads, groups, tokens, box, words, 2)
    places = written(heads * box, 2 * words)
    size = len(places)
    for number in range(groups * tokens // box):
        for address, (row, byte) in places.items():
            if byte % 2 == 0:
                head, token = row // box, number * box + row % box
                want = (head * groups + token // tokens, token % tokens, byte // 2)
                assert coordinates(view.offset_bases, (number * size + address) // 2) == want


@pytest.mark.parametrize(("heads", "groups", "tokens", "box", "_words"), SHAPES)
@pytest.mark.parametrize("blocks", [4, 8, 16])
def test_block_scales(
    heads: int, groups: int, tokens: int, box: int, _words: int, blocks: int
) -> None:
    if box * blocks < 16 or box * blocks > 256:
        pytest.skip("no box of such scales")
    view = scales_view(heads, groups, tokens, box, blocks)
    places = written(heads, box * blocks)
    size = len(places)
    for number in range(groups * tokens // box):
        for address, (head, byte) in places.items():
            if byte % 4 == 0:
                token = number * box + byte // blocks
                want = (head * groups + token // tokens, token % tokens, byte % blocks // 4)
                assert coordinates(view.offset_bases, (number * size + address) // 4) == want


@pytest.mark.parametrize(("heads", "groups", "tokens", "box", "_words"), SHAPES)
def test_row_scales(heads: int, groups: int, tokens: int, box: int, _words: int) -> None:
    if box < 4:
        pytest.skip("no box of such scales")
    view = row_scales_view(heads, groups, tokens, box)
    places = written(heads, 4 * box)
    size = len(places)
    for number in range(groups * tokens // box):
        for address, (head, byte) in places.items():
            if byte % 4 == 0:
                token = number * box + byte // 4
                want = (head * groups + token // tokens, token % tokens)
                assert coordinates(view.offset_bases, (number * size + address) // 4) == want
