"""Engines on several ranks generate what one alone does, whatever else is switched on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pageant.engine.config import EngineConfig
from pageant.engine.engine import Engine
from pageant.engine.errors import EngineError
from pageant.engine.model import LoadedModel
from pageant.engine.request import Sampling
from pageant.ranks import ContextParallel
from pageant.types import CacheSpec, Options
from tests.engine.rank import PROMPTS

ROOT = Path(__file__).parents[2]


def on_ranks(world: int) -> list[dict]:
    """What every rank says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "tests.engine.rank"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_text_is_that_of_one_rank(smollm2: LoadedModel, world: int) -> None:
    plain = EngineConfig(prefix_cache=False, options=Options(cascade=False))
    want = [
        c.tokens for c in Engine(*smollm2, plain).generate(PROMPTS, Sampling(max_new_tokens=16))
    ]
    answers = on_ranks(world)
    assert len(answers) == world
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["greedy"] == want
    assert answers[0]["invariant"] == [tokens[:6] for tokens in want[:2]]
    for figure in ("accepted", "shared_pages", "reused"):
        assert answers[0][figure] > 0, figure


def test_mistakes() -> None:
    with pytest.raises(EngineError, match=r"context_parallel.group is None; allowed: a process gr"):
        EngineConfig(options=Options(context_parallel=ContextParallel(rank=0, world=2)))
    ranks = ContextParallel(rank=0, world=2, interleave=3, group="any")
    with pytest.raises(EngineError, match="interleave is 3; allowed: a divisor of page_size, 16"):
        EngineConfig(cache=CacheSpec(), options=Options(context_parallel=ranks))
