"""Whole texts through the paged cache: the logits and the keys and values transformers computes."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pageant.engine.prefill import Prefill, observe
from pageant.integrations.transformers import layers_of
from pageant.types import ArgumentError, CacheSpec


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


TEXTS = [list(range(3, 40)), [5], list(range(60, 40, -1))]


def test_logits_of_every_token_and_a_text_leaves_nothing_behind(model: LlamaForCausalLM) -> None:
    expected = []
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = [model(torch.tensor([text])).logits[0] for text in TEXTS]
    prefill = Prefill(model, *layers_of(model), max_tokens=37, cache=CacheSpec(page_size=5))
    for text, logits in zip(TEXTS, expected, strict=True):
        torch.testing.assert_close(prefill.run(text), logits)


def test_observes_what_each_layer_stores(model: LlamaForCausalLM) -> None:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        caches = [model(torch.tensor([text]), use_cache=True).past_key_values for text in TEXTS]
    seen = observe(model, TEXTS)
    assert [len(pairs) for pairs in seen] == [len(TEXTS)] * 2
    for layer, pairs in enumerate(seen):
        for (k, v), cache in zip(pairs, caches, strict=True):
            torch.testing.assert_close(k, cache.layers[layer].keys[0].transpose(0, 1))
            torch.testing.assert_close(v, cache.layers[layer].values[0].transpose(0, 1))


def test_a_text_longer_than_declared_is_refused(model: LlamaForCausalLM) -> None:
    prefill = Prefill(model, *layers_of(model), max_tokens=4)
    with pytest.raises(ArgumentError, match="num_tokens is 5"):
        prefill.run([1, 2, 3, 4, 5])
