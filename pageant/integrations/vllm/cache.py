"""vLLM's cache tensors and type names, in our words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pageant.cache.formats import resolve
from pageant.cache.pages import LayerCache
from pageant.cache.wrap import wrap
from pageant.types import CacheSpec, Shape, bad

# vLLM's --kv-cache-dtype, and our formats.
FORMATS = {
    "auto": "auto",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8_e4m3_token_head",
    "nvfp4": "nvfp4",
    "nvfp4_4over6": "nvfp4_4over6",
}


def format_of(kv_cache_dtype: str) -> str:
    """Our name of a cache type.

    >>> format_of("fp8_per_token_head")
    'fp8_e4m3_token_head'
    """
    if kv_cache_dtype not in FORMATS:
        raise bad("kv_cache_dtype", kv_cache_dtype, ", ".join(FORMATS))
    return FORMATS[kv_cache_dtype]


def packed(spec: Any) -> Any:
    """A layer's cache spec with room for scales stored beside keys and values.

    vLLM speaks of a page as [H, N, C]. nvfp4 takes two head slots for each kv head, a key's bytes
    each; formats with one float32 scale for each token and head take four bytes more a side.
    """
    mode = spec.kv_quant_mode
    if spec.state_content_bytes is not None:
        return spec
    if mode.is_nvfp4:
        sides = {size // 2 + size // 16 for size in (spec.head_size, spec.head_size_v)}
        if len(sides) == 2:
            return replace(spec, state_content_bytes=sum(sides))
        slots = 2 * spec.num_kv_heads
        return replace(spec, num_head_slots=slots, state_content_bytes=sides.pop())
    if mode.is_per_token_head:
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + 8)
    return spec


def layer_cache(kv_cache: torch.Tensor, shape: Shape, format: str) -> LayerCache:
    """One layer's pages over vLLM's tensor; nothing is copied.

    Args:
        kv_cache: logical [B, H, N, C] with any strides; C is keys, then values.
        shape: of the layer.
        format: our name.
    """
    fmt = resolve(format, shape.dtype)
    device = kv_cache.device
    if fmt.scale_dtype is None:
        dims = [shape.head_dim, shape.value_dim]
        rows = kv_cache.permute(0, 2, 1, 3)  # [P, N, Hkv, D + Dv]
        spec = CacheSpec(format=format, page_size=rows.shape[1])
        key, value = rows.split(dims, dim=-1)
        return wrap(shape, spec, (key, value), (None, None), device)
    layout = layout_of(kv_cache)
    axes = layout.replace("L", "").replace("C", "")
    in_order = kv_cache.permute(*("BHN".index(axis) for axis in axes), 3)
    spec = CacheSpec(format=format, page_size=kv_cache.shape[2], layout=layout)
    return wrap(shape, spec, (in_order.view(torch.uint8), None), (None, None), device)


def layout_of(kv_cache: torch.Tensor) -> str:
    """The layout of a logical [B, H, N, C] tensor, read from its strides.

    Layouts that hold one layer's pages alike count as the first of them.

    >>> [layout_of(torch.empty(2, 4, 3, 5)), layout_of(torch.empty(2, 3, 4, 5).transpose(1, 2))]
    ['LBHNC', 'LBNHC']
    """
    _, heads, rows, content = kv_cache.shape
    page, head, row, _ = kv_cache.stride()
    if head < row and heads > 1:
        return "LBNHC"
    if heads > 1 and head > page:
        return "LHBNC"
    return "LBHNC" if heads == 1 or head == rows * content else "BHLNC"
