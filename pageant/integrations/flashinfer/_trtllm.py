"""FlashInfer's trtllm calls: decode and prefill by block tables, without a wrapper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pageant.device import Device
from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._call import attend, blank, draft_mask, is_nvfp4, output
from pageant.integrations.flashinfer._inputs import LN_2, Cache, DType, window_of
from pageant.integrations.flashinfer._setting import Factors
from pageant.integrations.flashinfer.absent import refuse, refuse_skipping
from pageant.integrations.flashinfer.utils import FP4Tensor
from pageant.types import Scalar


def _is_swizzled(backend: str, device: torch.device) -> bool:
    """Whether V's block scales are, as the kernels FlashInfer would choose have them."""
    if backend == "auto":
        return Device.detect(device).family in ("sm100", "sm103")
    return backend == "trtllm-gen"


def trtllm_batch_decode_with_kv_cache(  # budget: FlashInfer's signature
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Scalar = 1.0,
    bmm2_scale: Scalar = 1.0,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: DType | None = None,
    o_sf_scale: Scalar | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: Scalar = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Cache | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Any:
    """Decoding of query [T, Hq, D] by block tables; new tokens are the last of seq_lens, causal.

    Scores are bmm1_scale * (q·k), with no default factor; the output is bmm2_scale times the
    weighted values. fp8 output is divided by o_scale too. lse is base 2 and includes sinks.
    """
    _refuse(skip_softmax_threshold_scale_factor, uses_shared_paged_kv_idx)
    if enable_block_sparse_attention:
        refuse("enable_block_sparse_attention")
    if cum_seq_lens_q is not None:
        queries = replace(
            _lengths.queries(cum_seq_lens_q, query.device),
            num_tokens=query.shape[0],
            longest=max_q_len,
        )
    else:
        queries = _lengths.uniform(seq_lens.shape[0], q_len_per_req or 1, query.device)
    value_dim = query.shape[2]
    out, dtype = output(query, out, out_dtype, o_sf_scale, o_sf_vec_size, value_dim)
    swizzled = is_nvfp4(kv_cache) and _is_swizzled(backend, query.device)
    if bmm1_scale_log2 is not None:
        bmm1_scale = bmm1_scale_log2 * LN_2
    return attend(
        (query, kv_cache, kv_cache_sf, kv_layout),
        workspace_buffer,
        queries,
        (block_tables, seq_lens, max_seq_len),
        blank(query, dtype, window=window_of(window_left), swizzled=swizzled),
        Factors(
            k_scale=bmm1_scale,
            v_scale=bmm2_scale,
            sinks=sinks,
            out_scale=o_scale if o_sf_scale is None else o_sf_scale,
        ),
        (out, lse, return_lse),
        draft_mask(mask, queries),
    )


def _refuse(threshold: object, shared: bool) -> None:
    refuse_skipping(threshold)
    if not shared:
        refuse("uses_shared_paged_kv_idx=False")


def trtllm_batch_context_with_kv_cache(  # budget: FlashInfer's signature
    query: torch.Tensor,
    kv_cache: Cache,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scalar,
    bmm2_scale: Scalar,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: DType | None = None,
    o_sf_scale: Scalar | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | None = None,
    kv_cache_sf: Cache | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Any:
    """Prefill of query [T, Hq, D] by block tables; scales as in the decode call.

    Lengths come from seq_lens [batch_size] and cum_seq_lens_q [batch_size + 1]; cum_seq_lens_kv is
    not looked at. V's block scales of an nvfp4 cache are swizzled, as trtllm-gen has them.
    """
    _refuse(skip_softmax_threshold_scale_factor or uses_spcompress, uses_shared_paged_kv_idx)
    if not causal and window_left >= 0:
        refuse("causal=False with a window")
    starts = _lengths.queries(cum_seq_lens_q, query.device)
    queries = replace(starts, num_tokens=query.shape[0], longest=max_q_len)
    out, dtype = output(query, out, out_dtype, o_sf_scale, o_sf_vec_size, query.shape[2])
    return attend(
        (query, kv_cache, kv_cache_sf, kv_layout),
        workspace_buffer,
        queries,
        (block_tables, seq_lens, max_kv_len),
        blank(
            query,
            dtype,
            window=window_of(window_left),
            causal=causal,
            swizzled=is_nvfp4(kv_cache),
        ),
        Factors(
            k_scale=bmm1_scale,
            v_scale=bmm2_scale,
            sinks=sinks,
            out_scale=1.0 if o_sf_scale is None else o_sf_scale,
        ),
        (out, lse, return_lse),
    )
