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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pageant.types import bad

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True)
class CacheLayout:
    """The byte layout of a whole cache.

    Attributes:
        order: one of LAYOUTS.
        num_layers, num_pages, num_kv_heads, page_size: sizes of L, B, H and N.
        key_bytes, value_bytes: the two parts of one row; C is their sum.
    """

    order: str
    num_layers: int
    num_pages: int
    num_kv_heads: int
    page_size: int
    key_bytes: int
    value_bytes: int

    @property
    def sizes(self) -> dict[str, int]:
        """Extent of each axis; C in bytes."""
        return {
            "L": self.num_layers,
            "B": self.num_pages,
            "H": self.num_kv_heads,
            "N": self.page_size,
            "C": self.key_bytes + self.value_bytes,
        }

    @property
    def strides(self) -> dict[str, int]:
        """Bytes between neighbours along each axis."""
        sizes, strides, step = self.sizes, {}, 1
        for axis in reversed(self.order):
            strides[axis] = step
            step *= sizes[axis]
        return {axis: strides[axis] for axis in "LBHNC"}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.num_kv_heads * self.page_size * (self.key_bytes + self.value_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return math.prod(self.sizes.values())

    def offset(self, *, layer: int, page: int, head: int, token: int, byte: int) -> int:
        """Byte offset of one byte of one row."""
        at = {"L": layer, "B": page, "H": head, "N": token, "C": byte}
        strides = self.strides
        return sum(at[axis] * strides[axis] for axis in at)

    def position(self, offset: int) -> dict[str, int]:
        """Layer, page, head, token and byte of the row at an offset: the inverse of `offset`."""
        strides, sizes = self.strides, self.sizes
        return {axis: offset // strides[axis] % sizes[axis] for axis in "LBHNC"}

    def views(
        self, storage: torch.Tensor, layer: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys [P, N, Hkv, D] and values [P, N, Hkv, Dv], sharing `storage`.

        Args:
            storage: uint8 [num_bytes], contiguous.
            layer: index of the layer.
            dtype: element type of the views.
        """
        sizes = self.sizes
        whole = storage.view([sizes[axis] for axis in self.order])
        whole = whole.permute([self.order.index(axis) for axis in "LBNHC"])[layer]
        key, value = whole.split([self.key_bytes, self.value_bytes], dim=-1)
        return key.view(dtype), value.view(dtype)


def split_combined(
    combined: torch.Tensor, order: str, head_dims: tuple[int, int], expected: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer's tensor whose axes stand in the layout's order, without L.

    Args:
        combined: [P, Hkv, N, D + Dv] for "LBHNC", [P, N, Hkv, D + Dv] for "LBNHC",
            [Hkv, P, N, D + Dv] for "LHBNC"; any strides, unit content stride.
        order: one of LAYOUTS.
        head_dims: D and Dv.
        expected: Hkv and N, checked.

    >>> k, v = split_combined(torch.zeros(7, 2, 16, 24), "LBHNC", (16, 8), (2, 16))
    >>> k.shape, v.shape
    (torch.Size([7, 16, 2, 16]), torch.Size([7, 16, 2, 8]))
    """
    axes = order.replace("L", "")
    want = {"H": expected[0], "N": expected[1], "C": sum(head_dims)}
    shape = ", ".join(str(want.get(axis, "pages")) for axis in axes)
    if combined.dim() != len(axes) or any(
        size != want.get(axis, size) for axis, size in zip(axes, combined.shape, strict=True)
    ):
        raise bad("combined", tuple(combined.shape), f"[{shape}] for layout {order}")
    logical = combined.permute([axes.index(axis) for axis in "BNHC"])
    key, value = logical.split(list(head_dims), dim=-1)
    return key, value
