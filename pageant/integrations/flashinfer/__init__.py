"""A stand-in for ``import flashinfer``: its attention over paged caches, computed by Pageant.

    import pageant.integrations.flashinfer as flashinfer

Names, arguments, defaults, shapes and errors are FlashInfer's; kernels, workspaces and plans are
Pageant's, on any device Pageant runs on.
"""

from pageant.integrations.flashinfer import (
    attention,
    cascade,
    decode,
    fp4_quantization,
    page,
    pod,
    prefill,
    quantization,
    sparse,
    triton,
    utils,
)
from pageant.integrations.flashinfer.absent import NAMES, AbsentName
from pageant.integrations.flashinfer.attention import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
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
from pageant.integrations.flashinfer.fp4_quantization import (
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    nvfp4_quantize_paged_kv_cache,
)
from pageant.integrations.flashinfer.page import (
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from pageant.integrations.flashinfer.pod import (
    BatchPODWithPagedKVCacheWrapper,
    PODWithPagedKVCacheWrapper,
)
from pageant.integrations.flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_context_with_kv_cache,
)
from pageant.integrations.flashinfer.quantization import packbits, segment_packbits
from pageant.integrations.flashinfer.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
)
from pageant.integrations.flashinfer.utils import FP4Tensor
from pageant.integrations.flashinfer.xqa import xqa  # the function, as in FlashInfer

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "FP4Tensor",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "attention",
    "cascade",
    "decode",
    "fast_decode_plan",
    "fp4_quantization",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_paged_kv_cache",
    "packbits",
    "page",
    "pod",
    "prefill",
    "quantization",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "sparse",
    "triton",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "utils",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
]


def __getattr__(name: str) -> AbsentName:
    """A name FlashInfer has and we do not: importable, and refused when called."""
    if name in NAMES:
        return AbsentName(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
