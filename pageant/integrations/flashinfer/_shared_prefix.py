"""FlashInfer's older two-level wrappers: one prefix for all requests, and pages of their own."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer._decode import BatchDecodeWithPagedKVCacheWrapper
from pageant.integrations.flashinfer._inputs import Cache
from pageant.integrations.flashinfer._merge import merge_state
from pageant.integrations.flashinfer._single import single_prefill_with_kv_cache
from pageant.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode: `begin_forward` as the decode wrapper's plan, `forward` with the prefix's rows."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._own = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        *sizes: int,
        data_type: str = "float16",
    ) -> None:
        """Plan; sizes: num_qo_heads, num_kv_heads, head_dim, page_size."""
        table = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        given: tuple[Any, ...] = (*table, *sizes)
        options: dict[str, Any] = {"q_data_type": data_type, "kv_data_type": data_type}
        self._own.plan(*given, **options)

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
    ) -> torch.Tensor:
        """Out of q [B, Hq, D] over the prefix, k and v [n, Hkv, D] (HND [Hkv, n, D]), and pages."""
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return _with_prefix(q, k_shared, v_shared, own, self._kv_layout)

    def end_forward(self) -> None:
        """Deprecated; lets go of caches that runs have seen."""
        self._own.end_forward()


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill: the prefix is visible to all rows, `causal` speaks of requests' own keys."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._own = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._planned: tuple[tuple[Any, ...], str] = (), "float16"

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *sizes: int,
        data_type: str = "float16",
    ) -> None:
        """Note a plan; sizes: num_qo_heads, num_kv_heads, head_dim, page_size."""
        table = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned = (*table, *sizes), data_type

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
    ) -> torch.Tensor:
        """Out of q [T, Hq, D] over the prefix, k and v [n, Hkv, D] (HND [Hkv, n, D]), and pages."""
        given, data_type = self._planned
        options: dict[str, Any] = {"causal": causal, "q_data_type": data_type}
        self._own.plan(*given, **options)
        own = self._own.run(q, unique_kv_cache, return_lse=True)
        return _with_prefix(q, k_shared, v_shared, own, self._kv_layout)

    def end_forward(self) -> None:
        """Deprecated; lets go of caches that runs have seen."""
        self._own.end_forward()


def _with_prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_layout: str,
) -> torch.Tensor:
    prefix = single_prefill_with_kv_cache(q, k, v, kv_layout=kv_layout, return_lse=True)
    return merge_state(*own, *prefix)[0]
