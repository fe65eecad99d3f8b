"""FlashInfer's prefill names: many new tokens a request, over pages or over rows of keys."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import Cache, DType, sides
from pageant.integrations.flashinfer._prefill import PrefillWrapper, heads_and_factors
from pageant.integrations.flashinfer._ragged import BatchPrefillWithRaggedKVCacheWrapper
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from pageant.integrations.flashinfer._trtllm import trtllm_batch_context_with_kv_cache
from pageant.integrations.flashinfer._wrapper import PagedBuffers
from pageant.integrations.flashinfer.absent import refuse_skipping
from pageant.types import Scalar

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
]


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Prefill and append over pages; `plan` once a step, `run` once a layer."""

    def __init__(  # budget: FlashInfer's signature
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._buffers = PagedBuffers.of(
            use_cuda_graph, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        )
        self._take_buffers(qo_indptr_buf, custom_mask_buf, mask_indptr_buf)
        self._fixed_batch_size = self._buffers.batch_size

    def plan(  # budget: FlashInfer's signature
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a step; a custom mask replaces `causal`, and costs what `_masks` says.

        Give the lengths on the CPU, or `block_tables`, for a table just wide enough: see
        ``_lengths.pages``. use_fp16_qk_reduction, rope_scale, rope_theta, non_blocking, seq_lens,
        seq_lens_q, max_token_per_sequence, max_sequence_kv, fixed_split_size and disable_split_kv
        change nothing.
        """
        self._refuse_items(prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr)
        setting = self._setting(
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo),
            (q_data_type, kv_data_type, o_data_type),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        keys = self._buffers.keys(table, page_size, self.device, block_tables)
        queries = _lengths.queries(self._put_starts(qo_indptr), self.device)
        mask = self._mask(custom_mask, packed_custom_mask, queries, keys)
        self._runner.plan(setting, queries, keys, mask)

    begin_forward = plan

    def run(  # budget: FlashInfer's signature
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scalar | None = None,
        k_scale: Scalar | None = None,
        v_scale: Scalar | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attention of q [T, Hq, D]; unlike in FlashInfer's fa2 and fa3, sinks count.

        *args: scale_q [Hq], scale_k [Hkv] and scale_v [Hkv] for fp8; with jit_args AttentionSink,
        sinks and sm_scale.
        """
        refuse_skipping(skip_softmax_threshold_scale_factor or uses_spcompress)
        self._check_window(window_left)
        return self._runner.run(
            q,
            sides(paged_kv_cache, self._kv_layout),
            None if kv_cache_sf is None else sides(kv_cache_sf, self._kv_layout),
            heads_and_factors(args, self._takes_sinks, q_scale, k_scale, v_scale, sinks),
            out=out,
            lse=lse,
            return_lse=return_lse,
        )
