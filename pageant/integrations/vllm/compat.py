"""All that differs from version to version of vLLM (0.31 to 0.33), in one place."""

from __future__ import annotations

from typing import Any


def fuses_output(config: Any) -> bool:
    """Whether a compiler pass may give attention a quantised output."""
    passes = getattr(config.compilation_config, "pass_config", None)
    return bool(getattr(passes, "fuse_attn_quant", False))


def largest_graph(config: Any) -> int:
    """Tokens of the largest CUDA graph, 0 if there is none; batches are padded up to it."""
    return int(getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0)


def is_batch_invariant() -> bool:
    """Whether vLLM runs in batch-invariant mode."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def layers_of(config: Any, names: list[str]) -> dict[str, Any]:
    """The attention layers of these names."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    found: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase, names)
    return found
