"""What vLLM may ask for, and the reason where the answer is no."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from pageant.integrations.vllm.cache import FORMATS, format_of, packed
from pageant.select.choose import supports
from pageant.types import ArgumentError, CacheSpec, Features, Shape


class PageantBackend(AttentionBackend):
    """Pageant's answers. What does not depend on the device is a constant; the rest is asked."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # forward looks at the cache alone (asked from 0.33 on)

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM looks backends up; only known ones will do."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        """What runs a layer."""
        from pageant.integrations.vllm.impl import PageantImpl

        return PageantImpl

    @staticmethod
    def get_builder_cls() -> type:
        """What plans a step."""
        from pageant.integrations.vllm.builder import PageantBuilder

        return PageantBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any page size."""
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 from 16 to 512."""
        return head_size % 8 == 0 and 16 <= head_size <= 512

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for scales that are stored with the pages."""
        return packed(spec)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """7.5 and up; None is a CPU."""
        return capability is None or bool(capability.to_int() >= 75)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, and encoders without a decoder."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)

    @classmethod
    def supports_sink(cls) -> bool:
        """Sinks, beside every other feature."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows, which may differ from layer to layer."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Non-causal batches, or requests within a batch."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Results that do not depend on the batch."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Planning reads lengths where the kernels do."""
        return True

    @classmethod
    def supports_combination(  # budget: vLLM calls it with these
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why no kernel serves this together, or None if one does."""
        device = "cpu" if device_capability is None else f"sm{device_capability.to_int()}"
        try:
            shape = Shape(num_q_heads=1, num_kv_heads=1, head_dim=head_size, dtype=dtype)
            cache = CacheSpec(
                format=format_of(kv_cache_dtype or "auto"), page_size=block_size or 16
            )
            answer = supports(shape, cache, Features(sinks=has_sink), device=device)
        except ArgumentError as error:
            return str(error)
        return answer.reason
