"""Keys that decodes share, on a GPU: found there, and planned there to be computed once.

The rows of a group are gathered to be one request over the common keys, planned and attended to as
others are. It has the number of the group's leader, and so its page table; requests of the numbers
between have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pageant.cache.formats import Format
from pageant.plan.batch import Batch
from pageant.plan.bound import Bound
from pageant.plan.buffers import PlanBuffers, Workspace
from pageant.plan.device_plan import LEAST_BLOCKS, DeviceMemory, DevicePlanner, DeviceWork
from pageant.plan.groups_on_device import Grouping, choose_depths, find_leaders, lay_out
from pageant.plan.on_device import ITEM, Cut, plan_step
from pageant.plan.prefix import SharedPrefix
from pageant.plan.tiles import Tile
from pageant.types import Shape

LEAST_SHARED = 256  # keys

Ready = tuple[Bound, tuple[Any, ...]]  # a kernel, and those of its arguments that stay


@dataclass(frozen=True, eq=False)
class GroupWork:
    """Gathered requests of one window, and where their results belong; R is the limits' most.

    Attributes:
        work: how the shared keys are cut.
        starts, lens: int32 [R + 1] and [R], rows and keys of each group, by its leader.
        skips: int32 [R], how many first keys of a request are computed for its group.
        shifts: int32 [R], what makes of the number of a request's token its place among gathered
            rows; of requests in no group it says nothing.
        tokens, positions: int32 [rows], token and position of each gathered row.
        prefixes: none that the host knows.
    """

    work: DeviceWork
    starts: torch.Tensor
    lens: torch.Tensor
    skips: torch.Tensor
    shifts: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    prefixes: tuple[SharedPrefix, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """What the arrays of groups have room for.

    Attributes:
        tile: of gathered rows.
        rows: gathered, of one window.
        items: of a work list.
        shares: of a work list.
        cut: how the shared keys are cut.
        grouping: how groups are found.
    """

    tile: Tile
    rows: int
    items: int
    shares: int
    cut: Cut
    grouping: Grouping


@dataclass
class GroupMemory:
    """Arrays of one plan slot that planning groups writes, for all windows; see `lay_out`.

    Attributes:
        depths, leaders, commons: int32 [windows, R].
        groups, rows: offsets, keys, skips and shifts; tokens and positions.
        work: views of one window each.
        no_window: int32 [1], 0.
        find, step: the kernels that find groups, and those that plan the requests' own keys and
            each window's shared ones, with their arguments of these arrays; empty before any plan.
    """

    depths: torch.Tensor
    leaders: torch.Tensor
    commons: torch.Tensor
    groups: tuple[torch.Tensor, ...]
    rows: tuple[torch.Tensor, ...]
    work: dict[int | None, GroupWork]
    no_window: torch.Tensor
    find: tuple[Ready, ...] = ()
    step: tuple[Ready, ...] = ()


class SharingPlanner(DevicePlanner):
    """Plans batches that bring a hint with five launches or more: groups, own keys, shared keys."""

    def _allocate(self, shape: Shape, fmt: Format) -> tuple[list[PlanBuffers], Workspace]:
        self._shape = shape
        slots, workspace = super()._allocate(shape, fmt)
        if not self.shares:
            return slots, workspace
        # The parts of one pass are joined before those of the other are written.
        sizes, (own, rows) = self._sizes, workspace.partial_lse.shape
        parts = (max(own, -(-2 * sizes.shares * sizes.tile.rows // rows)), rows)
        heads = (sizes.rows, shape.num_q_heads)
        return slots, replace(
            workspace,
            partial_out=self._new((*parts, shape.value_dim), torch.float32),
            partial_lse=self._new(parts, torch.float32),
            shared=Workspace(
                self._new((*heads, shape.value_dim), torch.float32),
                self._new(heads, torch.float32),
            ),
        )

    @cached_property
    def _sizes(self) -> GroupSizes:
        device, requests = self.chosen.device, self.limits.max_requests
        assert device is not None
        tile, rows = self.tiles["prefill"], requests * self.threshold
        units, shares = tile.units(self._shape), device.num_sms * tile.shares
        block = max(tile.block, self.tiles["decode"].block)
        return GroupSizes(
            tile=tile,
            rows=rows,
            items=(-(-rows // tile.tokens) + requests // 2) * units + shares,
            shares=shares,
            cut=Cut(
                tokens=tile.tokens,
                block=tile.block,
                units=units,
                world=1,
                splits=0,
                least=LEAST_BLOCKS,
            ),
            grouping=Grouping.of(
                self.page_size, max(LEAST_SHARED, block), self.limits.max_seq_len, block
            ),
        )

    def new_slot(self) -> PlanBuffers:
        """Arrays for one more plan."""
        slot = super().new_slot()
        if self.shares:
            slot.memory.groups = self._new_groups()
        return slot

    def _new_groups(self) -> GroupMemory:
        sizes, windows, requests = self._sizes, self.features.windows, self.limits.max_requests

        def new(*size: int) -> torch.Tensor:
            return self._new((len(windows), *size), torch.int32)

        groups = (new(requests + 1), new(requests), new(requests), new(requests))
        rows = (new(sizes.rows), new(sizes.rows))
        lists = (new(sizes.items, ITEM.value), new(sizes.shares, 2), new(sizes.shares))
        work = {}
        for index, window in enumerate(windows):
            items, shares, arrivals = (array[index] for array in lists)
            starts, lens, skips, shifts = (array[index] for array in groups)
            tokens, positions = (array[index] for array in rows)
            own = DeviceWork(sizes.tile, items, shares, arrivals, sizes.rows)
            work[window] = GroupWork(own, starts, lens, skips, shifts, tokens, positions)
        found = (new(requests), new(requests), new(requests))
        return GroupMemory(*found, groups, rows, work, self._new((1,), torch.int32).zero_())

    def _step(self, buffers: PlanBuffers, batch: Batch) -> None:
        buffers.shared.clear()
        if not self.shares or batch.shared_prefix_lens is None or batch.num_requests == 0:
            super()._step(buffers, batch)
            return
        self._plan_groups(buffers.memory, batch)
        buffers.shared.update(buffers.memory.groups.work)

    def _plan_groups(self, memory: DeviceMemory, batch: Batch) -> None:
        """Find the groups; then plan each request's own keys, and those of the groups."""
        groups, table, count = memory.groups, batch.page_table, batch.num_requests
        lengths = batch.query_start_loc, batch.key_lens
        bounds = (count, batch.num_tokens, self.limits.max_seq_len)
        tables = (*lengths, table, table.stride(0), table.shape[1])
        if not groups.step:
            self._bind_groups(memory, tables, bounds)
        (choose, depths), (find, found), (place, places) = groups.find
        raw = choose.raw
        lengths, tables = raw(lengths), raw(tables)
        grid = (count, len(groups.work), 1)
        choose(grid, *tables, *bounds, *depths)
        find(grid, *tables, *bounds, *found)
        place(grid, *lengths, *bounds, *places)
        (own, args), *steps = groups.step
        own(self._grid, *lengths, *bounds, *args)
        bounds = (count, self._sizes.rows, self.limits.max_seq_len)
        for (step, args), work in zip(steps, groups.work.values(), strict=True):
            step((self._sizes.shares, 1, 1), raw(work.starts), raw(work.lens), *bounds, *args)

    def _bind_groups(
        self, memory: DeviceMemory, tables: tuple[Any, ...], bounds: tuple[int, ...]
    ) -> None:
        """Compile for what a batch gives."""
        groups, sizes, requests = memory.groups, self._sizes, self.limits.max_requests
        depths = (self._windows, self.threshold, groups.depths)
        found = (groups.leaders, groups.commons)
        lengths = (*tables[:2], *bounds)
        groups.find = tuple(
            self._ready(kernel, (*given, *bounds), (*args, sizes.grouping), num_warps=4)
            for kernel, given, args in (
                (choose_depths, tables, (*depths, requests)),
                (find_leaders, tables, (*depths, *found, requests)),
                (lay_out, tables[:2], (*found, groups.groups, groups.rows, requests, sizes.rows)),
            )
        )
        bounds = (bounds[0], sizes.rows, bounds[2])
        groups.step = (
            self._bind(memory, lengths, (groups.groups[2], requests)),
            *[
                self._ready(
                    plan_step,
                    (each.starts, each.lens, *bounds),
                    (
                        *(None, None, each.work.items, each.work.shares, each.work.arrivals),
                        *(groups.no_window, sizes.rows, (0, 1), sizes.items, None, sizes.cut),
                    ),
                    num_warps=1,
                )
                for each in groups.work.values()
            ],
        )

    def _ready(
        self, kernel: Any, given: tuple[Any, ...], args: tuple[Any, ...], num_warps: int
    ) -> Ready:
        bound = Bound(kernel, (*given, *args), self.device, num_warps=num_warps)
        return bound, bound.raw(args)
