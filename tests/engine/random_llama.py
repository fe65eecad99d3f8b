"""Llamas of random weights and any size, and a tokenizer that speaks numbers: nothing is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}


def llama(sizes: dict[str, Any], seed: int = 0) -> Any:
    """A float32 model on the CPU that never ends a text; the same for the same seed."""
    torch.manual_seed(seed)
    # Tied to its embeddings, such a model would say its last token again.
    config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


class Numbers:
    """A tokenizer: a text is the numbers of its tokens."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, tokens))
