"""Batch in, frozen Plan out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pageant.cache.formats import Format, resolve
from pageant.plan.batch import Batch
from pageant.plan.buffers import PlanBuffers, Workspace, make_work, make_workspace
from pageant.plan.copies import CopyMemory
from pageant.plan.inputs import resolve_layer
from pageant.plan.masks import PackedMasks
from pageant.plan.mistakes import Lens, check_host, check_values, lens_of
from pageant.plan.pages import PageUse, page_use
from pageant.plan.prefix import SharedPrefix, check_hint, shared_prefixes
from pageant.plan.shared import parts_of, share
from pageant.plan.split import Split, split_decodes_and_prefills
from pageant.plan.work import Lengths, fill_decode, fill_prefill
from pageant.ranks import ALONE
from pageant.select.answer import Explanation
from pageant.types import CacheSpec, Features, Limits, Options, Shape, bad


@dataclass(frozen=True)
class Plan:
    """One step's work, valid until its slot is planned again. Made by ``Attention.plan``.

    Attributes:
        batch: what was planned; its tensors are read again by ``update`` and ``check`` alone.
        buffers: work lists, a copy of the batch and the rest that planning wrote.
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

    @property
    def shared(self) -> dict[int | None, tuple[SharedPrefix, ...]]:
        """For each window of the layers: which requests' keys are computed once, and how many.

        None of them where the Attention's ``explain()`` says that prefixes are not shared, nor on a
        GPU: there they are found on the device, and the host does not know them.
        """
        found = self.buffers.shared
        return {
            window: found[window].prefixes if window in found else ()
            for window in self.planner.features.windows
        }

    @property
    def packed_draft_mask(self) -> torch.Tensor | None:
        """Who sees whom among the new tokens of decodes, as bits: see ``pageant.plan.masks``.

        uint16 [R, m, words] where all decodes bring m tokens and are causal, or none is, without a
        draft mask: at an address that stays. Else [tokens, words], a request's rows from its
        query_start_loc on. None where no decode brings a token or, without a draft mask, several.
        """
        self.require_current()
        if self.buffers.packed is None:
            masks, decodes = self.planner.masks, self.split.num_decodes
            self.buffers.packed = masks.of(self.buffers.batch, decodes)
        return self.buffers.packed

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

    resolve = staticmethod(resolve_layer)
    quantizes_out = False  # whether kernels write quantised outputs by themselves

    def __init__(
        self,
        shape: Shape,
        limits: Limits,
        cache: CacheSpec,
        features: Features,
        options: Options,
        device: torch.device,
        chosen: Explanation,
    ) -> None:
        self.page_size, self.limits, self.features = cache.page_size, limits, features
        self.options, self.device = options, device
        self.shard = options.context_parallel or ALONE
        self.chosen = chosen
        if self.shard.heads == "split":  # kernels see the heads of all ranks
            shape = replace(shape, num_q_heads=shape.num_q_heads * self.shard.world)
        self.decode_threshold, self.shares = chosen.decode_threshold, chosen.shares_prefixes
        try:
            self.slots, self.workspace = self._allocate(shape, resolve(cache.format, shape.dtype))
        except (MemoryError, RuntimeError):  # numpy's error and torch's
            allowed = (
                "bounds whose buffers fit in memory; plan_slots and debug_splits multiply them"
            )
            raise bad("limits", limits, allowed) from None
        self.masks = PackedMasks(limits.max_requests, device)
        self.generation = 0

    def _allocate(self, shape: Shape, fmt: Format) -> tuple[list[PlanBuffers], Workspace]:
        """The plan slots, and the workspace they share, for kernels that see `shape`."""
        limits, features, options = self.limits, self.features, self.options
        workers = torch.get_num_threads()
        slots = [
            PlanBuffers(
                make_work(limits, features, options, workers),
                CopyMemory(limits, self.page_size, self.device),
            )
            for _ in range(options.plan_slots)
        ]
        workspace = make_workspace(
            shape,
            limits,
            features,
            options,
            self.device,
            self.decode_threshold,
            workers,
            shares=self.shares,
        )
        return slots, workspace

    def plan(self, batch: Batch) -> Plan:
        """Plan a batch into the oldest slot.

        Raises:
            ArgumentError: for any mistake in the batch; then no buffer was touched.
        """
        buffers = self.slots[(self.generation + 1) % len(self.slots)]
        self._write(buffers, batch)
        self.generation += 1
        buffers.generation = self.generation
        return Plan(batch, buffers, self.generation, self)

    def require(self, plan: Plan | None) -> Plan:
        """Raise unless the plan is one of ours, and its buffers still hold it; else return it."""
        if not isinstance(plan, Plan):
            raise bad("plan", type(plan).__name__, "a plan this Attention made")
        if plan.planner is not self:
            raise bad("plan", "another Attention's", "a plan this Attention made")
        plan.require_current()
        return plan

    def update(self, plan: Plan) -> None:
        """Plan again after the batch's tensors changed in place."""
        self.require(plan)
        self._write(plan.buffers, plan.batch)

    def _write(self, buffers: PlanBuffers, batch: Batch) -> None:
        """Inspect a batch, then write a slot."""
        self._fill(buffers, batch, *self.inspect(batch))

    def inspect(self, batch: Batch) -> tuple[Lens, PageUse]:
        """Check a batch; returns what was read of it: lengths, and the pages rows can see."""
        check_host(batch, self.limits, self.features, self.device)
        lens = lens_of(batch)
        check_values(batch, lens, self.limits, self.page_size, self.shard)
        widest = None if None in self.features.windows else max(filter(None, self.features.windows))
        table = batch.page_table.cpu().numpy()
        if batch.shared_prefix_lens is not None:
            hint = batch.shared_prefix_lens.cpu().numpy()
            check_hint(hint, table, lens.key_lens, self.page_size, self.shard)
        use = page_use(table, lens.query_lens, lens.key_lens, self.page_size, widest, self.shard)
        return lens, use

    def _fill(self, buffers: PlanBuffers, batch: Batch, lens: Lens, pages: PageUse) -> None:
        buffers.split = split_decodes_and_prefills(
            lens.starts, batch.num_tokens, batch.max_query_len, self.decode_threshold
        )
        buffers.real_tokens = buffers.known_tokens = int(lens.starts[-1])
        buffers.pages = pages
        held = self.shard.count(lens.key_lens)
        copy = buffers.memory.copy(batch, lens.starts, held, self.page_size)
        buffers.copy, buffers.packed = copy, None
        self._fill_work(buffers, batch, lens)

    def _fill_work(self, buffers: PlanBuffers, batch: Batch, lens: Lens) -> None:
        """Write what each phase has to do; the copy of the batch is made."""
        copy = buffers.batch
        if copy.draft_mask is None and isinstance(copy.causal, torch.Tensor):
            sees_all = ~copy.causal.cpu().numpy()
        else:
            sees_all = np.full(batch.num_requests, copy.draft_mask is not None or not copy.causal)
        decodes = buffers.split.num_decodes
        all_lens = (lens.query_lens, lens.key_lens, sees_all)
        decode = Lengths(0, decodes, *all_lens, shard=self.shard)
        prefill = Lengths(decodes, batch.num_requests, *all_lens, shard=self.shard)
        buffers.shared.clear()
        for window in self.features.windows:
            if self.options.invariant:
                fill_prefill(buffers.work["decode", window], decode, window)
            else:
                self._fill_decode(buffers, decode, window)
            fill_prefill(buffers.work["prefill", window], prefill, window)

    def _fill_decode(self, buffers: PlanBuffers, decode: Lengths, window: int | None) -> None:
        """One window's decodes, and the prefixes they share."""
        work, prefixes = buffers.work["decode", window], self._prefixes(buffers, decode, window)
        if prefixes:
            keys, parts = parts_of(prefixes, len(decode.key_lens))
            decode = replace(decode, shared_keys=keys, shared_parts=parts)
        fill_decode(work, decode, window, self.options.debug_splits)
        if prefixes:
            starts = np.concatenate([[0], np.cumsum(decode.query_lens)])
            buffers.shared[window] = share(
                prefixes, starts, decode.key_lens, work, self.decode_threshold
            )

    def _prefixes(
        self, buffers: PlanBuffers, decode: Lengths, window: int | None
    ) -> tuple[SharedPrefix, ...]:
        """Prefixes that decodes share; requests share none if a window hides their first key."""
        if not self.shares or decode.last < 2:
            return ()
        part, batch = slice(decode.last), buffers.batch
        query_lens, key_lens = decode.query_lens[part], decode.key_lens[part]
        cached = key_lens - query_lens
        if batch.draft_mask is None:
            cached = np.where(decode.sees_all[part], key_lens, cached)
        hidden = query_lens == 0
        if window is not None:
            hidden |= key_lens > window
        cached = self.shard.count(np.where(hidden, 0, np.maximum(cached, 0)))
        return shared_prefixes(batch.page_table.numpy()[part], cached, self.page_size)
