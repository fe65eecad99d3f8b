"""A decode handed on to a kernel of other tiles, where the chosen kernel cannot compute it.

Rows are chosen before any cache is seen, and a wrapped cache may have any strides; nor does a plan
know, when an Attention is built, which requests will share keys. The kernel that takes such a
decode over must plan it again: on the device, in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pageant.device import Device
from pageant.kernels.call import AttentionCall
from pageant.plan.bound import Bound
from pageant.plan.device_groups import GroupWork
from pageant.plan.device_plan import LEAST_BLOCKS, DeviceWork
from pageant.plan.on_device import ITEM, Cut, plan_step
from pageant.plan.tiles import tile_for
from pageant.types import Shape


class Replanned:
    """Work of a decode planned again, and room for its partial results.

    Args:
        call: one such call; of others, only addresses and the number of requests differ.
        requests: at most.
        run: the kernel that takes over, of tiles as ``tile_for`` sizes them.
        groups: of requests that share keys, of which `run` then takes care; or None.
    """

    def __init__(
        self,
        call: AttentionCall,
        requests: int,
        run: Callable[[AttentionCall], None],
        groups: GroupWork | None = None,
    ) -> None:
        device, cache = Device.detect(call.q.device), call.cache
        shape = Shape(
            num_q_heads=call.q.shape[1],
            num_kv_heads=cache.k.shape[2],
            head_dim=call.q.shape[2],
            v_head_dim=call.out.shape[2],
            dtype=call.q.dtype,
        )
        threshold, shard = call.work.threshold, call.shard
        tile = tile_for("decode", shape, cache.format, device, threshold)
        units, shares = tile.units(shape), device.num_sms * tile.shares
        capacity = requests * -(-threshold // tile.tokens) * units + shares

        def new(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=call.q.device)

        self.run, self.grid = run, (shares, 1, 1)
        self.work = DeviceWork(
            tile, new(capacity, ITEM.value), new(shares, 2), new(shares), threshold
        )
        rows = 2 * shares * tile.rows
        if groups is not None:  # the parts of one pass are joined before those of the other
            rows = max(rows, 2 * groups.work.shares.shape[0] * groups.work.tile.rows)
        parts = (-(-rows // tile.rows), tile.rows)
        self.workspace = replace(
            call.workspace,
            partial_out=new(*parts, shape.value_dim, dtype=torch.float32),
            partial_lse=new(*parts, dtype=torch.float32),
        )
        window = new(1).fill_(call.params.window or 0)
        lists = (self.work.items, self.work.shares, self.work.arrivals)
        cut = Cut(
            tokens=tile.tokens,
            block=tile.block,
            units=units,
            world=shard.world,
            splits=0,
            least=LEAST_BLOCKS,
            skips=groups is not None,
        )
        skips = None if groups is None else (groups.skips, 0)
        args = (window, threshold, (shard.rank, shard.interleave), capacity, skips, cut)
        self.args = (None, None, *lists, *args)  # lengths are bounded already, and not copied
        given = self._given(call)
        self.plan = Bound(plan_step, (*given, *self.args), call.q.device, num_warps=1)
        self.raw = self.plan.raw(self.args)

    def __call__(self, call: AttentionCall) -> None:
        """Plan, and run."""
        self.plan(self.grid, *self.plan.raw(self._given(call)), *self.raw)
        self.run(replace(call, work=self.work, workspace=self.workspace))

    def _given(self, call: AttentionCall) -> tuple[torch.Tensor | int, ...]:
        """Lengths, and bounds that keep them."""
        most = 2**31 - 1
        return call.query_start_loc, call.key_lens, len(call.key_lens), most, most
