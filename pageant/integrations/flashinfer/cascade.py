"""FlashInfer's names for keys shared by several requests, and for joining partial results."""

from __future__ import annotations

from pageant.integrations.flashinfer._cascade import MultiLevelCascadeAttentionWrapper
from pageant.integrations.flashinfer._merge import merge_state, merge_state_in_place, merge_states
from pageant.integrations.flashinfer._shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
