"""FlashInfer's POD names: prefill beside decode; Pageant runs one after the other."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer._decode import BatchDecodeWithPagedKVCacheWrapper
from pageant.integrations.flashinfer._inputs import Cache, DType
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._single import single_prefill_with_kv_cache
from pageant.integrations.flashinfer.absent import refuse, refuse_jit
from pageant.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from pageant.types import Scalar

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


class PODWithPagedKVCacheWrapper:
    """One prefill over rows of keys, and a decode batch over pages."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_jit(jit_args)
        self._kv_layout = kv_layout
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            False,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    def plan(  # budget: FlashInfer's signature
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan the decode batch."""
        table = (indptr, indices, last_page_len)
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._decode.plan(
            *table,
            *sizes,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
        )

    begin_forward = plan

    def run(  # budget: FlashInfer's signature
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        **decode: Any,
    ) -> tuple[Result, Result]:
        """Both results, prefill's first; with an lse where asked for.

        **decode: q_scale, k_scale, v_scale and return_lse_d, of the decode batch; enable_pdl and
        use_fp16_qk_reduction change nothing. What `plan` has said already is refused.
        """
        prefill = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
            return_lse=return_lse_p,
        )
        options = {name: decode.pop(name, None) for name in ("q_scale", "k_scale", "v_scale")}
        return_lse = decode.pop("return_lse_d", False)
        for name in ("enable_pdl", "use_fp16_qk_reduction", "causal_d"):
            decode.pop(name, None)
        if decode:
            refuse("options of POD's decode batch in run", f" ({', '.join(decode)})")
        return prefill, self._decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **options)

    def end_forward(self) -> None:
        """Deprecated; lets go of caches that runs have seen."""
        self._decode.end_forward()


class BatchPODWithPagedKVCacheWrapper:
    """Two paged batches, prefill and decode, each of any numbers of tokens."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._planned: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def plan(  # budget: FlashInfer's signature
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan both; the prefill's causality and mask come with `run`, which plans it then."""
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "window_left": window_left,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or data_type,
            "sm_scale": sm_scale,
        }
        self._planned = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p, *sizes), options
        decode = (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes)
        given: list[Any] = list(decode)
        self._decode.plan(*given, **{**options, "causal": True})

    begin_forward = plan

    def run(  # budget: FlashInfer's signature
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scalar | None = None,
        k_scale: Scalar | None = None,
        v_scale: Scalar | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Result, Result]:
        """Both results, prefill's first; the decode batch is causal within a request's tokens."""
        given, options = self._planned
        masks = {"custom_mask": custom_mask_p, "packed_custom_mask": packed_custom_mask_p}
        self._prefill.plan(*given, **{**options, **masks, "causal": causal_p})
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return (
            self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse, **scales),
            self._decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **scales),
        )
