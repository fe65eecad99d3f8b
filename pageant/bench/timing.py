"""Time several calls against each other, in turns, so that they share whatever disturbs them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of one call.

    Attributes:
        median, fastest: of all rounds.
    """

    median: float
    fastest: float


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Run every call once a round, each round in another order; one round is not counted.

    What runs after a call whose threads still spin is slowed by them; so no two calls are always
    neighbours.

    Args:
        calls: what to time.
        rounds: how often, from 1 up.
        clock: seconds; calls must be finished when they return.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(names, len(names)):
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return {
        name: Times(statistics.median(each[1:]), min(each[1:])) for name, each in seconds.items()
    }
