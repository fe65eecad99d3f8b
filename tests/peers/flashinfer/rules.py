"""Which of FlashInfer's test files are taken, and which of their cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Params = Mapping[str, Any]
Rule = Callable[[Params], bool]


def _all(_: Params) -> bool:
    return True


def _unrotated(params: Params) -> bool:
    return params.get("pos_encoding_mode", "NONE") == "NONE"


def _decode(params: Params) -> bool:
    return _unrotated(params) and params.get("kv_len", 0) <= 2048


def _prefill(params: Params) -> bool:
    sizes = (("kv_len", (97, 2048)), ("qo_len", (37, 127)), ("page_size", (1, 16)))
    return _unrotated(params) and all(
        name not in params or params[name] in allowed for name, allowed in sizes
    )


def _xqa(params: Params) -> bool:
    return params.get("enable_pdl") is None


# Cases that pass or fail for another reason than a right or wrong answer; skipped with that reason.
SUBPROCESS = "not run: starts a process of its own with FlashInfer in it"
ROPE = "differs: RoPE over pages or nvfp4 keys is absent"
LESS_STRICT = "differs: refuses what Pageant computes"
DIFFERS: dict[str, str] = {
    "test_single_decode_torch_compile_cuda_graph": SUBPROCESS,
    "test_single_prefill_torch_compile_cuda_graph": SUBPROCESS,
    "test_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_cuda_graph_bad_scale": SUBPROCESS,
    "test_batch_prefill_with_paged_kv_cache_nvfp4_rope_large_head": ROPE,
    "test_batch_prefill_with_paged_kv_cache_nvfp4_rope_large_head_bf16": ROPE,
    "test_batch_prefill_with_ragged_kv_cache_nvfp4_rope_large_head": ROPE,
    "test_batch_decode_rejects_unequal_kv_strides_nvfp4_contract": LESS_STRICT,
    "test_nvfp4_quantize_append_paged_kv_cache_with_slot_mapping_rejects_capture_temp_scale": (
        LESS_STRICT
    ),
}

FILES: dict[str, Rule] = {
    "attention/test_logits_cap.py": _all,
    "attention/test_attention_sink.py": _all,
    "attention/test_xqa_batch_decode.py": _xqa,
    "attention/test_batch_decode_kernels.py": _decode,
    "attention/test_batch_prefill_kernels.py": _prefill,
    "attention/test_shared_prefix_kernels.py": _all,
    "attention/test_decode_prefill_lse.py": _all,
    "attention/test_page.py": _all,
    "utils/test_quantization.py": _all,
    "attention/test_fp8_prefill.py": _unrotated,
    "attention/test_non_contiguous_decode.py": _all,
    "attention/test_batch_prefill.py": _all,
}
