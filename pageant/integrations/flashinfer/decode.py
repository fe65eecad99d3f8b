"""FlashInfer's decode names: one or a few new tokens a request over pages."""

from __future__ import annotations

import torch

from pageant.integrations.flashinfer._decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from pageant.integrations.flashinfer._inputs import DType
from pageant.integrations.flashinfer._single import single_decode_with_kv_cache
from pageant.integrations.flashinfer._trtllm import trtllm_batch_decode_with_kv_cache
from pageant.integrations.flashinfer.xqa import xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]


def fast_decode_plan(  # budget: FlashInfer's signature
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan again a wrapper that was planned before; with CUDA graphs its buffers are left alone.

    `global_override_indptr_cpu`, the host's copy of indptr, bounds the table without graphs.
    """
    step = self.step
    if step is None:
        raise ValueError("fast_decode_plan needs a prior plan() of this wrapper")
    self.check_q_len(q_len_per_req)
    setting = self._setting(
        (num_qo_heads, num_kv_heads),
        (head_dim, None),
        (q_data_type or data_type, kv_data_type or data_type, step.setting.out_dtype),
        causal=True,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
    )
    if global_override_indptr_cpu is not None:
        indptr = global_override_indptr_cpu
    table = (indptr, indices, last_page_len)
    keys = self._buffers.keys(table, page_size, self.device, in_place=True)
    self.plan_lengths(setting, keys, q_len_per_req)
