"""Graph replays of the GPU benchmarks: small cases, all contenders that are installed."""

from __future__ import annotations

import pytest
import torch

from pageant.bench.cases import Case
from pageant.bench.gpu.ceilings import ceilings
from pageant.bench.gpu.clock import clock_of
from pageant.bench.gpu.measure import measure
from pageant.bench.gpu.memory import JOBS, time_job
from pageant.bench.gpu.planning import costs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("bench", "case"),
    [
        ("decode", Case(name="dec plain", lengths=((1, 700),) * 4)),
        ("decode", Case(name="dec ragged", lengths=((1, 1), (1, 900), (1, 33)))),
        ("decode", Case(name="dec drafts", lengths=((4, 700),) * 2, drafts=3)),
        ("decode", Case(name="dec fp8", lengths=((1, 700),) * 2, format="fp8_e4m3")),
        ("decode", Case(name="dec int8", lengths=((1, 700),) * 2, format="int8")),
        ("decode", Case(name="dec nvfp4", lengths=((1, 700),) * 2, format="nvfp4")),
        ("prefill", Case(name="pre plain", lengths=((512, 512),) * 2)),
        ("prefill", Case(name="pre chunk", lengths=((200, 700),))),
        ("prefill", Case(name="pre free", lengths=((512, 512),), causal=False)),
        ("prefill", Case(name="pre window", lengths=((512, 512),), window=100)),
        ("prefill", Case(name="pre cap", lengths=((512, 512),), soft_cap=30.0)),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_contenders_are_right_and_timed(bench: str, case: Case) -> None:
    ours, *peers = measure(
        bench, case, 3, ["fa3", "sdpa-flash2", *[f"pageant {case.own_format}"]], CUDA
    )
    assert ours.why is None
    for each in [ours, *(peer for peer in peers if peer.why is None)]:
        assert each.error is not None
        assert each.error < (5e-2 if each.contender == "fa3" and case.format else 4e-3)
        assert each.median_ms is not None
        assert 1e-3 < each.median_ms < 10
        assert each.planned_ms is not None
        assert each.planned_ms >= 0.9 * each.median_ms


def test_a_replay_takes_as_long_as_its_calls() -> None:
    clock = clock_of(CUDA)
    x = torch.randn(4096, 4096, device=CUDA)
    out = torch.empty_like(x)

    def call() -> None:
        torch.mm(x, x, out=out)

    call()
    one, eight = clock.joined([call]), clock.joined([call] * 8)
    clock.seconds(eight)
    times = [min(clock.seconds(each) for _ in range(5)) for each in (one, eight)]
    assert times[1] / times[0] == pytest.approx(8, rel=0.2)


def test_the_rest_runs() -> None:
    found = ceilings(CUDA, 3, 1 << 28, 2048)
    assert found["read_gbs"] > 100
    assert found["bf16_tflops"] > 10
    for jobs in JOBS.values():
        for job in jobs(CUDA):
            results = {each.contender: each for each in time_job(job, 3, CUDA)}
            assert all(x.why is None for name, x in results.items() if name.startswith("pageant"))
    ours = [each for each in costs(CUDA, 2) if each.contender == "pageant bf16"]
    assert all(each.device_us is not None and each.device_us < 100 for each in ours)
