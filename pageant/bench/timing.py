"""Time several calls against each other, in turns, so that they share whatever disturbs them."""

from __future__ import annotations

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
    """Run every call once a round, each round beginning with another one; one round is not counted.

    Args:
        calls: what to time.
        rounds: how often, from 1 up.
        clock: seconds; calls must be finished when they return.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            seconds[name].append(clock() - start)
    return {
        name: Times(statistics.median(each[1:]), min(each[1:])) for name, each in seconds.items()
    }
