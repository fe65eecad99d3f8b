"""Models of several families: tiny, with random weights, the same each time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that attention matters
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
WINDOW = 7
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma2": Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=9, attn_logit_softcapping=2.0
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        sliding_window=WINDOW,
        query_pre_attn_scalar=9,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_oss": GptOssConfig(**SIZES, sliding_window=WINDOW, **MOE),
}
WINDOWS = {
    "llama": [None, None],
    "qwen3": [None, WINDOW],
    "gemma2": [WINDOW, None],
    "gemma3": [WINDOW, None],
    "gpt_oss": [WINDOW, None],
}


def make(config: PreTrainedConfig, attention: str = "eager") -> Any:
    """The model in float32, with sinks that matter if it has any."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def stock(family: str) -> str:
    """Which of transformers' own implementations serves a family: sdpa has no caps and no sinks."""
    return "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
