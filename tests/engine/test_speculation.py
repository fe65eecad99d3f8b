"""Drafts change how many tokens a step yields, and no token.

Most tests use a small model of random weights: its greedy texts repeat themselves, with changes, so
that some drafts are right and some are wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pageant.engine.config import EngineConfig
from pageant.engine.engine import Completion, Engine
from pageant.engine.metrics import Report
from pageant.engine.model import LoadedModel
from pageant.engine.request import Sampling
from pageant.types import CacheSpec

VOCABULARY = 32
PROMPTS = [[5, 6, 7, 8] * 6, [3], list(range(30)), [1, 2, 3] * 3 + [9, 1, 2], [4] * 17]
GREEDY = Sampling(max_new_tokens=40)


class Letters:
    """A tokenizer: one capital letter or sign for each token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # far from uniform logits: rounding decides nothing
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> list[Completion]:
    """What comes without drafts."""
    return Engine(model, Letters()).generate(PROMPTS, GREEDY)


def check_figures(report: Report) -> None:
    """Fail unless some drafts were right and some wrong."""
    assert 0 < report.accepted_tokens < report.drafted_tokens
    assert report.acceptance_rate == report.accepted_tokens / report.drafted_tokens


@pytest.mark.parametrize(
    ("speculative_tokens", "chunk_size", "page_size", "num_pages", "prefix_cache"),
    [
        (1, 256, 16, None, True),
        (4, 3, 16, None, True),  # chunks as short as a decode with drafts
        (4, None, 1, None, False),
        (3, 5, 1, 90, True),  # preemption: the five need 288
        (6, 16, 4, 20, True),  # preemption
        (12, 16, 7, 12, False),  # preemption; drafts over several pages
    ],
)
def test_greedy_texts_are_those_without_drafts(
    model: LlamaForCausalLM,
    plain: list[Completion],
    speculative_tokens: int,
    chunk_size: int | None,
    page_size: int,
    num_pages: int | None,
    prefix_cache: bool,
) -> None:
    config = EngineConfig(
        cache=CacheSpec(page_size=page_size),
        num_pages=num_pages,
        chunk_size=chunk_size,
        prefill_budget=24,
        prefix_cache=prefix_cache,
        speculative_tokens=speculative_tokens,
    )
    engine = Engine(model, Letters(), config)
    assert engine.generate(PROMPTS, GREEDY) == plain
    report = engine.report()
    check_figures(report)
    assert (report.preemptions > 0) == (num_pages is not None)
    assert report.generated_tokens == sum(len(each.tokens) for each in plain)
    assert engine.scheduler.pool.num_owned == 0


def test_requests_of_a_step_bring_different_numbers_of_drafts(model: LlamaForCausalLM) -> None:
    engine = Engine(model, Letters(), EngineConfig(speculative_tokens=4))
    seen = []
    schedule = engine.scheduler.schedule

    def watched() -> list[Any]:
        works = schedule()
        seen.append([len(work.drafts) for work in works])
        return works

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.generate(PROMPTS, GREEDY)
    assert any(len(set(numbers)) > 2 for numbers in seen)
    assert len(seen) < GREEDY.max_new_tokens  # fewer steps than tokens


def test_a_prefix_with_accepted_drafts_is_found_again(
    model: LlamaForCausalLM, plain: list[Completion]
) -> None:
    """A second turn of a conversation starts with all of the first."""
    config = EngineConfig(cache=CacheSpec(page_size=4), speculative_tokens=4)
    engine = Engine(model, Letters(), config)
    first = engine.generate(PROMPTS, GREEDY)
    turns = [prompt + completion.tokens for prompt, completion in zip(PROMPTS, first, strict=True)]
    second = engine.generate(turns, GREEDY)
    check_figures(engine.report())
    # All but the last token's key is in the cache; pages of four round that down.
    assert engine.report().prefix_hit_tokens == sum((len(turn) - 1) // 4 * 4 for turn in turns)
    fresh = EngineConfig(prefix_cache=False)
    assert second == Engine(model, Letters(), fresh).generate(turns, GREEDY)


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_max_new_tokens_is_kept(
    model: LlamaForCausalLM, plain: list[Completion], max_new_tokens: int
) -> None:
    engine = Engine(model, Letters(), EngineConfig(speculative_tokens=5))
    turn = PROMPTS[0] + plain[0].tokens[:20]
    (completion,) = engine.generate([turn], Sampling(max_new_tokens=max_new_tokens))
    assert completion.tokens == plain[0].tokens[20 : 20 + max_new_tokens]
    assert completion.finish_reason == "length"


def test_drafts_stay_within_the_pool_and_the_models_positions(
    model: LlamaForCausalLM, plain: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = PROMPTS[0] + plain[0].tokens[:20]
    room = 64 - len(turn)
    for num_pages, positions, reason in ((16, 2048, "cache_full"), (None, 64, "length")):
        monkeypatch.setattr(model.config, "max_position_embeddings", positions)
        config = EngineConfig(
            cache=CacheSpec(page_size=4), num_pages=num_pages, speculative_tokens=5
        )
        engine = Engine(model, Letters(), config)
        (completion,) = engine.generate([turn], GREEDY)
        assert completion.tokens == plain[0].tokens[20:][:room]
        assert (len(completion.tokens), completion.finish_reason) == (room, reason)
        assert engine.report().accepted_tokens > 0


def test_accepted_tokens_are_streamed_in_order(
    model: LlamaForCausalLM, plain: list[Completion]
) -> None:
    pieces: list[list[str]] = [[] for _ in PROMPTS]
    engine = Engine(model, Letters(), EngineConfig(speculative_tokens=4))
    engine.generate(PROMPTS, GREEDY, [each.append for each in pieces])
    assert engine.report().accepted_tokens > 0
    for parts, completion in zip(pieces, plain, strict=True):
        assert parts == list(completion.text)


def test_a_seed_gives_the_same_tokens_with_drafts_and_in_any_batch(
    model: LlamaForCausalLM,
) -> None:
    sampling = Sampling(max_new_tokens=30, temperature=0.3, top_p=0.9, seed=5)
    expected = [Engine(model, Letters()).generate([p], sampling)[0].tokens for p in PROMPTS]
    config = EngineConfig(cache=CacheSpec(page_size=4), num_pages=24, speculative_tokens=4)
    engine = Engine(model, Letters(), config)
    assert [each.tokens for each in engine.generate(PROMPTS, sampling)] == expected
    check_figures(engine.report())
    assert engine.report().preemptions > 0


COUNTING = "one two three four five six seven. one two three four five six seven. one two"


def test_a_stop_token_among_accepted_drafts_ends_the_text_there(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = smollm2.tokenizer
    stop = tokenizer(" five").input_ids[0]
    monkeypatch.setattr(smollm2.model.generation_config, "eos_token_id", [2, stop])
    engine = Engine(*smollm2, EngineConfig(speculative_tokens=6))
    pieces: list[str] = []
    (completion,) = engine.generate([COUNTING], Sampling(max_new_tokens=12), [pieces.append])
    assert (completion.text, completion.finish_reason) == (" three four five", "stop")
    assert "".join(pieces) == completion.text
    report = engine.report()
    # " three" comes from the prompt; of " four five six seven. one", two are in the text.
    assert (report.drafted_tokens, report.accepted_tokens) == (6, 2)
    assert report.generated_tokens == 3
    assert engine.scheduler.pool.num_owned == 0


def test_texts_of_a_real_model(smollm2: LoadedModel) -> None:
    prompts = [
        "The cat sat on the mat. The dog sat on the log. The cat sat on the",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    ]
    sampling = Sampling(max_new_tokens=16)
    expected = Engine(*smollm2).generate(prompts, sampling)
    engine = Engine(*smollm2, EngineConfig(chunk_size=8, speculative_tokens=4))
    assert engine.generate(prompts, sampling) == expected
    check_figures(engine.report())
