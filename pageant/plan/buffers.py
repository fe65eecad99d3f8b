"""Storage of fixed address: work lists of one plan slot, and the workspace of one Attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pageant.plan.copies import BatchCopy
from pageant.plan.pages import PageUse
from pageant.plan.prefix import LEVELS
from pageant.plan.shared import TILE_ROWS
from pageant.plan.split import Split
from pageant.plan.work import QUERY_TILE, WorkList
from pageant.types import Features, Limits, Options, Shape


@dataclass(frozen=True)
class Workspace:
    """Room for partial results, allocated once.

    Attributes:
        partial_out: float32 [partials, rows, Hq, Dv].
        partial_lse: float32 [partials, rows, Hq], natural log.
        finished: float32 [max_tokens, Hq, Dv], rows before they are quantised, or joined with
            those of other ranks; empty if none are.
        shared: partial results of gathered rows, on a GPU their results, [rows, Hq, Dv] and
            [rows, Hq]; None where nothing is ever shared.
        scratch: uint8, of kernels of others that need some.
    """

    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    finished: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    shared: Workspace | None = None
    scratch: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        own = self.partial_out.nbytes + self.partial_lse.nbytes + self.finished.nbytes
        own += sum(room.nbytes for room in self.scratch)
        return own + (0 if self.shared is None else self.shared.num_bytes)


@dataclass
class PlanBuffers:
    """One plan slot: what planning writes and running reads.

    Attributes:
        work: a WorkList for each (phase, window), or a DeviceWork, or a HostWork.
        shared: the work of shared prefixes for each window that has any: a SharedWork; or on a GPU,
            for each that may have any, a GroupWork.
        memory: where the copy lies: CopyMemory, or DeviceMemory.
        generation: of the plan that owns the slot now.
        split: how many requests decode.
        real_tokens: tokens without padding; on a GPU all of them, as the host cannot tell.
        known_tokens: how many are no padding for certain.
        pages: the largest page id rows can see, for run to compare with the cache.
        copy: what kernels read of the batch; None before the first plan.
        packed: the decodes' draft mask in words, once somebody asked for it.
    """

    work: dict[tuple[str, int | None], Any]
    memory: Any
    shared: dict[int | None, Any] = field(default_factory=dict)
    generation: int = -1
    split: Split = Split(0, 0, 0, 0)
    real_tokens: int = 0
    known_tokens: int = 0
    pages: PageUse = field(default_factory=PageUse)
    copy: BatchCopy | None = None
    packed: torch.Tensor | None = None

    @property
    def batch(self) -> BatchCopy:
        """The copy, of a slot that was planned."""
        assert self.copy is not None
        return self.copy


def make_work(
    limits: Limits, features: Features, options: Options, workers: int
) -> dict[tuple[str, int | None], WorkList]:
    """Room for the work of any batch within the limits."""
    pieces = options.debug_splits or 1
    work = {}
    tiles = limits.max_requests + -(-limits.max_tokens // QUERY_TILE)
    decode_items = tiles if options.invariant else limits.max_requests * pieces + workers
    for window in features.windows:
        work["decode", window] = WorkList.empty(decode_items, workers)
        work["prefill", window] = WorkList.empty(tiles, workers)
    return work


def make_workspace(
    shape: Shape,
    limits: Limits,
    features: Features,
    options: Options,
    device: torch.device,
    decode_threshold: int,
    workers: int,
    *,
    shares: bool = False,
) -> Workspace:
    """Room for the partial results of any batch within the limits.

    Each is of a decode's rows. A request leaves one more than there are cuts through it, or none if
    there are none; one that shares a prefix leaves one for each level, and at least one of its own.
    """
    cuts = 0 if options.invariant else workers - 1
    requests = min(limits.max_requests, limits.max_tokens)
    partials = cuts + (requests if shares else min(cuts, requests))
    if options.debug_splits is not None:
        partials = requests * options.debug_splits
    ranks = options.context_parallel
    finishes = any(name != "model" for name in features.out_formats)
    finishes |= ranks is not None and ranks.group is not None
    with torch.inference_mode(False):  # else only inference mode could write to it
        shared = _room(2 * cuts, TILE_ROWS, shape) if shares else None
        room = _room(partials + requests * LEVELS * shares, decode_threshold, shape)
        finished = torch.empty(
            limits.max_tokens * finishes, shape.num_q_heads, shape.value_dim, device=device
        )
    return replace(room, finished=finished, shared=shared)


def _room(partials: int, rows: int, shape: Shape) -> Workspace:
    lse = torch.empty(partials, rows, shape.num_q_heads, dtype=torch.float32)
    return Workspace(lse.new_empty(*lse.shape, shape.value_dim), lse)
