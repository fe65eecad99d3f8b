"""Pageant's CPU kernels and their peers on a case: times, and errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from pageant.bench.cases import Case
from pageant.bench.peers import PEERS, CannotRunError
from pageant.bench.problem import Problem, Run
from pageant.bench.results import Result
from pageant.bench.timing import interleaved
from pageant.cache.formats import FORMATS, OF_DTYPE


def formats_for(case: Case) -> list[str]:
    """The model's own format, and all that are smaller than 16 bits."""
    return [OF_DTYPE[case.dtype], *(name for name, row in FORMATS.items() if row.bits < 16)]


def contenders(case: Case) -> dict[str, Callable[[Problem], Run]]:
    """Everything that may run a case: Pageant with each format, and otherwise; then the peers."""

    def pageant(format: str, **options: Any) -> Callable[[Problem], Run]:
        return lambda problem: problem.attention(format, **options)

    own = OF_DTYPE[case.dtype]
    ours = {f"pageant {name}": pageant(name) for name in formats_for(case)}
    ours[f"pageant {own} invariant"] = pageant(own, invariant=True)
    if case.shared:
        ours[f"pageant {own} without sharing"] = pageant(own, cascade=False)
    return {**ours, **PEERS}


def measure(case: Case, rounds: int, only: Collection[str] = ()) -> list[Result]:
    """Time a case's contenders against each other.

    Args:
        case: what to compute.
        rounds: counted calls of each.
        only: names of contenders; none means all.
    """
    problem = Problem.of(case)
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    wanted = {name: make for name, make in contenders(case).items() if not only or name in only}
    with torch.inference_mode():
        for name, make in wanted.items():
            try:
                runs[name] = make(problem)
            except CannotRunError as error:
                refused[name] = str(error)
        times = interleaved(runs, rounds)
        errors = _errors(problem, runs)
    return [
        Result(case=case.name, contender=name, why=refused[name])
        if name in refused
        else Result(
            case=case.name,
            contender=name,
            median_ms=1e3 * times[name].median,
            fastest_ms=1e3 * times[name].fastest,
            spread_ms=1e3 * times[name].spread,
            error=errors[name],
        )
        for name in wanted
    ]


def _errors(problem: Problem, runs: dict[str, Run]) -> dict[str, float]:
    """Each result against float64 attention over what the contender read.

    The reference rounds its output to the model dtype, so it is asked in float32.
    """
    own, wide = OF_DTYPE[problem.case.dtype], problem.widened()
    truths: dict[str, torch.Tensor] = {}
    errors = {}
    for name, run in runs.items():
        format = own if name in PEERS else name.split()[1]
        if format not in truths:
            truths[format] = wide.attention(format, kernels="reference")().double()
        errors[name] = float((run() - truths[format]).norm() / truths[format].norm())
    return errors
