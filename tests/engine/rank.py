"""One rank of an engine: ``torchrun … -m tests.engine.rank``; prints what each rank generated."""

from __future__ import annotations

import json
import os

import torch

from pageant.engine.config import EngineConfig
from pageant.engine.engine import Engine
from pageant.engine.model import load
from pageant.engine.ranks import joined
from pageant.engine.request import Sampling
from pageant.plan import prefix
from pageant.types import CacheSpec, Options

TEXT = "one two three four five six seven eight nine ten, " * 6
PROMPTS = [TEXT + end for end in ("one two three", "one two", "and then", "Paris is", "one")]


def everything(options: Options) -> EngineConfig:
    """Small pages and chunks, drafts, shared prefixes, and too few pages to keep all requests."""
    cache = CacheSpec(page_size=4)
    pages = 420 // (4 * options.world)
    return EngineConfig(
        cache=cache, num_pages=pages, chunk_size=37, speculative_tokens=3, options=options
    )


def main() -> None:
    prefix.RULES = (prefix.Rule(members=2, tokens=1, because="a test"),)
    with joined(int(os.environ["WORLD_SIZE"]), torch.device("cpu")) as ranks:
        loaded = load("smollm2", torch.float32)
        engine = Engine(*loaded, everything(Options(context_parallel=ranks)))
        greedy = engine.generate(PROMPTS, Sampling(max_new_tokens=16))
        # Without a seed every rank draws other numbers; the first one's choice holds.
        free = engine.generate(PROMPTS[:2], Sampling(max_new_tokens=6, temperature=1.0))
        report = engine.report()
        options = Options(context_parallel=ranks, invariant=True)
        invariant = Engine(*loaded, everything(options))
        again = invariant.generate(PROMPTS[:2], Sampling(max_new_tokens=6))
        answer = {
            "greedy": [completion.tokens for completion in greedy],
            "free": [completion.tokens for completion in free],
            "invariant": [completion.tokens for completion in again],
            "accepted": report.accepted_tokens,
            "shared_pages": report.peak_shared_pages,
            "reused": report.prefix_hit_tokens,
        }
        print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
