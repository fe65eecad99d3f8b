"""What a step costs the host: microseconds of plan and of run, beside the GPU's own planning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pageant.bench.cases import Case
from pageant.bench.gpu import flashinfer
from pageant.bench.gpu.clock import Clock, clock_of
from pageant.bench.gpu.measure import REFUSALS
from pageant.bench.gpu.setting import Contender, Setting
from pageant.bench.problem import Problem
from pageant.bench.timing import Call, Times, interleaved, wall
from pageant.types import ArgumentError

REQUESTS = (1, 64, 256)
KEYS = 64  # few, so that the GPU is done before the host's next call
ROUNDS, CALLS = 10, 50  # the GPU catches up after each round; no call waits for it within one
DEVICE_CALLS = 20


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """One planner on a batch of decodes.

    Attributes:
        requests, contender: the batch's size, and whose planner it is.
        plan_us, run_us: medians of the host's time.
        plan_spread_us, run_spread_us: between the quartiles.
        device_us: median of the planning kernel; None where the host plans.
        why: why it cannot run; else None.
    """

    requests: int
    contender: str
    plan_us: float | None = None
    plan_spread_us: float | None = None
    run_us: float | None = None
    run_spread_us: float | None = None
    device_us: float | None = None
    why: str | None = None


def host_times(call: Call, clock: Clock, rounds: int = ROUNDS, calls: int = CALLS) -> Times:
    """Of single calls, in rounds; nothing is waited for within a round."""
    seconds = []
    for _ in range(rounds):
        clock.finish()
        seconds += [wall(call) for _ in range(calls)]
    clock.finish()
    return Times.of(seconds)


def pageant(setting: Setting) -> Contender:
    """``Attention.plan`` of a batch that lies on the device, and ``run`` with out given."""
    ready = setting.problem.prepared(setting.case.own_format, setting.copies)
    latest = [ready.plan]

    def plan() -> None:
        latest[0] = ready.attention.plan(ready.plan.batch)

    def run(copy: int) -> torch.Tensor:
        ready.attention.run(latest[0], ready.q, ready.caches[copy], ready.layer, out=ready.out)
        return ready.out

    return Contender(run, plan)


MAKERS = {"pageant bf16": pageant, "flashinfer-decode-tc": flashinfer.decode}


def costs(device: torch.device, rounds: int = ROUNDS) -> list[HostCost]:
    """Of every planner, at each number of requests."""
    clock, found = clock_of(device), []
    for requests in REQUESTS:
        case = Case(name=f"{requests} requests", lengths=((1, KEYS),) * requests)
        setting = Setting(Problem.of(case, device=device), 1)
        for name, make in MAKERS.items():
            refusals = (ArgumentError,) if name.startswith("pageant") else REFUSALS
            with torch.inference_mode():
                try:
                    found.append(_cost(name, requests, make(setting), clock, rounds))
                except refusals as error:
                    found.append(HostCost(requests=requests, contender=name, why=str(error)))
    return found


def _cost(name: str, requests: int, contender: Contender, clock: Clock, rounds: int) -> HostCost:
    plan, run = contender.plan, partial(contender.run, 0)
    assert plan is not None
    plan()
    run()
    planned, ran = host_times(plan, clock, rounds), host_times(run, clock, rounds)
    device_us = None
    if not contender.plans_on_host:
        joined = clock.joined([plan] * DEVICE_CALLS)
        times = interleaved({"plan": joined}, rounds, clock.seconds)
        device_us = 1e6 * times["plan"].median / DEVICE_CALLS
    return HostCost(
        requests=requests,
        contender=name,
        plan_us=1e6 * planned.median,
        plan_spread_us=1e6 * planned.spread,
        run_us=1e6 * ran.median,
        run_spread_us=1e6 * ran.spread,
        device_us=device_us,
    )
