"""How long calls take: on a GPU by replays of CUDA graphs, elsewhere by this machine's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pageant.bench.timing import Call, wall


@dataclass(frozen=True)
class Clock:
    """One way of timing.

    Attributes:
        joined: makes one call of several.
        seconds: makes such a call, and says how long it took.
        finish: returns when all that was launched is done.
    """

    joined: Callable[[Sequence[Call]], Call]
    seconds: Callable[[Call], float]
    finish: Call


def clock_of(device: torch.device) -> Clock:
    """The clock that fits a device."""
    if device.type == "cuda":
        return Clock(captured, replay_seconds, torch.cuda.synchronize)
    return Clock(in_turn, wall, lambda: None)


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that makes all of them, one after another."""

    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True)
class Replay:
    """Calls captured in a CUDA graph, which keeps none of the memory alive that they read."""

    graph: torch.cuda.CUDAGraph
    calls: tuple[Call, ...]

    def __call__(self) -> None:
        """Make them all again."""
        self.graph.replay()


def captured(calls: Sequence[Call]) -> Call:
    """A call that replays all of them from one CUDA graph. Each must have run once before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_turn(calls)()
    return Replay(graph, tuple(calls))


def replay_seconds(replay: Call) -> float:
    """Seconds on the GPU. A replay before it, not counted, hides how long launching takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
