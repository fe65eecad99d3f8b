"""Keys that decodes share, on a GPU: found there, and planned there to be computed once.

The rows of a group are gathered to be one request over the common keys, planned and attended to as
others are. It has the number of the group's leader, and so its page table; requests of the numbers
between have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pageant.cache.formats import Format
from pageant.plan.batch import Batch
from pageant.plan.bound import Bound
from pageant.plan.buffers import PlanBuffers, Workspace
from pageant.plan.device_plan import LEAST_BLOCKS, DevicePlanner, DeviceWork
from pageant.plan.groups_on_device import Grouping, choose_depths, find_leaders, lay_out
from pageant.plan.on_device import ITEM, Cut, plan_step
from pageant.plan.prefix import SharedPrefix
from pageant.types import Shape

LEAST_SHARED = 256  # keys


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


class SharingPlanner(DevicePlanner):
    """Plans batches that bring a hint with five launches or more: groups, own keys, shared keys."""

    def _allocate(self, shape: Shape, fmt: Format) -> tuple[list[PlanBuffers], Workspace]:
        slots, workspace = super()._allocate(shape, fmt)
        if not self.shares:
            return slots, workspace
        tile, decode = self.tiles["prefill"], self.tiles["decode"]
        device, limits = self.chosen.device, self.limits
        assert device is not None
        self._group_shares = device.num_sms * tile.shares
        self._room = limits.max_requests * self.threshold
        units = tile.units(shape)
        tiles = -(-self._room // tile.tokens) + limits.max_requests // 2
        self._group_capacity = tiles * units + self._group_shares
        block = max(tile.block, decode.block)
        least = max(LEAST_SHARED, block)
        self._grouping = Grouping.of(self.page_size, least, limits.max_seq_len, block)
        self._cut = Cut(
            tokens=tile.tokens, block=tile.block, units=units, world=1, splits=0, least=LEAST_BLOCKS
        )
        self._no_window = self._new((1,), torch.int32).zero_()
        for slot in slots:
            slot.memory.groups = SlotGroups(self)
        rows = max(workspace.partial_lse.numel(), 2 * self._group_shares * tile.rows)
        heads = (self._room, shape.num_q_heads)
        return slots, replace(
            workspace,
            partial_out=self._new((rows, shape.value_dim), torch.float32),
            partial_lse=self._new((rows,), torch.float32),
            shared=Workspace(
                self._new((*heads, shape.value_dim), torch.float32),
                self._new(heads, torch.float32),
            ),
        )

    def _step(self, buffers: PlanBuffers, batch: Batch) -> None:
        buffers.shared.clear()
        if not self.shares or batch.shared_prefix_lens is None or batch.num_requests == 0:
            super()._step(buffers, batch)
            return
        buffers.memory.groups.plan(buffers, batch)
        buffers.shared.update(buffers.memory.groups.work)


class SlotGroups:
    """The groups of one plan slot, in arrays of fixed address.

    Attributes:
        work: of each window.
    """

    def __init__(self, planner: SharingPlanner) -> None:
        self._planner = planner
        windows, requests = planner.features.windows, planner.limits.max_requests
        count, shares = len(windows), planner._group_shares

        def new(*size: int) -> torch.Tensor:
            return planner._new((count, *size), torch.int32)

        self._depths, self._leaders, self._commons = new(requests), new(requests), new(requests)
        self._groups = (new(requests + 1), new(requests), new(requests), new(requests))
        self._rows = (new(planner._room), new(planner._room))
        lists = (new(planner._group_capacity, ITEM.value), new(shares, 2), new(shares))
        self.work: dict[int | None, GroupWork] = {}
        for index, window in enumerate(windows):
            items, share, arrivals = (array[index] for array in lists)
            work = DeviceWork(planner.tiles["prefill"], items, share, arrivals, planner._room)
            starts, lens, skips, shifts = (array[index] for array in self._groups)
            tokens, positions = (array[index] for array in self._rows)
            self.work[window] = GroupWork(work, starts, lens, skips, shifts, tokens, positions)
        self._finders: list[tuple[Bound, tuple[Any, ...]]] = []
        self._steps: list[tuple[Bound, tuple[Any, ...]]] = []

    def plan(self, buffers: PlanBuffers, batch: Batch) -> None:
        """Find the groups; then plan each request's own keys, and those of the groups."""
        planner, table = self._planner, batch.page_table
        lengths = batch.query_start_loc, batch.key_lens
        bounds = (batch.num_requests, batch.num_tokens, planner.limits.max_seq_len)
        tables = (*lengths, table, table.stride(0), table.shape[1])
        if not self._steps:
            self._bind_finders((*tables, *bounds), (*lengths, *bounds))
            self._bind_steps(buffers, (*lengths, *bounds))
        raw = self._steps[0][0].raw
        grid = (batch.num_requests, len(self.work), 1)
        (choose, depths), (find, found), (place, places) = self._finders
        choose(grid, *raw(tables), *bounds, *depths)
        find(grid, *raw(tables), *bounds, *found)
        place(grid, *raw(lengths), *bounds, *places)
        own, args = self._steps[0]
        own(planner._grid, *raw(lengths), *bounds, *args)
        room = (batch.num_requests, planner._room, planner.limits.max_seq_len)
        for (step, args), groups in zip(self._steps[1:], self.work.values(), strict=True):
            grid = (planner._group_shares, 1, 1)
            step(grid, raw(groups.starts), raw(groups.lens), *room, *args)

    def _bind_finders(self, tables: tuple[Any, ...], lengths: tuple[Any, ...]) -> None:
        planner = self._planner
        requests, grouping = planner.limits.max_requests, planner._grouping
        depths = (planner._windows, planner.threshold, self._depths)
        found = (self._leaders, self._commons)
        rows = (self._groups, self._rows, requests, planner._room)
        for kernel, given, args in (
            (choose_depths, tables, (*depths, requests, grouping)),
            (find_leaders, tables, (*depths, *found, requests, grouping)),
            (lay_out, lengths, (*found, *rows, grouping)),
        ):
            find = Bound(kernel, (*given, *args), planner.device, num_warps=4)
            self._finders.append((find, find.raw(args)))

    def _bind_steps(self, buffers: PlanBuffers, given: tuple[Any, ...]) -> None:
        planner = self._planner
        skips = (self._groups[2], planner.limits.max_requests)
        self._steps.append(planner._bind(buffers.memory, given, skips))
        room = (given[2], planner._room, planner.limits.max_seq_len)
        for groups in self.work.values():
            work = groups.work
            args = (
                *(None, None, work.items, work.shares, work.arrivals),
                *(planner._no_window, planner._room, (0, 1), planner._group_capacity, None),
                planner._cut,
            )
            arrays = (groups.starts, groups.lens, *room)
            step = Bound(plan_step, (*arrays, *args), planner.device, num_warps=1)
            self._steps.append((step, step.raw(args)))
