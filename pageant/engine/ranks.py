"""The processes that torchrun started, as the ranks of one engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from pageant.engine.errors import EngineError
from pageant.ranks import ContextParallel

TIMEOUT = timedelta(minutes=2)  # a rank that does not answer for so long counts as gone


@contextmanager
def joined(world: int, device: torch.device) -> Iterator[ContextParallel | None]:
    """This process's rank among `world` while the block runs; None for one alone.

    Raises:
        EngineError: torchrun started another number of processes.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world != started:
        raise EngineError(
            f"context_parallel is {world}; allowed: the number of processes, which is {started}. "
            f"For {world}: torchrun --nproc-per-node {world} -m pageant generate "
            f"--context-parallel {world}"
        )
    if world == 1:
        yield None
        return
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", timeout=TIMEOUT)
    try:
        # a2a: a collective less than ag_rs for each layer, and it has an invariant mode.
        yield ContextParallel(rank=dist.get_rank(), world=world, group=dist.group.WORLD, comm="a2a")
    finally:
        dist.destroy_process_group()


def own_device(device: torch.device) -> torch.device:
    """This process's GPU among those of its machine, unless one is named."""
    if str(device) != "cuda":
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
