"""On a GPU, every kernel equals the float64 reference on random cases that combine features.

What takes time is compiling, so each configuration is asked for with several batches. The seeds in
the tests' names repeat what was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.inputs import BOUNDS, Case, assert_close, build, cases

SEEDS = range(12)
CONFIGURATIONS = 9  # drawn with each seed
BATCHES = 8  # of each


def batches_of(case: Case, max_len: int) -> Iterator[Case]:
    """The case, and others of its configuration with lengths, pages and numbers of their own."""
    yield case
    rng = random.Random(case.seed)
    for _ in range(BATCHES - 1):
        lengths = tuple(
            (rng.choice((1, 1, m, rng.randint(0, 12))), rng.choice((n, rng.randint(0, max_len))))
            for m, n in case.lengths
        )
        window = None if case.window is None else rng.randint(1, max_len)
        yield replace(case, seed=rng.randrange(1 << 20), lengths=lengths, window=window)


@pytest.mark.gpu
@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("max_len", [96, 1300])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gpu(
    dtype: torch.dtype,
    max_len: int,
    number: int,
    record_property: Callable[[str, object], None],
) -> None:
    count = 0

    @seed(number)
    @settings(
        max_examples=CONFIGURATIONS,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(dtype, max_len=max_len))
    def equal(case: Case) -> None:
        nonlocal count
        for one in batches_of(case, max_len):
            problem = build(one)
            out, lse = problem.on("cuda").run()
            assert_close(out, problem.expected_out, BOUNDS[one.dtype])
            assert_close(lse, problem.expected_lse, BOUNDS[one.dtype])
            count += 1

    equal()
    record_property("configurations", count)
