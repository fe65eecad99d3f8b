"""Greedy float32 output equals transformers' own eager generation, token for token.

Where the two part and the top two logits differ by less than 1e-4, either token is right: that is
reported as a warning, and the request's later tokens are not compared.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pageant.engine import smollm2 as default_model
from pageant.engine.config import EngineConfig
from pageant.engine.engine import Engine
from pageant.engine.model import LoadedModel
from pageant.engine.request import Sampling
from pageant.types import CacheSpec

NEW_TOKENS = 64
TIE = 1e-4
TEXT = """The lighthouse keeper wrote in her book every evening. On the first page stood the names
of the ships that had passed, on the second the direction of the wind, and on the third whatever
she had thought about while the lamp was warming up. In 1911 a storm tore the door from its hinges
and carried the book out to sea. A fisherman found it two winters later, dry inside a tin box, and
brought it back. "I have read it all," he said, "and I should like to know what happened to the
ship called Patience." She laughed, lit the lamp, and told him. Here is what she told him: the
captain had a daughter who could hear fog coming, long before anyone saw it. When she said a word,
the crew would turn the wheel, and so they never struck a rock. One spring she fell in love with a
man from the hills, who"""
# Slices of one text, so that they share prefixes; the longest comes first and fills pages early.
LENGTHS = (180, 1, 2, 5, 15, 16, 17, 33, 47, 48, 49, 64, 100)
QUESTIONS = ("Why is the sky blue?", "What is 2 + 2?", "Name three rivers in Europe.")


@pytest.fixture(scope="module")
def eager() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        default_model.folder(), dtype=torch.float32, attn_implementation="eager"
    )


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    tokenizer = smollm2.tokenizer
    tokens = tokenizer(TEXT).input_ids
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [tokenizer(chat).input_ids for chat in chats] + [tokens[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(eager: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [
        eager.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def check(eager: Any, prompt: list[int], tokens: list[int], expected: list[int]) -> None:
    """Fail unless the tokens are equal, or part at a tie."""
    pairs = enumerate(zip(tokens, expected, strict=False))
    split = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    if split is None:
        assert len(tokens) == len(expected)
        return
    with torch.inference_mode():
        logits = eager(torch.tensor([prompt + expected[:split]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    message = f"token {split} after a prompt of {len(prompt)}: {tokens[split]}, not "
    message += f"{expected[split]}; the top two logits differ by {best - second:.1e}"
    assert best - second < TIE, message
    warnings.warn(message, stacklevel=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk_size", "page_size", "num_pages", "prefix_cache"),
    [
        (None, 16, None, False),
        (None, 1, None, True),
        (None, 48, 8, True),  # 384 tokens for requests of up to 244: preemption
        (64, 16, None, True),
        (64, 1, 400, True),  # preemption
        (16, 16, 24, False),  # preemption
        (16, 48, None, True),
        (16, 1, None, False),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    request: pytest.FixtureRequest,
    chunk_size: int | None,
    page_size: int,
    num_pages: int | None,
    prefix_cache: bool,
) -> None:
    prompts: list[list[int]] = request.getfixturevalue("prompts")
    expected: list[list[int]] = request.getfixturevalue("expected")
    loaded: LoadedModel = request.getfixturevalue("smollm2")
    config = EngineConfig(
        cache=CacheSpec(page_size=page_size),
        num_pages=num_pages,
        chunk_size=chunk_size,
        prefill_budget=64,
        prefix_cache=prefix_cache,
    )
    engine = Engine(loaded.model, loaded.tokenizer, config)
    completions = engine.generate(prompts, Sampling(max_new_tokens=NEW_TOKENS))

    for prompt, completion, tokens in zip(prompts, completions, expected, strict=True):
        check(request.getfixturevalue("eager"), prompt, completion.tokens, tokens)
    report = engine.report()
    assert (report.preemptions > 0) == (num_pages is not None)
    assert (report.prefix_hit_tokens > 0) == prefix_cache
    assert engine.scheduler.pool.num_owned == 0


def test_a_wrong_token_is_noticed(eager: Any) -> None:
    with pytest.raises(AssertionError, match="top two logits differ"):
        check(eager, [504, 3575, 282, 4649, 314], [1, 2], [7042, 30])
