"""FlashInfer's nvfp4 helpers for caches: rows and whole pages to packed elements, and back."""

from __future__ import annotations

import torch

from pageant.cache.formats import FORMATS
from pageant.cache.layout import swizzled
from pageant.cache.pages import LayerCache
from pageant.cache.quantize import dequantize, quantize
from pageant.integrations.flashinfer._inputs import Cache, Pair, check_layout, sides
from pageant.ops.pages import dequantize_pages

__all__ = [
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_paged_kv_cache",
]

LARGEST = 448.0  # of e4m3


def nvfp4_kv_quantize(input: torch.Tensor, global_scale: torch.Tensor) -> Pair:
    """Rows [M, K] as packed elements uint8 [M, K / 2] and linear e4m3 block scales [M, K / 16].

    `global_scale`, of one element, is what reading multiplies by.
    """
    codes, scales = quantize(input, "nvfp4", global_scale)
    assert scales is not None
    return codes, scales


def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[M, K] of what `nvfp4_kv_quantize` gave.

    >>> codes, scales = nvfp4_kv_quantize(torch.arange(16.0)[None], torch.ones(1))
    >>> nvfp4_kv_dequantize(codes, scales, torch.ones(1), torch.float32)[0, :5].tolist()
    [0.0, 1.25, 2.5, 2.5, 3.75]
    """
    return dequantize(fp4_data, block_scales, "nvfp4", global_scale).to(output_dtype)


def nvfp4_kv_dequantize_paged(  # budget: FlashInfer's signature
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Each request's keys and values as rows, written to output_k and output_v.

    Args:
        paged_kv_cache, kv_cache_sf: packed pages, and their linear e4m3 block scales.
        block_tables: int [B, W].
        seq_lens: int32 [B].
        k_scale, v_scale: float32 of one element, what reading multiplies by.
        output_k, output_v: [B, S, Hkv, D] and [B, S, Hkv, Dv], float16 or bfloat16; rows from
            seq_lens on stay as they are.
        kv_layout: "NHD" or "HND".
    """
    if seq_lens.dtype != torch.int32:
        raise ValueError(f"seq_lens is of {seq_lens.dtype}; allowed: torch.int32")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ValueError(f"{name} is {scale.dtype} {list(scale.shape)}; allowed: one float32")
    for name, x in (("output_k", output_k), ("output_v", output_v)):
        if x.dim() != 4 or x.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; allowed: [B, S, H, D], 16 bits")
    k, v = sides(paged_kv_cache, check_layout(kv_layout))
    k_scales, v_scales = sides(kv_cache_sf, kv_layout)
    longest, size = output_k.shape[1], k.shape[1]
    table = block_tables[:, : -(-longest // size)].to(torch.int32)
    lens = seq_lens.clamp(max=min(longest, table.shape[1] * size))
    pages, _ = dequantize_pages(
        LayerCache(k, v, FORMATS["nvfp4"], k_scales, v_scales),
        table,
        lens,
        dtype=output_k.dtype,
        scales=(k_scale, v_scale),
    )
    for rows, out in ((pages.k, output_k), (pages.v, output_v)):
        rows = rows.reshape(len(lens), -1, *rows.shape[2:])[:, :longest]
        own = torch.arange(rows.shape[1], device=lens.device) < lens[:, None]
        held = out[:, : rows.shape[1]]
        held.copy_(torch.where(own[..., None, None], rows, held))


def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: str = "HND",
    k_global_sf: torch.Tensor | None = None,
    v_global_sf: torch.Tensor | None = None,
) -> tuple[Pair, Pair, torch.Tensor, torch.Tensor]:
    """Whole pages as the trtllm calls read them: V's block scales are swizzled by four tokens.

    Args:
        k_cache, v_cache: [P, Hkv, N, D], or NHD [P, N, Hkv, D].
        kv_layout: "HND" or "NHD".
        k_global_sf, v_global_sf: one element, by which values are multiplied; None: 448 / absmax.

    Returns:
        Packed keys and values, their block scales, and 1 / k_global_sf and 1 / v_global_sf.
    """
    tokens = 2 if check_layout(kv_layout) == "HND" else 1
    codes, blocks, factors = [], [], []
    for x, given in ((k_cache, k_global_sf), (v_cache, v_global_sf)):
        sf = LARGEST / x.float().abs().amax() if given is None else given
        factor = (1.0 / sf).float().reshape(1)
        elements, scales = quantize(x, "nvfp4", factor)
        assert scales is not None
        codes.append(elements)
        blocks.append(scales)
        factors.append(factor)
    blocks[1] = _swizzle(blocks[1], tokens)
    return (codes[0], codes[1]), (blocks[0], blocks[1]), factors[0], factors[1]


def _swizzle(scales: torch.Tensor, tokens: int) -> torch.Tensor:
    """Scales [P, .., D / 16] in the order trtllm-gen reads V's, within each page of each head."""
    plane = scales.view(torch.uint8).movedim(tokens, 1)  # [P, N, Hkv, S]
    size, blocks = plane.shape[1], plane.shape[3]
    if size % 4 or blocks % 4:
        raise ValueError(f"pages are {size} tokens of {blocks} blocks; allowed: multiples of 4")
    row = torch.arange(size, device=scales.device)
    rows, columns = swizzled(row, blocks)  # where each token's blocks go
    result = torch.empty_like(plane)
    result[:, rows, :, columns] = plane.permute(1, 3, 0, 2)
    return result.movedim(1, tokens).contiguous().view(scales.dtype)
