"""Where a byte of the cache lies: axes in, strides and views out, and the way back.

A layout names the memory order of five axes, outermost first:

    L layer    B block (one page of the pool)    H key/value head    N token in the page
    C content: one row, the key's bytes and then the value's

>>> layout = CacheLayout(
...     "LBNHC",
...     num_layers=2,
...     num_pages=3,
...     num_kv_heads=4,
...     page_size=16,
...     key_bytes=256,
...     value_bytes=256,
... )
>>> layout.strides
{'L': 98304, 'B': 32768, 'H': 512, 'N': 2048, 'C': 1}
>>> layout.offset(layer=1, page=2, head=3, token=5, byte=7)
175623
>>> layout.position(175623)
{'L': 1, 'B': 2, 'H': 3, 'N': 5, 'C': 7}

Formats that store scales keep rows only as a budget of bytes. What the axes inside L and B hold (a
page of all heads; of one head where H stands further out) is one region for each part:

    [ keys | their scales | values | their scales ]      each in the order of those axes

so that elements stay aligned and a page's scales can be read at once.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PARTS = ("k", "k_scales", "v", "v_scales")


@dataclass(frozen=True)
class CacheLayout:
    """The byte layout of a whole cache.

    Attributes:
        order: one of LAYOUTS.
        num_layers, num_pages, num_kv_heads, page_size: sizes of L, B, H and N.
        key_bytes, value_bytes: elements of one row.
        key_scale_bytes, value_scale_bytes: stored scales of one row.
    """

    order: str
    num_layers: int
    num_pages: int
    num_kv_heads: int
    page_size: int
    key_bytes: int
    value_bytes: int
    key_scale_bytes: int = 0
    value_scale_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, scales included."""
        return self.key_bytes + self.key_scale_bytes + self.value_bytes + self.value_scale_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """Extent of each axis; C in bytes."""
        return {
            "L": self.num_layers,
            "B": self.num_pages,
            "H": self.num_kv_heads,
            "N": self.page_size,
            "C": self.row_bytes,
        }

    @property
    def strides(self) -> dict[str, int]:
        """Bytes between neighbours along each axis, of rows; `place` has those of a part."""
        sizes, strides, step = self.sizes, {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        return {axis: strides[axis] for axis in "LBHNC"}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.num_kv_heads * self.page_size * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return math.prod(self.sizes.values())

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """First byte within a row, and bytes a row, of "k", "k_scales", "v" and "v_scales"."""
        sizes = (self.key_bytes, self.key_scale_bytes, self.value_bytes, self.value_scale_bytes)
        firsts = itertools.accumulate(sizes, initial=0)
        return {
            name: (first, size)
            for name, first, size in zip(PARTS, firsts, sizes, strict=False)
            if size
        }

    @property
    def inner(self) -> str:
        """Axes inside both L and B, C left out: "HN", "NH" or "N"."""
        return self.order[max(self.order.index("L"), self.order.index("B")) + 1 : -1]

    @property
    def region_rows(self) -> int:
        """Rows whose parts lie in regions of their own; 1 where there are no scales: plain rows."""
        if not self.key_scale_bytes + self.value_scale_bytes:
            return 1
        return math.prod(self.sizes[axis] for axis in self.inner)

    def place(self, part: str) -> tuple[int, dict[str, int]]:
        """First byte of a part ("k", "k_scales", "v" or "v_scales"), and its strides in bytes."""
        first, step = self.parts[part]
        strides = self.strides
        if self.region_rows > 1:
            for axis in reversed(self.inner):
                strides[axis] = step
                step *= self.sizes[axis]
        return first * self.region_rows, strides

    def offset(self, *, layer: int, page: int, head: int, token: int, byte: int) -> int:
        """Byte offset of one byte of one row; bytes count through the row's parts in order."""
        part = next(name for name, (first, size) in self.parts.items() if byte < first + size)
        start, strides = self.place(part)
        at = {"L": layer, "B": page, "H": head, "N": token, "C": byte - self.parts[part][0]}
        return start + sum(at[axis] * strides[axis] for axis in at)

    def position(self, offset: int) -> dict[str, int]:
        """Layer, page, head, token and byte of the row at an offset: the inverse of `offset`."""
        rows = self.region_rows
        within = offset % (rows * self.row_bytes)
        parts = self.parts.items()
        part = next(name for name, (first, size) in parts if within < (first + size) * rows)
        start, strides = self.place(part)
        found = {axis: offset // strides[axis] % self.sizes[axis] for axis in "LBHN"}
        if rows > 1:
            inner = {axis: (within - start) // strides[axis] for axis in self.inner}
            found |= {axis: index % self.sizes[axis] for axis, index in inner.items()}
        first, size = self.parts[part]
        return {**found, "C": first + (within - start) % size}

    def view(
        self, storage: torch.Tensor, layer: int, part: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """One part of one layer, [P, N, Hkv, elements], sharing `storage`.

        Args:
            storage: uint8 [num_bytes], contiguous.
            layer: index of the layer.
            part: "k", "k_scales", "v" or "v_scales".
            dtype: element type of the view.
        """
        start, strides = self.place(part)
        sizes = self.sizes
        view = storage.as_strided(
            [*(sizes[axis] for axis in "BNH"), self.parts[part][1]],
            [strides[axis] for axis in "BNHC"],
            storage.storage_offset() + start + layer * strides["L"],
        )
        return view.view(dtype)


def swizzled(tokens: torch.Tensor, num_scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where SM10x kernels want nvfp4's value scales: rows and columns of each head's [N, S] plane.

    Scale s of token t lies at row 4 (t // 4) + 4 s // S, column 4 (s mod S/4) + t mod 4: four
    tokens' scales are transposed. N and S are multiples of 4.

    Args:
        tokens: int64 [...], rows of the page.
        num_scales: S.

    Returns:
        int64 [..., S] each.

    >>> rows, columns = swizzled(torch.arange(4), 4)
    >>> (4 * rows + columns).tolist()
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    """
    scales = torch.arange(num_scales, device=tokens.device)
    tokens = tokens[..., None]
    quarter = num_scales // 4
    rows = tokens // 4 * 4 + scales // quarter
    return rows, scales % quarter * 4 + tokens % 4


def unswizzled(
    rows: torch.Tensor, columns: torch.Tensor, num_scales: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and scale that lie at a row and column of a plane `swizzled` fills: its inverse.

    >>> places = swizzled(torch.arange(8), 8)
    >>> tokens, scales = unswizzled(*places, 8)
    >>> tokens[:, 0].tolist(), scales[0].tolist()
    ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    tokens = rows // 4 * 4 + columns % 4
    return tokens, rows % 4 * (num_scales // 4) + columns // 4
