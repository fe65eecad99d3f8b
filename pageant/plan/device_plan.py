"""Plans made on a GPU: the host checks what it sees and launches; nothing is read back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pageant.cache.formats import Format
from pageant.plan.batch import Batch
from pageant.plan.bound import Bound
from pageant.plan.buffers import PlanBuffers, Workspace
from pageant.plan.build import Plan, Planner
from pageant.plan.copies import BatchCopy, DeviceWrites
from pageant.plan.hopper_tiles import tiles_for
from pageant.plan.inputs import resolve_layer
from pageant.plan.mistakes import check_host, traits_of
from pageant.plan.on_device import ITEM, Cut, draw_trees, plan_step
from pageant.plan.pages import PageUse
from pageant.plan.tiles import Tile
from pageant.types import Shape

LEAST_BLOCKS = 2  # of a share
MOST_RIGHT = 4096  # kinds of batches remembered as having no mistake
NO_PAGES = PageUse()
TREE_COLUMNS = 128  # of a draft mask, drawn at a time


@dataclass(eq=False, slots=True)
class DeviceWork:
    """Work of one phase for one window; see `pageant.plan.on_device.plan_step`.

    Attributes:
        tile: how large its tiles are.
        items, shares, arrivals: int32 [capacity, 7], [G, 2] and [G].
        threshold: most new tokens of a decode.
        num_tokens: of the batch, with padding.
        has_work: whether the host's bounds leave anything to do.
    """

    tile: Tile
    items: torch.Tensor
    shares: torch.Tensor
    arrivals: torch.Tensor
    threshold: int
    num_tokens: int = 0
    has_work: bool = True


@dataclass
class DeviceMemory:
    """Arrays of fixed address that planning writes, for all windows; see `plan_step`.

    Attributes:
        starts, lens: int32 [max_requests + 1] and [max_requests].
        items, shares, arrivals: int32 [windows, ..].
        rows: views of starts and lens, as long as the batch.
        tree: bool, a draft mask drawn from parents; moves when a larger one comes.
        trees: `draw_trees`, bound when first needed.
        groups: of decodes that share keys, where any may; see `pageant.plan.device_groups`.
        step, args: `plan_step`, bound at the first plan, and what it is given of these arrays.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    items: torch.Tensor
    shares: torch.Tensor
    arrivals: torch.Tensor
    rows: tuple[torch.Tensor, torch.Tensor]
    tree: torch.Tensor | None = None
    trees: Bound | None = None
    groups: Any = None
    step: Bound | None = None
    args: tuple[Any, ...] = ()


class DevicePlanner(Planner):
    """Plans batches with one launch, or with two where drafts are trees."""

    resolve = staticmethod(partial(resolve_layer, on_device=True))

    def _allocate(self, shape: Shape, fmt: Format) -> tuple[list[PlanBuffers], Workspace]:
        device = self.chosen.device
        assert device is not None
        limits, options = self.limits, self.options
        self.threshold = 0 if options.invariant else self.decode_threshold
        tiles = self.chosen.rows["decode"].tiles
        self.tiles = tiles_for(tiles, shape, fmt, device, self.decode_threshold)
        tile = self.tiles["decode"]
        self.units = tile.units(shape)
        requests = min(limits.max_requests, limits.max_tokens)
        most = requests * -(-self.decode_threshold // tile.tokens) * self.units
        shares = device.num_sms * tile.shares
        if options.debug_splits is not None:
            shares = max(1, most) * options.debug_splits
        self.capacity = most + shares
        self._right: set[Hashable] = set()
        windows = self.features.windows
        self._grid = (shares, len(windows), 1)
        self._windows = self._new((len(windows),), torch.int32)
        self._windows.copy_(torch.tensor([window or 0 for window in windows], dtype=torch.int32))
        slots = [self.new_slot() for _ in range(options.plan_slots)]
        finishes = any(name != "model" for name in self.features.out_formats)
        ranks = options.context_parallel
        finishes |= ranks is not None and ranks.group is not None
        rows = (2 * shares, tile.rows)
        return slots, Workspace(
            self._new((*rows, shape.value_dim), torch.float32),
            self._new(rows, torch.float32),
            self._new(
                (limits.max_tokens * finishes, shape.num_q_heads, shape.value_dim), torch.float32
            ),
        )

    def new_slot(self) -> PlanBuffers:
        """Arrays for one more plan."""
        windows, shares = self.features.windows, self._grid[0]
        starts = self._new((self.limits.max_requests + 1,), torch.int32)
        lens = self._new((self.limits.max_requests,), torch.int32)
        memory = DeviceMemory(
            starts=starts,
            lens=lens,
            rows=(starts, lens),
            items=self._new((len(windows), self.capacity, ITEM.value), torch.int32),
            shares=self._new((len(windows), shares, 2), torch.int32),
            arrivals=self._new((len(windows), shares), torch.int32),
        )
        work: dict[tuple[str, int | None], DeviceWork] = {}
        for index, window in enumerate(windows):
            arrays = (memory.items[index], memory.shares[index], memory.arrivals[index])
            for phase, tile in self.tiles.items():
                work[phase, window] = DeviceWork(tile, *arrays, self.threshold)
        return PlanBuffers(work, memory)

    def _new(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # else only inference mode could write to it
            return torch.empty(size, dtype=dtype, device=self.device)

    def plan(self, batch: Batch) -> Plan:
        """Plan a batch into the oldest slot; see `Planner.plan`."""
        self.check(batch)
        self.generation += 1
        buffers = self.slots[self.generation % len(self.slots)]
        buffers.generation = self.generation
        self._launch(buffers, batch)
        return Plan(batch, buffers, self.generation, self)

    def plan_apart(self, buffers: PlanBuffers, batch: Batch) -> Plan:
        """Plan a batch known to be right into a slot of the caller's; see ``new_slot``."""
        self._launch(buffers, batch)
        return Plan(batch, buffers, buffers.generation, self)

    def update(self, plan: Plan) -> None:
        """Plan again after the batch's tensors changed in place."""
        self.require(plan)
        self.check(plan.batch)
        self._launch(plan.buffers, plan.batch)

    def check(self, batch: Batch) -> None:
        """Raise for mistakes in a batch; with validate, values on the device count."""
        if self.options.validate:
            self.inspect(batch)
        elif (traits := traits_of(batch)) not in self._right:
            check_host(batch, self.limits, self.features, self.device)
            if len(self._right) >= MOST_RIGHT:
                self._right.clear()
            if traits is not None:
                self._right.add(traits)

    def _launch(self, buffers: PlanBuffers, batch: Batch) -> None:
        memory, requests, tokens = buffers.memory, batch.num_requests, batch.num_tokens
        self._step(buffers, batch)
        decodes = batch.max_query_len <= self.threshold
        for (phase, _), work in buffers.work.items():
            has_work = tokens > 0 and requests > 0
            has_work &= self.threshold > 0 if phase == "decode" else not decodes
            work.num_tokens, work.has_work = tokens, has_work
        buffers.real_tokens, buffers.pages = tokens, NO_PAGES
        host = batch.query_start_loc_cpu
        sure = not self.options.adaptive
        buffers.known_tokens = int(host[-1]) if host is not None and sure else 0
        slots = batch.slot_mapping
        buffers.packed = None
        if len(memory.rows[1]) != requests:
            memory.rows = memory.starts[: requests + 1], memory.lens[:requests]
        buffers.copy = BatchCopy(
            memory.rows[0],
            memory.rows[1],
            batch.page_table,
            batch.causal if batch.encoder_seq_lens is None else False,
            self._mask(buffers.memory, batch),
            None if slots is None else DeviceWrites(slots, slots.shape[0]),
        )

    def _step(self, buffers: PlanBuffers, batch: Batch) -> None:
        """Launch the planning kernel."""
        memory, starts, lens = buffers.memory, batch.query_start_loc, batch.key_lens
        given = batch.num_requests, batch.num_tokens, self.limits.max_seq_len
        if memory.step is None:
            memory.step, memory.args = self._bind(memory, (starts, lens, *given))
        raw = memory.step.raw
        memory.step(self._grid, raw(starts), raw(lens), *given, *memory.args)

    def _bind(
        self, memory: DeviceMemory, given: tuple[Any, ...], skips: Any = None
    ) -> tuple[Bound, tuple[Any, ...]]:
        """The planning kernel, compiled for what a batch gives, and one slot's arguments of it."""
        tile = self.tiles["decode"]
        args = (
            memory.starts,
            memory.lens,
            memory.items,
            memory.shares,
            memory.arrivals,
            self._windows,
            self.threshold,
            (self.shard.rank, self.shard.interleave),
            self.capacity,
            skips,
            Cut(
                tokens=tile.tokens,
                block=tile.block,
                units=self.units,
                world=self.shard.world,
                splits=self.options.debug_splits or 0,
                least=LEAST_BLOCKS,
                skips=skips is not None,
            ),
        )
        step = Bound(plan_step, (*given, *args), self.device, num_warps=1)
        return step, step.raw(args)

    def _mask(self, memory: DeviceMemory, batch: Batch) -> torch.Tensor | None:
        """The draft mask, drawn first if the batch has parents."""
        if batch.draft_parents is None or batch.num_requests == 0:
            return batch.draft_mask
        rows, width = batch.draft_parents.shape[0], batch.max_query_len
        if memory.tree is None or memory.tree.numel() < rows * width:
            memory.tree = self._new((rows * width,), torch.bool)
        mask = memory.tree[: rows * width].view(rows, width)
        if mask.numel():
            given = (batch.draft_parents, memory.starts, mask.view(torch.uint8), width, width)
            if memory.trees is None:
                memory.trees = Bound(draw_trees, (*given, TREE_COLUMNS), self.device)
            memory.trees((batch.num_requests, width, 1), *memory.trees.raw(given), TREE_COLUMNS)
        return mask
