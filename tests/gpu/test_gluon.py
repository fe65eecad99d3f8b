"""On Hopper, the Gluon decode equals the float64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import pageant
from pageant.device import Device
from tests.gpu.gluon_cases import drawn, named
from tests.gpu.scene import attention, batch, noise, rows
from tests.inputs import BOUNDS, Case, assert_close, build
from tests.switched_on import gluon_decode

CASES = named()
SEEDS = range(4)
DRAWN = 20  # with each seed


@pytest.fixture(autouse=True)
def _on_hopper() -> Iterator[None]:
    if Device.detect("cuda").family != "sm90":
        pytest.skip("needs a Hopper GPU")
    with gluon_decode():
        yield


def equals(case: Case) -> None:
    problem = build(case).on("cuda")
    out, lse = problem.run()
    assert_close(out, problem.expected_out, BOUNDS[case.dtype])
    assert_close(lse, problem.expected_lse, BOUNDS[case.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = CASES[name]
    equals(case)
    equals(replace(case, seed=case.seed + 1000, lengths=case.lengths[::-1], causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(seed: int) -> None:
    for case in itertools.islice(drawn(seed), DRAWN):
        equals(case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "nvfp4"])
@pytest.mark.parametrize("factor", [2.0**-100, 2.0**20, 2.0**100])
def test_queries_out_of_the_range_of_float16(name: str, factor: float) -> None:
    problem = build(replace(CASES[name], scales=False)).on("cuda")
    layer = replace(problem.layer, scale=128**-0.5 / factor)
    out, lse = replace(problem, layer=layer, q=problem.q * factor).run()
    assert_close(out, problem.expected_out, BOUNDS[torch.bfloat16])
    assert_close(lse, problem.expected_lse, BOUNDS[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("window", [None, 70])
def test_ranks_together_are_one(world: int, window: int | None) -> None:
    layer = pageant.Layer(window=window)
    shape = pageant.Shape(num_q_heads=16, num_kv_heads=8, head_dim=128)
    limits = pageant.Limits(max_requests=3, max_tokens=12, max_seq_len=2048)
    lens, new = [1000, 5, 300], [4, 1, 3]
    whole = attention(limits, (layer,), shape=shape, speculative_tokens=3)
    kv, q = noise(whole, 200)[0], rows(8, 16, 128)
    step = batch(new, lens)
    want, want_lse = whole.run(whole.plan(step), q, kv, layer, return_lse=True)
    outs, lses = [], []
    for rank in range(world):
        shard = pageant.ContextParallel(rank=rank, world=world, interleave=4)
        attn = attention(
            limits, (layer,), shape=shape, speculative_tokens=3, context_parallel=shard
        )
        part = attn.new_cache(num_layers=1, num_pages=200)[0]
        table = torch.zeros_like(step.page_table)
        page = 0
        for request, n in enumerate(lens):
            keys = [key for key in range(n) if key // 4 % world == rank]
            for index, key in enumerate(keys):
                if index % 16 == 0:
                    table[request, index // 16] = page
                    page += 1
                source = int(step.page_table[request, key // 16])
                part.k[page - 1, index % 16] = kv.k[source, key % 16]
                part.v[page - 1, index % 16] = kv.v[source, key % 16]
        plan = attn.plan(replace(step, page_table=table))
        out, lse = attn.run(plan, q, part, layer, return_lse=True)
        outs.append(out)
        lses.append(lse)
    got, got_lse = pageant.ops.merge_states(outs, lses)
    assert_close(got.cpu(), want.double().cpu(), 6e-3)
    assert_close(got_lse.cpu(), want_lse.double().cpu(), 4e-3)
