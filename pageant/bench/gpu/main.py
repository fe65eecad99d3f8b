"""The benchmarks of CUDA devices as one function, for machines without a command line's packages.

python3 -c "from pageant.bench.gpu.main import main; main('decode', out='decode.json')"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pageant.bench.cases import Case
from pageant.bench.gpu import report
from pageant.bench.gpu.cases import BEFORE_BEST, BEFORE_DATE, CASES, CLAIMS, before_ms, known_ms
from pageant.bench.gpu.ceilings import ceilings
from pageant.bench.gpu.measure import contenders, free, measure
from pageant.bench.gpu.memory import JOBS, time_job
from pageant.bench.gpu.planning import costs
from pageant.bench.record import check_writable, record, save
from pageant.bench.results import Result, judge
from pageant.device import Device, driver_version
from pageant.types import bad

BENCHES = (*CASES, *JOBS, "plan")
ROUNDS = 20


def main(  # budget: one parameter for each option of the command
    bench: str,
    out: str | Path | None = None,
    plot: str | Path | None = None,
    case: Sequence[str] = (),
    only: Sequence[str] = (),
    rounds: int = ROUNDS,
    device: str = "cuda",
    commit: str | None = None,
) -> dict[str, Any]:
    """Run one benchmark and print its tables.

    Args:
        bench: one of `BENCHES`.
        out: write the result there too, after every case.
        plot: write a picture there, of decode or prefill; needs matplotlib.
        case: names of cases; none means all.
        only: names of contenders; none means all.
        rounds: counted replays of each contender.
        device: where.
        commit: of the code that is measured, where its checkout cannot tell.

    Returns:
        The result, as in the file.
    """
    if bench not in BENCHES:
        raise bad("bench", bench, ", ".join(BENCHES))
    if rounds < 1:
        raise bad("rounds", rounds, "a whole number from 1 up")
    if plot is not None and bench not in CASES:
        raise bad("plot", str(plot), f"nothing, for {bench}")
    Device.detect(device)
    where = torch.device(device)
    cases = _chosen(bench, case, only)
    for name, path in (("out", out), ("plot", plot)):
        if path is not None:
            check_writable(name, Path(path))
    words = [f"pageant bench {bench}", *(f"--case '{each}'" for each in case)]
    words += [*(f"--only '{each}'" for each in only), f"--rounds {rounds}"]
    answer = record(
        bench,
        where,
        command=" ".join(words),
        driver=driver_version(),
        cuda=torch.version.cuda,
        rounds=rounds,
    )
    answer["commit"] = commit or answer["commit"]
    path = None if out is None else Path(out)
    if bench in CASES:
        _attention(bench, answer, cases, only, where, path)
    elif bench in JOBS:
        _memory(bench, answer, where)
    else:
        answer["results"] = [asdict(each) for each in costs(where)]
        print(report.plans(answer["results"]))
    if path is not None:
        save(path, answer)
    if plot is not None:
        from pageant.bench.gpu.plot import draw

        draw(answer, Path(plot))
    return answer


def _chosen(bench: str, names: Sequence[str], only: Sequence[str]) -> tuple[Case, ...]:
    """The cases asked for, of benchmarks that have any."""
    every = CASES.get(bench, ())
    for argument, given, known in (
        ("case", names, [each.name for each in every]),
        ("only", only, dict.fromkeys(x for each in every for x in contenders(bench, each))),
    ):
        for name in given:
            if name not in known:
                raise bad(argument, name, ", ".join(known) or f"nothing, for {bench}")
    return tuple(each for each in every if not names or each.name in names)


def _attention(
    bench: str,
    answer: dict[str, Any],
    cases: tuple[Case, ...],
    only: Sequence[str],
    where: torch.device,
    path: Path | None,
) -> None:
    """Decode or prefill: case after case, saved after each."""
    answer["ceilings"] = ceilings(where)
    free(where)
    answer |= {"cases": [], "results": [], "claims": []}
    print(report.ceilings(answer["ceilings"]))
    results: list[Result] = []
    for each in cases:
        found = measure(bench, each, answer["rounds"], only, where)
        free(where)
        results += found
        described = described_case(each)
        answer["cases"].append(described)
        answer["results"] += [asdict(one) for one in found]
        verdicts = judge(results, CLAIMS[bench], known_ms(cases))
        answer["claims"] = [
            {**asdict(one.claim), "against": one.against, "ratio": one.ratio, "holds": one.holds}
            for one in verdicts
        ]
        print(report.case(described, answer["results"][-len(found) :], answer["ceilings"]))
        if path is not None:
            save(path, answer)
    if answer["claims"]:
        print(report.claims(answer["claims"]))


def described_case(case: Case) -> dict[str, Any]:
    """A case as a result file has it: sizes, what it takes at least, and the best time before."""
    before = None
    if case.name in BEFORE_BEST:
        before = {
            "contender": BEFORE_BEST[case.name][0],
            "median_ms": before_ms(case),
            "date": BEFORE_DATE,
        }
    return {
        **asdict(case),
        "dtype": str(case.dtype).removeprefix("torch."),
        "format": case.own_format,
        "kv_bytes": case.kv_bytes,
        "num_bytes": case.num_bytes,
        "flops": case.flops,
        "measured_before": before,
    }


def _memory(bench: str, answer: dict[str, Any], where: torch.device) -> None:
    """Write or merge."""
    answer |= {"ceilings": ceilings(where), "results": []}
    free(where)
    print(report.ceilings(answer["ceilings"]))
    for job in JOBS[bench](where):
        found = [
            {**asdict(each), "num_bytes": job.num_bytes[each.contender]}
            for each in time_job(job, answer["rounds"], where)
        ]
        answer["results"] += found
        print(report.job(job.name, found))
        free(where)
