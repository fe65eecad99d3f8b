"""Partial results of all ranks, joined through torch.distributed.

Each rank has attended to its own keys, so each row has as many parts as there are ranks:

    whole = ln sum_r e^(lse_r);  out = sum_r e^(lse_r - whole) out_r

The rows are dealt out, one chunk a rank. The chunk's parts travel to that rank, are joined there in
the order of ranks, and travel back where every rank wants every row: so all ranks hold the same
bits. "a2a" sends parts and lse in one all-to-all; "ag_rs" gathers every lse first, then weighs its
own parts and leaves the sum to a reduce-scatter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from pageant.kernels.merge import merge_states
from pageant.ranks import ContextParallel


class RanksError(RuntimeError):
    """Another rank did not answer: it ended, or the group's timeout passed."""


def gather_heads(x: torch.Tensor, ranks: ContextParallel, dim: int) -> torch.Tensor:
    """Every rank's heads side by side along `dim`; x itself where each rank has all of them."""
    if ranks.heads == "all" or ranks.world == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks.world)]
    with _named(ranks):
        dist.all_gather(parts, x.contiguous(), group=ranks.group)
    return torch.cat(parts, dim)


def combine(
    out: torch.Tensor, lse: torch.Tensor, ranks: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole results from this rank's parts and the others'.

    Args:
        out: float32 [T, H, Dv], H heads of all ranks.
        lse: float32 [T, H], natural log, without sinks.
        ranks: this rank, its group, and how to join.

    Returns:
        float32 [T, H, Dv] and [T, H]; with "split" heads, of the rank's own H / world heads.

    Raises:
        RanksError: if another rank does not answer.
    """
    tokens, heads, size = out.shape
    if ranks.world == 1 or tokens == 0:
        kept = heads if ranks.heads == "all" else heads // ranks.world
        return out[:, :kept], lse[:, :kept]
    out, lse = _deal(out, ranks), _deal(lse[..., None], ranks)
    with _named(ranks):
        if ranks.comm == "a2a":
            packed = torch.cat([out, lse], -1)
            parts = torch.empty_like(packed)
            dist.all_to_all_single(parts, packed, group=ranks.group)
            whole, whole_lse = _join(parts[..., :-1], parts[..., -1])
        else:
            gathered = [torch.empty_like(lse) for _ in range(ranks.world)]
            dist.all_gather(gathered, lse, group=ranks.group)
            whole, whole_lse = _sum(out, torch.stack(gathered)[..., 0], ranks)
        if ranks.heads == "split":
            own = heads // ranks.world
            return whole.view(tokens, own, size), whole_lse.view(tokens, own)
        packed = torch.cat([whole, whole_lse[:, None]], -1)
        chunks = [torch.empty_like(packed) for _ in range(ranks.world)]
        dist.all_gather(chunks, packed, group=ranks.group)
    rows = torch.cat(chunks)[: tokens * heads].view(tokens, heads, size + 1)
    return rows[..., :-1], rows[..., -1]


def of_first_rank(value: Any, ranks: ContextParallel | None) -> Any:
    """What the first rank of the group has, on every rank; without ranks the value itself."""
    if ranks is None or ranks.world == 1:
        return value
    box = [value]
    with _named(ranks):
        first = dist.get_global_rank(ranks.group, 0)
        dist.broadcast_object_list(box, src=first, group=ranks.group)
    return box[0]


def _deal(x: torch.Tensor, ranks: ContextParallel) -> torch.Tensor:
    """[T, H, C] as one chunk of rows a rank, [world, rows, C], zeros where rows do not divide."""
    if ranks.heads == "split":
        parts = x.view(x.shape[0], ranks.world, -1, x.shape[2])
        return parts.transpose(0, 1).flatten(1, 2).contiguous()
    rows = x.flatten(0, 1)
    missing = -rows.shape[0] % ranks.world
    padded = torch.cat([rows, rows.new_zeros(missing, x.shape[2])])
    return padded.view(ranks.world, -1, x.shape[2])


def _join(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk's parts [world, rows, C] and [world, rows], in the order of ranks."""
    out, lse = merge_states(list(outs.unsqueeze(2)), list(lses.unsqueeze(2)))
    return out[:, 0], lse[:, 0]


def _sum(
    out: torch.Tensor, lses: torch.Tensor, ranks: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's chunk, of `out` [world, rows, C] here and lses [from, chunk, rows] of all."""
    whole = torch.logsumexp(lses, dim=0)
    weight = torch.exp(lses[ranks.rank] - whole.masked_fill(whole == -torch.inf, 0.0))
    parts = out.mul_(weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, list(parts), group=ranks.group)
    return mine, whole[ranks.rank]


@contextmanager
def _named(ranks: ContextParallel) -> Iterator[None]:
    """Errors of a collective as one that says which rank waited for whom."""
    try:
        yield
    except RuntimeError as error:
        raise RanksError(
            f"rank {ranks.rank} of {ranks.world} got no answer from the others: {_reason(error)}"
        ) from error


def _reason(error: RuntimeError) -> str:
    """What a collective's error says first in its last line, without the place in its source.

    >>> _reason(RuntimeError("[/gloo/pair.cc:537] Connection closed by peer. Check the logs."))
    'Connection closed by peer'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = re.sub(r"^\[[^\]]*:\d+\] *", "", lines[-1])
    return said.partition(". ")[0].rstrip(".")
