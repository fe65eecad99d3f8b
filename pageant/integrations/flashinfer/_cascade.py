"""Attention over keys in several levels: those shared by all, by groups, by nobody."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer._inputs import Cache, DType
from pageant.integrations.flashinfer._merge import merge_state_in_place
from pageant.integrations.flashinfer.absent import refuse
from pageant.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

Tensors = list[torch.Tensor]


class MultiLevelCascadeAttentionWrapper:
    """One paged prefill a level, each over its own keys, joined afterwards.

    Pageant also finds shared pages by itself: a ``pageant.Attention`` given whole page tables needs
    no levels.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Tensors | None = None,
        paged_kv_indptr_buf_arr: Tensors | None = None,
        paged_kv_indices_buf_arr: Tensors | None = None,
        paged_kv_last_page_len_buf_arr: Tensors | None = None,
    ) -> None:
        arrays = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        if use_cuda_graph and any(array is None for array in arrays):
            raise ValueError("use_cuda_graph needs all four buffer lists, one buffer a level")
        self._use_cuda_graph, self._kv_layout = use_cuda_graph, kv_layout
        given: list[Any] = [float_workspace_buffer, kv_layout, use_cuda_graph]
        self._levels: list[BatchPrefillWithPagedKVCacheWrapper] = []
        for level in range(num_levels):
            buffers: list[Any] = [array[level] for array in arrays if array and use_cuda_graph]
            self._levels.append(BatchPrefillWithPagedKVCacheWrapper(*given, *buffers))

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """As given to the constructor."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Tensors
    ) -> None:
        """Take other workspaces."""
        for level, buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(  # budget: FlashInfer's signature
        self,
        qo_indptr_arr: Tensors,
        paged_kv_indptr_arr: Tensors,
        paged_kv_indices_arr: Tensors,
        paged_kv_last_page_len: Tensors,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plan every level; only the last one is causal.

        A level knows its own keys alone, so what depends on where a key stands in the whole
        sequence, a window or ALiBi, is refused for more than one level.
        """
        if len(self._levels) > 1 and (window_left >= 0 or pos_encoding_mode != "NONE"):
            refuse("window_left or pos_encoding_mode over several levels")
        last = len(self._levels) - 1
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        for index, level in enumerate(self._levels):
            given: list[Any] = [*(array[index] for array in arrays), *sizes]
            level.plan(*given, **{**options, "causal": causal and index == last})

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """Out [T, Hq, D] of q [T, Hq, D] over the keys of all levels."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run

    def end_forward(self) -> None:
        """Deprecated; lets go of caches that runs have seen."""
        for level in self._levels:
            level.end_forward()
