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

__all__ = ["xqa_batch_decode_with_kv_cache"]


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
