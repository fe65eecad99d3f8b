"""Tiny models of random weights, as folders that vLLM loads; tests run this as a program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCAB = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # large enough that attention matters, small enough to be stable
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24


def config_of(family: str) -> Any:
    """The family's config."""
    from transformers import BertConfig, Gemma2Config, GptOssConfig, LlamaConfig, Qwen3Config

    match family:
        case "llama":
            return LlamaConfig(**SIZES)
        case "qwen3":
            return Qwen3Config(**SIZES)
        case "gemma2":
            sizes = SIZES | {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
            return Gemma2Config(
                **sizes,
                sliding_window=WINDOW,
                query_pre_attn_scalar=16,
                attn_logit_softcapping=2.0,
            )
        case "bert":
            names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads", "max_position_embeddings", "pad_token_id")  # fmt: skip
            return BertConfig(**{name: SIZES[name] for name in names})
        case _:
            moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return GptOssConfig(**SIZES, sliding_window=WINDOW, **moe)


def save(family: str, folder: Path) -> None:
    """Write the model, in float32, with a tokenizer of numbered words; smollm2 is the real one."""
    if family == "smollm2":
        from pageant.engine import smollm2

        folder.symlink_to(smollm2.folder(), target_is_directory=True)
        return
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    kind = AutoModel if family == "bert" else AutoModelForCausalLM
    model = kind.from_config(config_of(family)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        bos_token="t1",
        eos_token="t2",
        pad_token="t0",
    )
    fast.save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
