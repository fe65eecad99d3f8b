"""The page pool, layer by layer: LayerCache is one layer of it, PagedCache all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from pageant.cache.formats import Format, resolve
from pageant.cache.layout import CacheLayout
from pageant.types import CacheSpec, Shape


class Side(NamedTuple):
    """Keys or values of one layer: elements, stored scales, and whether those are swizzled."""

    elements: torch.Tensor
    scales: torch.Tensor | None
    is_swizzled: bool


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages, as element views over somebody's memory.

    Attributes:
        k: [P, N, Hkv, D] in the format's element dtype; nvfp4: uint8 [P, N, Hkv, D / 2]. Any
            strides, unit content stride.
        v: [P, N, Hkv, Dv], likewise.
        format: how an element is stored.
        k_scales, v_scales: float32 [P, N, Hkv] where each row has one; nvfp4: e4m3
            [P, N, Hkv, ceil(D / 16)]; None for formats without any.
        v_scale_order: "linear", or "swizzled": see ``pageant.cache.layout.swizzled``.
    """

    k: torch.Tensor
    v: torch.Tensor
    format: Format
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    v_scale_order: str = "linear"

    @property
    def sides(self) -> tuple[Side, Side]:
        """Keys, then values."""
        is_swizzled = self.v_scale_order == "swizzled"
        return Side(self.k, self.k_scales, False), Side(self.v, self.v_scales, is_swizzled)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Elements of keys and values, then their scales, where there are any."""
        parts = (self.k, self.v, self.k_scales, self.v_scales)
        return tuple([part for part in parts if part is not None])

    @property
    def is_far(self) -> bool:
        """Whether some element, or scale, lies 2**31 or more from its tensor's first."""
        return any(
            sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
            >= 1 << 31
            for part in self.tensors
        )

    @property
    def num_pages(self) -> int:
        """P: pages of the pool."""
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        """N: tokens a page."""
        return self.k.shape[1]


class PagedCache:
    """Pages of every layer in one allocation; ``cache[i]`` is layer i's LayerCache.

    Attributes:
        layout: where each byte lies.
        storage: uint8 [num_bytes] on the device, zeroed.
    """

    def __init__(
        self,
        layout: CacheLayout,
        fmt: Format,
        device: torch.device,
        v_scale_order: str = "linear",
    ) -> None:
        self.layout = layout
        self.storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._layers = [
            layer_of(layout, self.storage, layer, fmt, v_scale_order)
            for layer in range(layout.num_layers)
        ]

    def __getitem__(self, layer: int) -> LayerCache:
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.layout.num_bytes


def layer_of(
    layout: CacheLayout,
    storage: torch.Tensor,
    layer: int,
    fmt: Format,
    v_scale_order: str = "linear",
) -> LayerCache:
    """One layer of a cache that lies in `storage`, uint8 [num_bytes]."""
    k, v = (layout.view(storage, layer, part, fmt.element_dtype) for part in ("k", "v"))
    if fmt.scale_dtype is None:
        return LayerCache(k, v, fmt)
    names = ("k_scales", "v_scales")
    k_scales, v_scales = (layout.view(storage, layer, part, fmt.scale_dtype) for part in names)
    if not fmt.scale_block:
        k_scales, v_scales = k_scales.squeeze(-1), v_scales.squeeze(-1)
    return LayerCache(k, v, fmt, k_scales, v_scales, v_scale_order)


def layout_for(shape: Shape, spec: CacheSpec, num_layers: int, num_pages: int) -> CacheLayout:
    """The byte layout of a cache of this shape.

    >>> spec = CacheSpec(format="fp8_e4m3", page_size=16)
    >>> shape = Shape(num_q_heads=8, num_kv_heads=2, head_dim=192, v_head_dim=128)
    >>> layout_for(shape, spec, num_layers=1, num_pages=1).page_bytes  # 16 tokens, 2 heads, 320 B
    10240
    """
    fmt = resolve(spec.format, shape.dtype)
    return CacheLayout(
        spec.layout,
        num_layers,
        num_pages,
        shape.num_kv_heads,
        spec.page_size,
        fmt.data_bytes(shape.head_dim),
        fmt.data_bytes(shape.value_dim),
        fmt.scale_bytes(shape.head_dim),
        fmt.scale_bytes(shape.value_dim),
    )
