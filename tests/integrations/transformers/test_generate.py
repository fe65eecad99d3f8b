"""``generate``, and single forwards, under the name "pageant": tokens equal to stock attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from pageant.integrations.transformers import register, use
from pageant.types import ArgumentError
from tests.integrations.transformers.models import CONFIGS, make, stock

GREEDY = {"max_new_tokens": 24, "do_sample": False}


def generated(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: Any) -> Any:
    config = GenerationConfig(**GREEDY, **more, pad_token_id=0, eos_token_id=None)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=config).tolist()


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_are_those_of_stock_attention(family: str, padding: str | None) -> None:
    torch.manual_seed(1)
    ids = torch.randint(1, 96, (3, 19))
    mask = torch.ones_like(ids)
    if padding:
        for row, count in enumerate((0, 5, 11)):
            mask[row, :count] = 0
    expected = generated(make(CONFIGS[family], stock(family)), ids, mask)
    assert generated(make(CONFIGS[family], "pageant"), ids, mask) == expected


@pytest.mark.parametrize("more", [{"cache_implementation": "static"}, {"use_cache": False}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_caches(family: str, more: dict[str, Any]) -> None:
    ids = torch.randint(1, 96, (2, 9))
    expected = generated(make(CONFIGS[family], stock(family)), ids, use_cache=True)
    model = make(CONFIGS[family], "pageant")
    model.generation_config.disable_compile = True
    assert generated(model, ids, **more, disable_compile=True) == expected


@torch.inference_mode()
def test_a_prompt_in_chunks() -> None:
    ids = torch.randint(1, 96, (2, 30))
    for family in CONFIGS:
        expected = make(CONFIGS[family], stock(family))(input_ids=ids).logits
        model = use(make(CONFIGS[family]))
        cache = DynamicCache(config=model.config)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(11, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-3, rtol=1e-4)


@torch.inference_mode()
def test_requests_packed_into_one_row() -> None:
    ids = torch.randint(1, 96, (1, 20))
    positions = torch.cat([torch.arange(13), torch.arange(7)])[None]
    stock_model, ours = make(CONFIGS["llama"], "sdpa"), make(CONFIGS["llama"], "pageant")
    expected = torch.cat([stock_model(input_ids=part).logits for part in ids.split([13, 7], 1)], 1)
    logits = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_padding_on_the_right() -> None:
    ids, mask = torch.randint(1, 96, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    expected = make(CONFIGS["llama"], "sdpa")(input_ids=ids, attention_mask=mask).logits
    logits = make(CONFIGS["llama"], "pageant")(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=1e-3, rtol=1e-4)


def test_registering_twice_is_harmless() -> None:
    register()
    register()
    assert make(CONFIGS["llama"], "pageant").config._attn_implementation == "pageant"


def test_what_is_not_served_is_refused() -> None:
    model = make(CONFIGS["llama"], "pageant")
    ids = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="attention_mask"):
        model(input_ids=ids, attention_mask=torch.zeros(1, 1, 3, 3))
    with pytest.raises(ArgumentError, match="requires grad"):
        model(input_ids=ids)
