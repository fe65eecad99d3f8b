"""Kernels that only move memory: writing new tokens into pages, and joining partial results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from pageant import ops
from pageant.bench.cases import Case
from pageant.bench.gpu.clock import clock_of
from pageant.bench.gpu.flashinfer import imported
from pageant.bench.gpu.measure import REFUSALS
from pageant.bench.gpu.setting import L2_BYTES
from pageant.bench.peers import CannotRunError
from pageant.bench.problem import Problem
from pageant.bench.results import Result
from pageant.bench.timing import Call, interleaved
from pageant.cache.formats import FORMATS

WRITE_TOKENS = (256, 8192)
WRITE_FORMATS = ("bf16", "fp8_e4m3", "int8", "nvfp4")
MERGES = ((2, 256), (2, 8192), (8, 256))  # parts and tokens
HEADS, HEAD_DIM = 32, 128
CALLS = 32

Make = Callable[[], Callable[[int], object]]


@dataclass(frozen=True)
class Job:
    """One case of `write` or `merge`.

    Attributes:
        name: of the case.
        num_bytes: read and written, of each contender.
        makers: contenders; each gives a call that takes the number of a copy.
        copies: of the memory.
    """

    name: str
    num_bytes: Mapping[str, int]
    makers: Mapping[str, Make]
    copies: int


def write_jobs(device: torch.device) -> list[Job]:
    """New tokens of one step, at slots all over the pool, into each format."""
    return [_write_job(tokens, device) for tokens in WRITE_TOKENS]


def _write_job(tokens: int, device: torch.device) -> Job:
    case = Case(name=f"write {tokens}", lengths=((1, 1),) * tokens)
    problem = Problem.of(case, device=device)
    copies = min(CALLS, max(2, -(-int(L2_BYTES) // case.kv_bytes)))
    k, v = torch.cat(problem.keys), torch.cat(problem.values)
    slots = torch.tensor([row[0] * case.page_size for row in problem.page_table], device=device)

    def pageant(format: str) -> Callable[[int], object]:
        ready = problem.prepared(format, copies)
        return lambda copy: ready.attention.write(ready.plan, ready.caches[copy], k, v, ready.layer)

    def pools() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [problem.pools() for _ in range(copies)]

    def indexed() -> Callable[[int], object]:
        flat = [(key.flatten(0, 1), value.flatten(0, 1)) for key, value in pools()]

        def run(copy: int) -> None:
            for pool, rows in zip(flat[copy], (k, v), strict=True):
                pool.index_copy_(0, slots, rows)

        return run

    def flashinfer() -> Callable[[int], object]:
        append = imported("flashinfer.page").append_paged_kv_cache
        caches = pools()
        requests = torch.arange(tokens, dtype=torch.int32, device=device)
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        pages = (slots // case.page_size).to(torch.int32)
        zeros, ones = torch.zeros_like(requests), torch.ones_like(requests)
        return lambda copy: append(k, v, requests, zeros, caches[copy], pages, starts, ones)

    read = 2 * tokens * case.kv_heads * case.head_dim * case.dtype.itemsize
    makers: dict[str, Make] = {f"pageant {name}": partial(pageant, name) for name in WRITE_FORMATS}
    num_bytes = {f"pageant {name}": read + _stored(tokens, name, case) for name in WRITE_FORMATS}
    for name, make in (("index_copy_", indexed), ("flashinfer-append", flashinfer)):
        makers[name], num_bytes[name] = make, 2 * read
    return Job(case.name, num_bytes, makers, copies)


def _stored(tokens: int, format: str, case: Case) -> int:
    fmt = FORMATS[format]
    row = fmt.data_bytes(case.head_dim) + fmt.scale_bytes(case.head_dim)
    return 2 * tokens * case.kv_heads * row


def merge_jobs(device: torch.device) -> list[Job]:
    """Partial results of one layer, in bf16."""
    return [_merge_job(parts, tokens, device) for parts, tokens in MERGES]


def _merge_job(parts: int, tokens: int, device: torch.device) -> Job:
    size = (tokens, parts, HEADS, HEAD_DIM)
    row_bytes = HEAD_DIM * 2 + 4
    num_bytes = (parts + 1) * tokens * HEADS * row_bytes
    copies = min(CALLS, max(2, -(-int(L2_BYTES) // num_bytes)))
    rng = torch.Generator(device).manual_seed(0)
    states = torch.randn(copies, *size, generator=rng, device=device).bfloat16()
    lses = torch.randn(copies, *size[:3], generator=rng, device=device)
    out = torch.empty(tokens, HEADS, HEAD_DIM, dtype=states.dtype, device=device)

    def pageant() -> Callable[[int], object]:
        apart = [(list(v.unbind(1)), list(s.unbind(1))) for v, s in zip(states, lses, strict=True)]
        return lambda copy: ops.merge_states(*apart[copy], out=out)

    def flashinfer() -> Callable[[int], object]:
        merge = imported("flashinfer.cascade").merge_states
        return lambda copy: merge(states[copy], lses[copy])

    makers: dict[str, Make] = {"pageant": pageant, "flashinfer-merge": flashinfer}
    name = f"merge {parts} parts, {tokens} tokens"
    return Job(name, dict.fromkeys(makers, num_bytes), makers, copies)


JOBS = {"write": write_jobs, "merge": merge_jobs}


def time_job(job: Job, rounds: int, device: torch.device) -> list[Result]:
    """Time a job's contenders against each other."""
    clock, refused, replays = clock_of(device), dict[str, str](), dict[str, Call]()
    with torch.inference_mode():
        for name, make in job.makers.items():
            refusals = (CannotRunError,) if name.startswith("pageant") else REFUSALS
            try:
                call = make()
                call(0)
                replays[name] = clock.joined([partial(call, i % job.copies) for i in range(CALLS)])
            except refusals as error:
                refused[name] = str(error)
        times = interleaved(replays, rounds, clock.seconds)
    return [
        Result(case=job.name, contender=name, why=refused[name])
        if name in refused
        else Result(
            case=job.name,
            contender=name,
            median_ms=1e3 * times[name].median / CALLS,
            fastest_ms=1e3 * times[name].fastest / CALLS,
            spread_ms=1e3 * times[name].spread / CALLS,
        )
        for name in job.makers
    ]
