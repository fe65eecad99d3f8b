"""The engine's own behaviour: sampling, streaming, stopping, limits."""

from __future__ import annotations

import pytest

from pageant.engine.config import EngineConfig
from pageant.engine.engine import Engine
from pageant.engine.errors import EngineError
from pageant.engine.model import LoadedModel
from pageant.engine.request import Sampling
from pageant.types import CacheSpec, Options

PROMPT = "The capital of France is"


@pytest.fixture
def engine(smollm2: LoadedModel) -> Engine:
    return Engine(*smollm2, EngineConfig(num_pages=32))


def test_sampled_tokens_do_not_depend_on_the_batch(smollm2: LoadedModel, engine: Engine) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=7)
    alone = engine.generate([PROMPT], sampling)[0].tokens
    others = ["Once upon a time", PROMPT, "2 + 2 ="]
    config = EngineConfig(chunk_size=2, cache=CacheSpec(page_size=3))
    batch = Engine(*smollm2, config).generate(others, sampling)
    assert batch[1].tokens == alone
    different = engine.generate([PROMPT], Sampling(max_new_tokens=12, temperature=0.9, seed=8))
    assert different[0].tokens != alone


def test_streamed_pieces_are_the_text(engine: Engine) -> None:
    pieces: list[list[str]] = [[], []]
    completions = engine.generate(
        [PROMPT, "Once upon a time"],
        Sampling(max_new_tokens=8),
        [pieces[0].append, pieces[1].append],
    )
    for completion, parts in zip(completions, pieces, strict=True):
        assert len(parts) > 1
        assert "".join(parts) == completion.text


def test_any_of_several_stop_tokens_ends_a_request(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Engine(*smollm2).generate([PROMPT], Sampling(max_new_tokens=6))[0]
    assert (len(free.tokens), free.finish_reason) == (6, "length")
    stop = free.tokens[3]
    monkeypatch.setattr(smollm2.model.generation_config, "eos_token_id", [2, stop])
    stopped = Engine(*smollm2).generate([PROMPT], Sampling(max_new_tokens=6))[0]
    end = free.tokens.index(stop) + 1
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[:end], "stop")


def test_requests_may_arrive_while_others_run(engine: Engine) -> None:
    sampling = Sampling(max_new_tokens=6)
    expected = [completion.tokens for completion in engine.generate([PROMPT, "Rain"], sampling)]
    first = engine.add_request(PROMPT, sampling)
    engine.step()
    second = engine.add_request("Rain", sampling)
    finished = []
    while engine.has_work:
        finished += engine.step()
    assert finished == [first, second]
    assert [first.generated, second.generated] == expected


@pytest.mark.parametrize(("length", "fits"), [(31, True), (32, False)])
def test_a_prompt_must_leave_room_for_a_token(
    smollm2: LoadedModel, length: int, fits: bool
) -> None:
    engine = Engine(*smollm2, EngineConfig(cache=CacheSpec(page_size=8), num_pages=4))
    if fits:
        completion = engine.generate([[5] * length], Sampling(max_new_tokens=9))[0]
        assert (len(completion.tokens), completion.finish_reason) == (1, "cache_full")
    else:
        with pytest.raises(EngineError, match=r"up to 31, .* the pool's 4 pages of 8"):
            engine.generate(["fits", [5] * length])
        assert not engine.has_work


def test_the_models_positions_are_a_limit(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2.model.config, "max_position_embeddings", 8)
    engine = Engine(*smollm2)
    completion = engine.generate([[5] * 6], Sampling(max_new_tokens=9))[0]
    assert (len(completion.tokens), completion.finish_reason) == (2, "length")
    with pytest.raises(EngineError, match="the model's 8 positions"):
        engine.add_request([5] * 8)


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="empty"):
        engine.add_request("")


@pytest.mark.parametrize(("new", "reason"), [(3, "length"), (4, "cache_full"), (99, "cache_full")])
def test_a_request_that_fills_the_pool_says_so(smollm2: LoadedModel, new: int, reason: str) -> None:
    """Four pages of two hold a prompt of five, and three tokens more."""
    engine = Engine(*smollm2, EngineConfig(cache=CacheSpec(page_size=2), num_pages=4))
    completion = engine.generate([[5] * 5], Sampling(max_new_tokens=new))[0]
    assert (len(completion.tokens), completion.finish_reason) == (3, reason)


def test_a_pool_that_no_memory_holds(smollm2: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"num_pages is \d+; allowed: what fits in memory"):
        Engine(*smollm2, EngineConfig(num_pages=2**31 - 1))


@pytest.mark.parametrize(
    "setting",
    [{name: value} for name in ("num_pages", "chunk_size") for value in (0, 2**31, "8", True)]
    + [{name: None} for name in ("max_requests", "prefill_budget", "cache", "options")]
    + [{"max_requests": 2**21}, {"prefill_budget": 2**40}, {"cache": 0}, {"options": {}}]
    + [{"speculative_tokens": value} for value in (-1, 2**12 + 1, None, 1.5, True)],
)
def test_wrong_sizes_are_named(setting: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=rf"^{next(iter(setting))} is .*; allowed: "):
        EngineConfig(**setting)  # type: ignore[arg-type]


def test_options_may_not_say_another_number_of_drafts() -> None:
    options = Options(speculative_tokens=3)
    assert EngineConfig(speculative_tokens=3, options=options).options is options
    for number in (0, 2):
        with pytest.raises(EngineError, match=r"^options.speculative_tokens is 3; allowed: 0, or"):
            EngineConfig(speculative_tokens=number, options=options)
