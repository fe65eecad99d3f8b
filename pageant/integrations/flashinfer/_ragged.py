"""Prefill over keys that lie one request after another, without pages."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import (
    FP8,
    Cache,
    DType,
    Pair,
    check_pos_mode,
    rotated,
)
from pageant.integrations.flashinfer._prefill import PrefillWrapper, heads_and_factors
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._setting import Factors
from pageant.integrations.flashinfer.absent import refuse
from pageant.types import Scalar


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Prefill over rows of keys; each row is read as a page of one token.

    With pos_encoding_mode="ROPE_LLAMA" each run makes rotated copies of q and k.
    """

    def __init__(  # budget: FlashInfer's signature
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        if use_cuda_graph:
            refuse("use_cuda_graph over rows of keys")
        self._take_buffers(qo_indptr_buf, custom_mask_buf, mask_indptr_buf)
        self._kv_indptr: torch.Tensor | None = None
        self._rope: tuple[float, float] | None = None

    def plan(  # budget: FlashInfer's signature
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        """Plan a step; a custom mask replaces `causal`, and costs what `_masks` says.

        With kv_indptr on a GPU only the first run knows how many keys there are, and plans; the
        table then has R rows of them all, unless max_sequence_kv bounds a request's.
        """
        self._refuse_items(prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr)
        if v_indptr is not None or o_indptr is not None:
            refuse("v_indptr, o_indptr")
        q_dtype = q_data_type
        self._setting_now = self._setting(
            (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_vo),
            (q_dtype, kv_data_type, o_data_type or _default_out(q_dtype)),
            causal=causal,
            pos_encoding_mode=check_pos_mode(pos_encoding_mode),
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rotates=True,
        )
        self._rope = None
        if pos_encoding_mode == "ROPE_LLAMA":
            self._rope = (rope_scale or 1.0, rope_theta or 1e4)
        self._queries = _lengths.queries(qo_indptr, self.device)
        self._kv_indptr, self._masks = kv_indptr, (custom_mask, packed_custom_mask)
        self._num_keys = max_sequence_kv
        self._is_planned = kv_indptr.is_cpu or max_sequence_kv is not None
        if self._is_planned:
            self._plan(max_sequence_kv)

    begin_forward = plan

    def _plan(self, longest: int | None) -> None:
        assert self._kv_indptr is not None
        keys = _lengths.ragged(self._kv_indptr, longest, self.device)
        mask = self._mask(*self._masks, self._queries, keys)
        self._runner.plan(self._setting_now, self._queries, keys, mask)

    def run(  # budget: FlashInfer's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scalar | None = None,
        k_scale: Scalar | None = None,
        v_scale: Scalar | None = None,
        o_scale: Scalar | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Cache | None = None,
    ) -> Result:
        """Attention of q [T, Hq, D] over k [Tk, Hkv, D] and v [Tk, Hkv, Dv].

        As in FlashInfer, q_scale, k_scale and v_scale count only beside kv_cache_sf.
        """
        if o_scale is not None:
            refuse("o_scale of the ragged wrapper")
        if kv_cache_sf is None:
            q_scale = k_scale = v_scale = None
        factors = heads_and_factors(args, self._takes_sinks, q_scale, k_scale, v_scale, None)
        return self.attend(q, (k, v), kv_cache_sf, factors, out, lse, return_lse)

    def attend(
        self,
        q: torch.Tensor,
        pair: Pair,
        scales: Cache | None,
        factors: Factors,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """`run`, with factors that always count.

        Args:
            q, pair: q [T, Hq, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv].
            scales: of nvfp4 keys and values, e4m3 [Tk, Hkv, D / 16].
            factors: scales and sinks.
            out, lse, return_lse: as in `run`.
        """
        k, v = pair
        if self._kv_indptr is None:
            raise RuntimeError("run before plan; allowed: plan() first, then run() once a layer")
        if not self._is_planned:
            self._plan(k.shape[0])
            self._is_planned = True
        if self._rope is not None:
            q, k = self._rotate(q, k, *self._rope)
        return self._runner.run(
            q,
            (k.unsqueeze(1), v.unsqueeze(1)),
            None if scales is None else (scales[0].unsqueeze(1), scales[1].unsqueeze(1)),
            factors,
            out=out,
            lse=lse,
            return_lse=return_lse,
        )

    def _rotate(
        self, q: torch.Tensor, k: torch.Tensor, scale: float, theta: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both rotated: a row by its place among its request's keys, ends aligned."""
        if k.dtype == torch.uint8:
            refuse("pos_encoding_mode='ROPE_LLAMA' over pages")
        assert self._kv_indptr is not None
        key_starts = _lengths.on(self._kv_indptr, self.device)
        starts = self._queries.starts
        shift = key_starts.diff() - starts.diff()
        first = -starts[:-1] + shift
        return (
            rotated(q, _positions(q.shape[0], starts, first), scale, theta),
            rotated(k, _positions(k.shape[0], key_starts, -key_starts[:-1]), scale, theta),
        )


def _positions(count: int, starts: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Of each row: its number plus what its request adds."""
    row = torch.arange(count, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    return row + first[owner.clamp_(max=first.shape[0] - 1)]


def _default_out(q_data_type: DType) -> DType | None:
    """bfloat16 for fp8 queries; else the query's type."""
    name = str(q_data_type).removeprefix("torch.")
    return "bfloat16" if name in {str(dtype).removeprefix("torch.") for dtype in FP8} else None
