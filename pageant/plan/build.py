"""Batch in, frozen Plan out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageant.plan.batch import Batch, check_host, check_values
from pageant.plan.buffers import PlanBuffers, make_buffers, make_workspace
from pageant.plan.pages import page_use, write_index
from pageant.plan.split import Split, split_decodes_and_prefills
from pageant.plan.work import Lengths, fill_decode, fill_prefill
from pageant.types import CacheSpec, Features, Limits, Options, Shape, bad


@dataclass(frozen=True)
class Plan:
    """One step's work, valid until its slot is planned again. Made by ``Attention.plan``.

    Attributes:
        batch: what was planned; its tensors are read again when the plan runs.
        buffers: work lists and the rest that planning wrote, at fixed addresses.
        generation: counts the plans of one Attention.
        planner: who made it.
    """

    batch: Batch
    buffers: PlanBuffers
    generation: int
    planner: Planner

    @property
    def split(self) -> Split:
        """How many requests and tokens decode, and how many prefill."""
        return self.buffers.split

    def check(self) -> None:
        """Raise if the batch's tensors hold a mistake by now (synchronises on a GPU)."""
        self.require_current()
        self.planner.inspect(self.batch)

    def require_current(self) -> None:
        """Raise if a newer plan has taken this plan's buffers."""
        if self.buffers.generation != self.generation:
            age = f"plan {self.generation}, replaced by plan {self.buffers.generation}"
            raise bad("plan", age, "the newest plan, or one of the newest Options.plan_slots")


class Planner:
    """Plans batches on the host for one Attention: inspect everything, then write the buffers."""

    def __init__(
        self,
        shape: Shape,
        cache: CacheSpec,
        limits: Limits,
        features: Features,
        options: Options,
        device: torch.device,
    ) -> None:
        self.page_size, self.limits, self.features = cache.page_size, limits, features
        self.options, self.device = options, device
        workers = torch.get_num_threads()
        self.slots = [
            make_buffers(limits, features, options, workers) for _ in range(options.plan_slots)
        ]
        self.workspace = make_workspace(shape, limits, options, workers)
        self.generation = 0

    def plan(self, batch: Batch) -> Plan:
        """Plan a batch into the oldest slot.

        Raises:
            ArgumentError: for any mistake in the batch; then no buffer was touched.
        """
        inspected = self.inspect(batch)
        self.generation += 1
        buffers = self.slots[self.generation % len(self.slots)]
        buffers.generation = self.generation
        self._fill(buffers, batch, inspected)
        return Plan(batch, buffers, self.generation, self)

    def require(self, plan: Plan) -> None:
        """Raise unless the plan is one of ours, and its buffers still hold it."""
        if plan.planner is not self:
            raise bad("plan", "another Attention's", "a plan this Attention made")
        plan.require_current()

    def update(self, plan: Plan) -> None:
        """Plan again after the batch's tensors changed in place."""
        self.require(plan)
        self._fill(plan.buffers, plan.batch, self.inspect(plan.batch))

    def inspect(self, batch: Batch) -> PlanBuffers:
        """Check a batch, and read from it what needs no work list: split, pages, slots, mask."""
        check_host(batch, self.limits, self.features, self.device)
        check_values(batch, self.limits, self.page_size)
        starts, query_lens, key_lens = _lengths(batch)
        widest = None if None in self.features.windows else max(filter(None, self.features.windows))
        return PlanBuffers(
            work={},
            split=split_decodes_and_prefills(
                starts,
                batch.num_tokens,
                batch.max_query_len,
                1 + self.options.speculative_tokens,
            ),
            real_tokens=int(starts[-1]),
            draft_mask=_draft_mask(batch, starts, query_lens),
            pages=page_use(
                batch.page_table.cpu().numpy(), query_lens, key_lens, self.page_size, widest
            ),
            writes=None
            if batch.slot_mapping is None
            else write_index(batch.slot_mapping, self.page_size),
        )

    def _fill(self, buffers: PlanBuffers, batch: Batch, inspected: PlanBuffers) -> None:
        buffers.split, buffers.real_tokens = inspected.split, inspected.real_tokens
        buffers.pages = inspected.pages
        buffers.writes, buffers.draft_mask = inspected.writes, inspected.draft_mask
        _, query_lens, key_lens = _lengths(batch)
        sees_all = np.full(batch.num_requests, buffers.draft_mask is not None)
        if batch.encoder_seq_lens is not None:
            sees_all[:] = True
        elif isinstance(batch.causal, torch.Tensor):
            sees_all |= ~batch.causal.cpu().numpy()
        else:
            sees_all |= not batch.causal
        decodes = buffers.split.num_decodes
        decode = Lengths(0, decodes, query_lens, key_lens, sees_all)
        prefill = Lengths(decodes, batch.num_requests, query_lens, key_lens, sees_all)
        for window in self.features.windows:
            fill_decode(buffers.work["decode", window], decode, window, self.options.debug_splits)
            fill_prefill(buffers.work["prefill", window], prefill, window)


def _lengths(batch: Batch) -> tuple[np.ndarray[Any, Any], ...]:
    starts = batch.query_start_loc.cpu().numpy().astype(np.int64)
    return starts, np.diff(starts), batch.key_lens.cpu().numpy().astype(np.int64)


def _draft_mask(
    batch: Batch, starts: np.ndarray[Any, Any], query_lens: np.ndarray[Any, Any]
) -> torch.Tensor | None:
    """The batch's own mask, or its trees': a draft token sees itself and its ancestors."""
    if batch.draft_parents is None:
        return batch.draft_mask
    parents = batch.draft_parents.cpu().numpy()
    mask = torch.zeros(len(parents), batch.max_query_len, dtype=torch.bool)
    seen = mask.numpy()
    own = np.arange(starts[-1]) - np.repeat(starts[:-1], query_lens)
    for token in range(int(starts[-1])):
        if parents[token] >= 0:
            seen[token] = seen[token - own[token] + parents[token]]
        seen[token, own[token]] = True
    return mask.to(batch.draft_parents.device)
