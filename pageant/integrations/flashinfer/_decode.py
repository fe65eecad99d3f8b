"""Decoding over pages: one or a few new tokens a request."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import (
    Cache,
    DType,
    check_layout,
    sides,
)
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._setting import Factors, Setting
from pageant.integrations.flashinfer._wrapper import (
    PagedBuffers,
    Wrapper,
    warns_of_positions,
)
from pageant.integrations.flashinfer.absent import refuse, refuse_jit, refuse_skipping
from pageant.types import Scalar


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decoding over pages; `plan` once a step, `run` once a layer.

    Pageant chooses its own kernels: `use_tensor_cores` and `backend` say only what FlashInfer would
    have refused.
    """

    def __init__(  # budget: FlashInfer's signature
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_jit(jit_args)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req: int | None = None
        self._buffers = PagedBuffers.of(
            use_cuda_graph,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self._fixed_batch_size = self._buffers.batch_size

    @property
    def use_tensor_cores(self) -> bool:
        """As given to the constructor."""
        return self._use_tensor_cores

    @warns_of_positions(7)
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
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Plan a step.

        Give `indptr` and `last_page_len` on the CPU, or `block_tables`, for a table just wide
        enough: see ``_lengths.pages``. rope_scale, rope_theta, non_blocking, seq_lens,
        fixed_split_size and disable_split_kv change nothing.
        """
        if window_right != 0:
            refuse("window_right")
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size needs use_tensor_cores=True")
        self.check_q_len(q_len_per_req)
        setting = self._setting(
            (num_qo_heads, num_kv_heads),
            (head_dim, None),
            (q_data_type or data_type, kv_data_type or data_type, o_data_type),
            causal=True,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        table = (indptr, indices, last_page_len)
        self.plan_lengths(
            setting, self._buffers.keys(table, page_size, self.device, block_tables), q_len_per_req
        )

    begin_forward = plan

    def check_q_len(self, q_len: int) -> None:
        """Raise unless so many tokens a request are allowed."""
        if q_len < 1:
            raise ValueError(f"q_len_per_req is {q_len}; allowed: 1 or more")
        if q_len > 1 and not self._use_tensor_cores:
            raise ValueError("q_len_per_req above 1 needs use_tensor_cores=True")
        if q_len > 1 and self._backend == "fa3":
            refuse("q_len_per_req above 1 with backend='fa3'")
        if self._use_cuda_graph and self._q_len_per_req not in (None, q_len):
            raise ValueError(f"q_len_per_req is frozen at {self._q_len_per_req} for CUDA graphs")

    def plan_lengths(self, setting: Setting, keys: _lengths.Keys, q_len: int) -> None:
        """Plan q_len tokens for each request."""
        if q_len > 1 and keys.host is not None and bool((keys.host < q_len).any()):
            raise ValueError(f"empty KV range: a request has fewer than q_len_per_req={q_len} keys")
        self._q_len_per_req = q_len
        requests = keys.lens.shape[0]
        self._runner.plan(setting, _lengths.uniform(requests, q_len, self.device), keys)

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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Result:
        """Attention of q [B * q_len, Hq, D]; unlike in FlashInfer's fa2 and fa3, sinks count."""
        refuse_jit(args)
        refuse_skipping(skip_softmax_threshold_scale_factor)
        self._check_window(window_left)
        step = self._runner.step
        want = q.shape[0] if step is None else step.queries.num_tokens
        if q.shape[0] != want:
            raise ValueError(f"q has {q.shape[0]} rows; allowed: {want}, B * q_len_per_req")
        return self._runner.run(
            q,
            sides(paged_kv_cache, self._kv_layout),
            None if kv_cache_sf is None else sides(kv_cache_sf, self._kv_layout),
            Factors(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, sinks=sinks),
            out=out,
            lse=lse,
            return_lse=return_lse,
        )


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The same with use_cuda_graph=True."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            check_layout(kv_layout),
            True,
            use_tensor_cores,
            indptr_buffer,
            indices_buffer,
            last_page_len_buffer,
        )
