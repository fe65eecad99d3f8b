"""Samples of one prompt: its pages are computed once a step, and the text is the same."""

from __future__ import annotations

import pytest

from pageant.engine.config import EngineConfig
from pageant.engine.display import figures
from pageant.engine.engine import Engine
from pageant.engine.model import LoadedModel
from pageant.engine.request import Sampling
from pageant.types import Options
from tests.engine.test_equality import TEXT as ONCE

SAMPLES = 12
TEXT = " ".join([ONCE] * 3)


def engine(smollm2: LoadedModel, *, cascade: bool, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(prefix_cache=prefix_cache, options=Options(cascade=cascade))
    return Engine(*smollm2, config)


@pytest.fixture(scope="module")
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    """One text, and as many ends as samples."""
    start = smollm2.tokenizer(TEXT).input_ids
    assert len(start) > 512
    ends = [smollm2.tokenizer(f" had {number} goats. They").input_ids for number in range(SAMPLES)]
    return [start + end for end in ends]


def test_greedy_text_is_identical(smollm2: LoadedModel, prompts: list[list[int]]) -> None:
    sampling = Sampling(max_new_tokens=24)
    engines = [engine(smollm2, cascade=cascade) for cascade in (True, False)]
    texts = [
        [completion.text for completion in each.generate(prompts, sampling)] for each in engines
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    shared = [each.report().peak_shared_pages for each in engines]
    full_pages = len(smollm2.tokenizer(TEXT).input_ids) // 16
    assert shared == [full_pages, 0]
    column = figures(engines[0].report()).columns[1]
    assert f"{full_pages} at peak" in list(column.cells)


def test_samples_of_one_prompt_do_not_depend_on_it(
    smollm2: LoadedModel, prompts: list[list[int]]
) -> None:
    sampling = Sampling(max_new_tokens=8, temperature=0.8, seed=3)
    engines = [engine(smollm2, cascade=cascade) for cascade in (True, False)]
    tokens = [
        [completion.tokens for completion in each.generate([prompts[0]] * SAMPLES, sampling)]
        for each in engines
    ]
    assert tokens[0] == tokens[1]
    assert [each.report().peak_shared_pages > 0 for each in engines] == [True, False]


def test_without_the_prefix_cache_there_is_nothing_to_share(
    smollm2: LoadedModel, prompts: list[list[int]]
) -> None:
    alone = engine(smollm2, cascade=True, prefix_cache=False)
    alone.generate(prompts, Sampling(max_new_tokens=2))
    assert alone.report().peak_shared_pages == 0
