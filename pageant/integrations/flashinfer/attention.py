"""FlashInfer's attention module: a wrapper for sinks, and one for batches of every kind."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import (
    Cache,
    DType,
    cap_of,
    check_layout,
    dtype_of,
    scale_of,
    sides,
)
from pageant.integrations.flashinfer._runner import Runner
from pageant.integrations.flashinfer._setting import Factors, Setting
from pageant.integrations.flashinfer._wrapper import PagedBuffers
from pageant.integrations.flashinfer.absent import refuse
from pageant.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from pageant.types import Scalar

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]

WINDOW_PLACE = 16  # of window_left among plan's arguments


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Paged prefill whose run takes sinks and sm_scale: ``run(q, cache, sinks, sm_scale)``.

    The sm_scale of `run` counts, not the plan's; q_scale and k_scale are to be in it already. Sizes
    and types given here are ignored: `plan` says them again. Soft caps and custom masks work too.
    """

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise ValueError(f"backend is {backend!r}; allowed: auto, fa2, fa3")
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._takes_sinks = True
        self._default_window = window_left

    def plan(self, *args: Any, **options: Any) -> None:
        """As in `BatchPrefillWithPagedKVCacheWrapper`; unless given, the constructor's window."""
        if len(args) < WINDOW_PLACE:
            options.setdefault("window_left", self._default_window)
        super().plan(*args, **options)

    begin_forward = plan


class BatchAttention:
    """Prefill and decode in one paged batch; `run` always returns out and lse.

    Args:
        kv_layout: "NHD" or "HND".
        device: where it computes.
    """

    def __init__(self, kv_layout: str = "NHD", device: str = "cuda") -> None:
        self._kv_layout = check_layout(kv_layout)
        self.device = torch.empty(0, device=device).device
        self._runner = Runner(self.device)
        self._soft_cap: float | None = None

    def plan(  # budget: FlashInfer's signature
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Plan a batch; kv_len_arr int32 [R] holds each request's number of keys."""
        if use_profiler:
            refuse("use_profiler")
        last = torch.where(kv_len_arr > 0, (kv_len_arr - 1) % page_size + 1, 0)
        keys = PagedBuffers().keys((kv_indptr, kv_indices, last), page_size, self.device)
        q_dtype = dtype_of(q_data_type)
        self._soft_cap = cap_of(logits_soft_cap)
        setting = Setting(
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            v_head_dim=head_dim_vo,
            q_dtype=q_dtype,
            kv_dtype=dtype_of(kv_data_type),
            out_dtype=q_dtype,
            scale=scale_of(sm_scale, head_dim_qk),
            soft_cap=self._soft_cap,
            causal=causal,
        )
        self._runner.plan(setting, _lengths.queries(qo_indptr, self.device), keys)

    def run(  # budget: FlashInfer's signature
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scalar | None = None,
        v_scale: Scalar | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse of q [T, Hq, D]; logits_soft_cap must be the planned one again.

        FlashInfer silently uses the cap given here; a cap that differs from the plan's is refused.
        """
        if cap_of(logits_soft_cap) != self._soft_cap:
            allowed = f"{self._soft_cap}, as planned"
            raise ValueError(f"logits_soft_cap is {logits_soft_cap}; allowed: {allowed}")
        result = self._runner.run(
            q,
            sides(kv_cache, self._kv_layout),
            None if kv_cache_sf is None else sides(kv_cache_sf, self._kv_layout),
            Factors(k_scale=k_scale, v_scale=v_scale),
            out=out,
            lse=lse,
            return_lse=True,
        )
        assert not isinstance(result, torch.Tensor)
        return result
