"""Time several calls against each other, in turns, so that they share whatever disturbs them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of one call.

    Attributes:
        median, fastest: of all rounds.
        spread: between the first and the third quartile of all rounds.
    """

    median: float
    fastest: float
    spread: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        """What there is to say of several calls, at least one.

        >>> Times.of([4.0, 1.0, 2.0, 3.0, 9.0])
        Times(median=3.0, fastest=1.0, spread=2.0)
        """
        spread = 0.0
        if len(seconds) > 1:
            first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
            spread = third - first
        return cls(statistics.median(seconds), min(seconds), spread)


def wall(call: Call) -> float:
    """Seconds of a call on this machine's clock; it must be finished when it returns."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(
    calls: Mapping[str, Call], rounds: int, seconds: Callable[[Call], float] = wall
) -> dict[str, Times]:
    """Run every call once a round, each round in another order; one round is not counted.

    What runs after a call whose threads still spin is slowed by them; so no two calls are always
    neighbours.

    Args:
        calls: what to time.
        rounds: how often, from 1 up.
        seconds: makes a call, and says how long it took.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(names, len(names)):
            taken[name].append(seconds(calls[name]))
    return {name: Times.of(each[1:]) for name, each in taken.items()}
