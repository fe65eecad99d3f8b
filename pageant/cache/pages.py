"""The page pool: memory of our own (PagedCache) or the engine's (wrap), layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.cache.formats import Format, resolve
from pageant.cache.layout import CacheLayout, split_combined
from pageant.types import CacheSpec, Shape, bad


@dataclass(frozen=True)
class LayerCache:
    """One layer's pages, as element views over somebody's memory.

    Attributes:
        k: [P, N, Hkv, D] in the format's element dtype; any strides, unit content stride.
        v: [P, N, Hkv, Dv], likewise.
        format: how an element is stored.
        k_scales, v_scales: scales stored with the pages; None for formats without any.
    """

    k: torch.Tensor
    v: torch.Tensor
    format: Format
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

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

    def __init__(self, layout: CacheLayout, fmt: Format, device: torch.device) -> None:
        self.layout = layout
        self.storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._layers = [
            LayerCache(*layout.views(self.storage, layer, fmt.element_dtype), fmt)
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
    )


def wrap(
    shape: Shape,
    spec: CacheSpec,
    tensors: tuple[torch.Tensor, torch.Tensor | None],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    device: torch.device,
) -> LayerCache:
    """One layer's cache over tensors that exist already, without copying.

    Args:
        shape, spec: what the tensors must hold.
        tensors: keys [P, N, Hkv, D] and values [P, N, Hkv, Dv]; or both in one, in the layout's
            axis order, and None.
        scales: those of keys and values, for formats that store them.
        device: where the tensors must be.

    Tensors may have the format's element dtype, or a one-byte integer type for an 8-bit format.
    """
    fmt = resolve(spec.format, shape.dtype)
    for name, given in zip(("k_scales", "v_scales"), scales, strict=True):
        if given is not None and fmt.scale_dtype is None:
            raise bad(name, "given", f"None: cache format {fmt.name} stores no scales")
    heads, tokens = shape.num_kv_heads, spec.page_size
    k, v = tensors
    names = ("k", "v")
    if v is None:
        names = ("combined", "combined")
        whole = _element_view("combined", k, fmt)
        dims = (shape.head_dim, shape.value_dim)
        k, v = split_combined(whole, spec.layout, dims, (heads, tokens))
    k, v = _element_view(names[0], k, fmt), _element_view(names[1], v, fmt)
    for name, view, dim in ((names[0], k, shape.head_dim), (names[1], v, shape.value_dim)):
        if view.dim() != 4 or tuple(view.shape[1:]) != (tokens, heads, dim):
            allowed = f"[pages, page_size {tokens}, kv heads {heads}, head size {dim}]"
            raise bad(name, tuple(view.shape), allowed)
        if view.device != device:
            raise bad(name, str(view.device), f"a tensor on {device}")
        if view.stride(-1) != 1:
            raise bad(name, f"content stride {view.stride(-1)}", "content stride 1")
        if view.requires_grad:
            raise bad(name, "a tensor that requires grad", "one that does not")
    if k.shape[0] != v.shape[0]:
        raise bad("v", f"{v.shape[0]} pages", f"as many pages as k, {k.shape[0]}")
    return LayerCache(k, v, fmt)


def _element_view(name: str, tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise bad(name, tensor, f"a tensor of {fmt.element_dtype}")
    if tensor.dtype == fmt.element_dtype:
        return tensor
    if fmt.bits == 8 and tensor.dtype in (torch.uint8, torch.int8):
        return tensor.view(fmt.element_dtype)
    bytes_too = " or uint8" if fmt.bits == 8 else ""
    raise bad(name, tensor.dtype, f"{fmt.element_dtype}{bytes_too} for cache format {fmt.name}")
