"""How boxes of pages lie in shared memory, and the views that warps read them through.

TMA copies a box: some tokens of one page, for some heads. A row of a box is one token of one head;
boxes of a stage follow each other. Rows are cut into columns of `swizzle` bytes, of which all rows'
first ones come before all second ones, and within 1,024 bytes the 16-byte chunks of a row are
exchanged by an exclusive or with the row's number, so that eight rows read at once lie in different
banks. A view gives each warp its head and its part of the tokens: [warps, tokens, row].
"""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

CHUNK = gl.constexpr(16)  # bytes that stay together


@constexpr_function
def swizzle_of(rows: int, row_bytes: int) -> int:
    """Bytes of a column, or 0 for rows left whole: the widest TMA has for such a box.

    >>> swizzle_of(128, 256), swizzle_of(128, 64), swizzle_of(4, 256)
    (128, 64, 0)
    """
    if rows < 8:
        return 0
    return next((width for width in (128, 64, 32) if row_bytes % width == 0), 0)


@constexpr_function
def bases(rows: int, columns: int, itemsize: int) -> list[tuple[int, int]]:
    """Row and column of each power of two of an element's offset in a box.

    >>> bases(2, 32, 2)
    [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (1, 0)]
    >>> bases(8, 128, 2)[6:]
    [(1, 8), (2, 16), (4, 32), (0, 64)]
    """
    width = swizzle_of(rows, columns * itemsize)
    across = width // itemsize if width else columns
    found = [(0, 1 << bit) for bit in range(across.bit_length() - 1)]
    for row in (1 << bit for bit in range(rows.bit_length() - 1)):
        chunk = row // (128 // width) % (width // CHUNK.value) if width else 0
        found.append((row, chunk * (CHUNK.value // itemsize)))
    while across < columns:
        found.append((0, across))
        across *= 2
    return found


@constexpr_function
def box_layout(block: list[int], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    """The layout TMA writes a box [.., row] in."""
    bits = dtype.primitive_bitwidth
    rows = 1
    for size in block[:-1]:
        rows *= size
    swizzle = swizzle_of(rows, block[-1] * bits // 8)
    return gl.NVMMASharedLayout(swizzle, element_bitwidth=bits, rank=len(block))


@constexpr_function
def _view(
    box_bases: list[tuple[int, int, int]], groups: int, tokens: int, box: int, width: int = 3
) -> gl.SharedLinearLayout:
    """A layout from each base's head, token of the box and column."""
    while box < groups * tokens:
        box_bases.append((0, box, 0))
        box *= 2
    found = [
        [head * groups + token // tokens, token % tokens, column][:width]
        for head, token, column in box_bases
    ]
    return gl.SharedLinearLayout(found, alignment=1024)


@constexpr_function
def rows_view(
    heads: int, groups: int, tokens: int, box: int, columns: int, itemsize: int
) -> gl.SharedLinearLayout:
    """View [heads * groups, tokens, columns] of a stage of boxes [heads, box, columns].

    Args:
        heads: of a box.
        groups: warps that share a head's tokens; warp h * groups + s has the s-th part of them.
        tokens: of a warp.
        box: tokens of a box, a power of 2.
        columns: of a row, a power of 2.
        itemsize: bytes of a column's element.
    """
    found = [
        (row // box, row % box, column) for row, column in bases(heads * box, columns, itemsize)
    ]
    return _view(found, groups, tokens, box)


@constexpr_function
def scales_view(
    heads: int, groups: int, tokens: int, box: int, blocks: int
) -> gl.SharedLinearLayout:
    """View [heads * groups, tokens, blocks / 4] of int32 of a stage of bytes [heads, box * blocks].

    A head's scales of a box lie together, `blocks` for each token.
    """
    flat = bases(heads, box * blocks, 1)[2:]  # four bytes make a word
    found = [(row, column // blocks, column % blocks // 4) for row, column in flat]
    return _view(found, groups, tokens, box)


@constexpr_function
def row_scales_view(heads: int, groups: int, tokens: int, box: int) -> gl.SharedLinearLayout:
    """View [heads * groups, tokens], of float32, of a stage of boxes [heads, box]."""
    found = [(row, column, 0) for row, column in bases(heads, box, 4)]
    return _view(found, groups, tokens, box, width=2)
