"""Continuous batching of transformers over its paged cache: tokens equal to stock attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from pageant.integrations import ragged
from pageant.integrations.transformers import use
from tests.integrations.transformers.models import CONFIGS, make, stock

NEW_TOKENS = 20


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens; every third begins like the first."""
    torch.manual_seed(2)
    texts = [torch.randint(1, 96, (1 + 7 * i % 40,)).tolist() for i in range(count)]
    return [texts[0] + text if i % 3 == 2 else text for i, text in enumerate(texts)]


def one_by_one(model: Any, texts: list[list[int]]) -> list[list[int]]:
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens = []
    for text in texts:
        ids = torch.tensor([text])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        tokens.append(out[0, len(text) :].tolist())
    return tokens


def together(model: Any, texts: list[list[int]], **batching: Any) -> list[list[int]]:
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    sizes = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 48, **batching}
    results = model.generate_batch(
        texts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in results.values()}
    return [by_prompt[tuple(text)] for text in texts]


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_stock_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen requests that share 64 blocks, prefilled in chunks of at most 48 tokens."""
    texts = prompts(16)
    expected = one_by_one(make(CONFIGS[family], stock(family)), texts)
    sizes: list[tuple[int, int]] = []
    planned = ragged.Attention.plan

    def noted(attention: Any, batch: Any) -> Any:
        sizes.append((batch.num_requests, batch.num_tokens))
        return planned(attention, batch)

    monkeypatch.setattr(ragged.Attention, "plan", noted)
    assert together(use(make(CONFIGS[family])), texts) == expected
    assert max(requests for requests, _ in sizes) > 4, "requests were batched"


@pytest.mark.parametrize("page_size", [4, 5, 32])
def test_page_sizes(page_size: int) -> None:
    texts = prompts(6)
    expected = one_by_one(make(CONFIGS["gemma3"], "sdpa"), texts)
    blocks = {"page_size": page_size, "num_blocks": -(-512 // page_size)}
    assert together(use(make(CONFIGS["gemma3"])), texts, **blocks) == expected


def test_stock_continuous_batching_says_the_same() -> None:
    texts = prompts(8)
    expected = together(make(CONFIGS["llama"], "sdpa"), texts)
    assert together(use(make(CONFIGS["llama"])), texts) == expected
