"""One rank in a process of its own: ``python -m tests.parallel.worker RANK WORLD STORE ACTION``."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import pageant
from pageant import ContextParallel
from pageant.parallel.combine import RanksError
from tests.inputs import Case, Problem, build
from tests.parallel.sharded import on_rank

TIMEOUT_S = 60  # compiling alone takes some longer than others
BASE: dict[str, Any] = {"kv_heads": 1, "group": 4, "v_head_dim": 24, "sinks": True, "scales": True}
LENGTHS = ((1, 30), (3, 17), (2, 2), (0, 5), (1, 1), (9, 40))
CASES = (
    Case(seed=1, lengths=LENGTHS, alibi=True, window=11, **BASE),
    Case(seed=2, format="nvfp4", lengths=LENGTHS, speculative=3, drafts="mask", **BASE),
    Case(seed=3, format="fp8_e4m3", lengths=LENGTHS, causal=False, padding=3, **BASE),
    Case(seed=4, format="int8", lengths=(), **BASE),
    Case(seed=5, lengths=((2, 9),), **{**BASE, "group": 3}),
)


def main() -> None:
    rank, world, path, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    {"check": check, "die": die}[action](rank, world, store)
    dist.destroy_process_group()


def check(rank: int, world: int, _: dist.FileStore) -> None:
    """Every case, by every reduction, for all heads or a share of them."""
    for case, comm, heads in product(CASES, ("ag_rs", "a2a"), ("all", "split")):
        if heads == "split" and case.group % world:
            continue
        group = dist.group.WORLD
        ranks = ContextParallel(
            rank=rank, world=world, interleave=2, group=group, comm=comm, heads=heads
        )
        mine = on_rank(build(case), ranks)
        out, lse = mine.check()
        if heads == "all":
            same_bits(torch.cat([out.flatten(), lse.flatten()]), world)
        if comm == "a2a":
            quantised(mine)
    ranks = ContextParallel(rank=rank, world=world, group=dist.group.WORLD)
    options = pageant.Options(context_parallel=ranks, invariant=True)
    support = pageant.supports(mine.attn.shape, options=options)
    assert support.reason == "comm is 'ag_rs'; allowed: a2a, in invariant mode"
    print(f"rank {rank} of {world}: all equal", flush=True)


def same_bits(mine: torch.Tensor, world: int) -> None:
    """Raise unless all ranks hold the same."""
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)
    for other in every:
        assert torch.equal(other, mine)


def quantised(mine: Problem) -> None:
    """An fp8 output is the whole result, rounded once."""
    attn, scale = mine.attn, 0.25
    features = replace(attn.features, out_formats=("model", "fp8_e4m3"))
    both = pageant.Attention(attn.shape, attn.cache, attn.limits, features, attn.options)
    layer = replace(mine.layer, out_format="fp8_e4m3", out_scale=scale)
    plan, real = both.plan(mine.batch), mine.expected_out.shape[0]
    whole = both.run(plan, mine.q, mine.cache, mine.layer)[:real]
    codes = both.run(plan, mine.q, mine.cache, layer)[:real]
    want, _ = pageant.ops.quantize(whole, "fp8_e4m3", scale)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def die(rank: int, world: int, store: dist.FileStore) -> None:
    """The last rank ends after one call; the others say so."""
    ranks = ContextParallel(rank=rank, world=world, group=dist.group.WORLD)
    mine = on_rank(build(CASES[0]), ranks)
    mine.run()
    store.set(f"ran {rank}", "")
    if rank == world - 1:
        store.wait([f"ran {other}" for other in range(world)])
        sys.exit(0)
    started = time.perf_counter()
    try:
        mine.run()
    except RanksError as error:
        assert time.perf_counter() - started < TIMEOUT_S + 5
        print(error, flush=True)
    else:
        raise AssertionError("a run without one of the ranks")


if __name__ == "__main__":
    main()
