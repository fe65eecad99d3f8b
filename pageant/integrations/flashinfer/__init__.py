"""A stand-in for ``import flashinfer``: its attention over paged caches, computed by Pageant.

    import pageant.integrations.flashinfer as flashinfer

Names, arguments, defaults, shapes and errors are FlashInfer's; kernels, workspaces and plans are
Pageant's, on any device Pageant runs on.
"""

from pageant.integrations.flashinfer import (
    cascade,
    decode,
    page,
    prefill,
    quantization,
    utils,
    xqa,
)
from pageant.integrations.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from pageant.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from pageant.integrations.flashinfer.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from pageant.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_context_with_kv_cache,
)
from pageant.integrations.flashinfer.quantization import packbits, segment_packbits
from pageant.integrations.flashinfer.utils import FP4Tensor

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "FP4Tensor",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "cascade",
    "decode",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "packbits",
    "page",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "utils",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
]
