"""Pageant and its peers on a case: device times of captured calls, with and without planning."""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from pageant.bench.cases import Case
from pageant.bench.gpu.clock import Clock, clock_of
from pageant.bench.gpu.peers import PEERS, Make
from pageant.bench.gpu.setting import Contender, Setting
from pageant.bench.peers import CannotRunError
from pageant.bench.results import Result
from pageant.bench.timing import Call, interleaved, wall
from pageant.types import ArgumentError

# What one replay should hold: shorter ones would be timed by how long launching takes.
REPLAY_BYTES, REPLAY_FLOPS, MOST_CALLS = 2e9, 250e9, 64
HOST_CALLS = 20
WRONG = 0.1  # a larger error is not rounding
# What libraries raise for what they do not take, or cannot compile here.
REFUSALS = (
    CannotRunError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AssertionError,
    OSError,
    ImportError,
    subprocess.SubprocessError,
)
OUR_REFUSALS = (CannotRunError, ArgumentError)  # anything else is a bug, which should be seen


@dataclass(frozen=True)
class Ready:
    """A contender that ran, and what is timed of it.

    Attributes:
        contender: who.
        replay: its calls over all copies.
        planned: the same with the plan before each; None where planning is the host's, or nothing.
        error: of its results.
    """

    contender: Contender
    replay: Call
    planned: Call | None
    error: float


def contenders(bench: str, case: Case) -> dict[str, Make]:
    """Everything that may run a case of `bench`, "decode" or "prefill"."""
    return {f"pageant {case.own_format}": Setting.pageant, **PEERS[bench]}


def num_calls(case: Case, copies: int) -> int:
    """How many calls a replay holds: some rounds over all copies."""
    share = max(case.kv_bytes / REPLAY_BYTES, case.flops / REPLAY_FLOPS)
    rounds = min(1 / share, MOST_CALLS) / copies
    return copies * max(1, round(rounds))


def measure(
    bench: str, case: Case, rounds: int, only: Collection[str], device: torch.device
) -> list[Result]:
    """Time a case's contenders against each other; those that cannot run are listed with why.

    Args:
        bench: "decode" or "prefill".
        case: what to compute.
        rounds: counted replays of each.
        only: names of contenders; none means all.
        device: where.
    """
    clock, refused, ready = clock_of(device), dict[str, str](), dict[str, Ready]()
    wanted = {
        name: make for name, make in contenders(bench, case).items() if not only or name in only
    }
    with torch.inference_mode():
        setting = Setting.of(case, device)
        calls = num_calls(case, setting.copies)
        for name, make in wanted.items():
            refusals = OUR_REFUSALS if name.startswith("pageant") else REFUSALS
            try:
                ready[name] = _prepare(make, setting, clock, calls)
            except refusals as error:
                refused[name] = _first_line(error)
        replays = {name: each.replay for name, each in ready.items()}
        replays |= {
            f"{name}, planned": each.planned
            for name, each in ready.items()
            if each.planned is not None
        }
        times = interleaved(replays, rounds, clock.seconds)
        hosts = {name: _host_ms(each, clock) for name, each in ready.items()}
    per_call = 1e3 / calls
    results = []
    for name in wanted:
        if name in refused:
            results.append(Result(case=case.name, contender=name, why=refused[name]))
            continue
        alone, planned = times[name], times.get(f"{name}, planned", times[name])
        results.append(
            Result(
                case=case.name,
                contender=name,
                median_ms=per_call * alone.median,
                fastest_ms=per_call * alone.fastest,
                spread_ms=per_call * alone.spread,
                planned_ms=per_call * planned.median + hosts[name],
                error=ready[name].error,
            )
        )
    return results


def _prepare(make: Make, setting: Setting, clock: Clock, calls: int) -> Ready:
    """Run a contender on every copy, see that it is right, and capture it."""
    contender = make(setting)
    run, plan = contender.run, contender.plan
    if plan is not None:
        plan()
    errors = [setting.error(run(copy)) for copy in range(setting.copies)]
    error = max(errors, key=lambda each: (math.isnan(each), each))
    if not error <= WRONG:
        raise CannotRunError(f"wrong results: a relative error of {error:.2g}")
    runs: list[Call] = [partial(run, call % setting.copies) for call in range(calls)]
    planned = None
    if plan is not None and not contender.plans_on_host:
        planned = clock.joined([call for one in runs for call in (plan, one)])
    return Ready(contender, clock.joined(runs), planned, error)


def _host_ms(ready: Ready, clock: Clock) -> float:
    """Milliseconds the host takes to plan, where it does."""
    plan = ready.contender.plan
    if plan is None or not ready.contender.plans_on_host:
        return 0.0
    clock.finish()
    return 1e3 * statistics.median(wall(plan) for _ in range(HOST_CALLS))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    return said if isinstance(error, CannotRunError) else f"{type(error).__name__}: {said}"


def free(device: torch.device) -> None:
    """Give back what a case held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
