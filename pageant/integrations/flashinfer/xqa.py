"""FlashInfer's XQA names: decoding with drafts whose masks are packed bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._call import attend, blank, draft_mask
from pageant.integrations.flashinfer._inputs import Cache, window_of
from pageant.integrations.flashinfer._setting import Factors
from pageant.types import Scalar

__all__ = ["xqa", "xqa_batch_decode_with_kv_cache"]


def xqa_batch_decode_with_kv_cache(  # budget: FlashInfer's signature
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Scalar = 1.0,
    bmm2_scale: Scalar = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int = 1,
    o_scale: Scalar = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: Cache | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decoding of query [T, Hq, D]; scores are bmm1_scale * (q·k), the output bmm2_scale * P·V.

    Args:
        mask: uint16, of drafts: [B, q_len, words] or, ragged, [T, words]; bit j of a row says
            whether it sees draft token j of its request. Older keys are always visible.
        q_cu_seq_lens: int32 [B + 1], first token of each request; q_len_per_req is then the most.
        o_scale: what bmm2_scale was divided by. As in FlashInfer, with bmm2_scale = v_scale /
            o_scale the result is the attention's output divided by o_scale.
        others: as in `trtllm_batch_decode_with_kv_cache`; block scales of nvfp4 are linear.
    """
    if q_len_per_req > 1 and mask is None:
        raise ValueError("mask is None; allowed for q_len_per_req above 1: packed bits, uint16")
    if q_cu_seq_lens is None:
        queries = _lengths.uniform(seq_lens.shape[0], q_len_per_req, query.device)
    else:
        starts = _lengths.queries(q_cu_seq_lens, query.device)
        queries = replace(starts, num_tokens=query.shape[0], longest=q_len_per_req)
    result: Any = attend(
        (query, kv_cache, kv_cache_sf, kv_layout),
        workspace_buffer,
        queries,
        (block_tables, seq_lens, max_seq_len),
        blank(query, query.dtype if out is None else out.dtype, window=window_of(window_left)),
        Factors(k_scale=bmm1_scale, v_scale=bmm2_scale, sinks=sinks),
        (out, None, False),
        draft_mask(mask, queries) if q_len_per_req > 1 else None,
    )
    assert isinstance(result, torch.Tensor)
    return result


def xqa(  # budget: FlashInfer's signature
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: Scalar = 1.0,
    kv_scale: Scalar = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    """The call below `xqa_batch_decode_with_kv_cache`; the result is written to `output`.

    Scores are q_scale * kv_scale / sqrt(D) * (q·k), the output kv_scale * rcp_out_scale * P·V.

    Args:
        q, output: [B, 1, Hq, D], with drafts [B, 1, q_seq_len, Hq, D], ragged [T, Hq, D].
        seq_lens: [B, 1].
        sinks: float32 of Hq elements.
        sliding_win_size: keys a row sees, itself included; 0: all.
        semaphores, sm_count, enable_pdl: of no use here.
        others: as in `xqa_batch_decode_with_kv_cache`.
    """
    held = k_cache.shape[1:3] if kv_layout == "NHD" else k_cache.shape[1:3][::-1]
    if (page_size, num_kv_heads) != tuple(held):
        given = f"page_size and num_kv_heads are {page_size} and {num_kv_heads}"
        raise ValueError(f"{given}; allowed for this cache: {held[0]} and {held[1]}")
    if (k_sf_cache is None) != (v_sf_cache is None):
        raise ValueError("k_sf_cache and v_sf_cache: allowed: both, or neither")
    blocks = None
    if k_sf_cache is not None and v_sf_cache is not None:
        blocks = k_sf_cache.view(torch.float8_e4m3fn), v_sf_cache.view(torch.float8_e4m3fn)
    rows = q.reshape(-1, *q.shape[-2:])
    result = xqa_batch_decode_with_kv_cache(
        rows,
        (k_cache, v_cache),
        workspace_buffer,
        page_table,
        seq_lens.reshape(-1).to(torch.int32),
        page_table.shape[1] * page_size,
        bmm1_scale=q_scale * kv_scale * q.shape[-1] ** -0.5,
        bmm2_scale=kv_scale * rcp_out_scale,
        window_left=sliding_win_size - 1 if sliding_win_size > 0 else -1,
        out=torch.empty_like(rows, dtype=output.dtype),
        sinks=None if sinks is None else sinks.reshape(-1),
        kv_layout=kv_layout,
        q_len_per_req=q_seq_len,
        mask=mask,
        kv_cache_sf=blocks,
        q_cu_seq_lens=q_cu_seq_lens,
    )
    output.copy_(result.view(output.shape))
