"""Plans for kernels of another library, which plan by themselves, from lengths on the host."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pageant.cache.formats import Format
from pageant.plan.batch import Batch
from pageant.plan.buffers import PlanBuffers, Workspace
from pageant.plan.build import Planner
from pageant.plan.copies import CopyMemory, DeviceWrites
from pageant.plan.inputs import resolve_layer
from pageant.plan.masks import PackedMasks
from pageant.plan.mistakes import Lens
from pageant.select.needs import NVFP4
from pageant.select.row import PHASES
from pageant.types import Shape, bad

IntArray = np.ndarray[Any, Any]
NOTHING: IntArray = np.zeros(1, np.int64)

# What vLLM's FlashInfer backend gives FlashInfer to work with.
ROOM_BYTES = 394 << 20
INVARIANT_ROOM_BYTES = 2 << 30


@dataclass(eq=False, slots=True, kw_only=True)
class HostWork:
    """One phase's requests, whatever the window, for kernels that plan by themselves.

    Attributes:
        room: uint8, scratch of the kernel that serves the phase; zeroed when it was made.
        query_dtype: the type that queries should be given to it in.
        family: of the device.
        invariant: whether invariant mode is asked for.
        masks: packed draft masks.
        first, last: the phase's requests.
        starts, key_lens: int64 [R + 1] and [R], of the whole batch.
        causal: bool [R], whether a request's rows see no later key.
        step: what kernels made for this step; emptied when the slot is planned again.
        kept: what they keep from step to step.
    """

    room: torch.Tensor
    query_dtype: torch.dtype
    family: str
    invariant: bool
    masks: PackedMasks
    first: int = 0
    last: int = 0
    starts: IntArray = field(default_factory=lambda: NOTHING)
    key_lens: IntArray = field(default_factory=lambda: NOTHING[:0])
    causal: IntArray = field(default_factory=lambda: NOTHING[:0])
    step: dict[Hashable, Any] = field(default_factory=dict)
    kept: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        """Whether any of the requests brings a token."""
        return bool(self.starts[self.last] > self.starts[self.first])


class HostPlanner(Planner):
    """Plans batches whose lengths the host reads: from the device, where it waits for them."""

    resolve = staticmethod(partial(resolve_layer, on_device=True))
    quantizes_out = True

    def _allocate(self, shape: Shape, fmt: Format) -> tuple[list[PlanBuffers], Workspace]:
        self._refuse(fmt)
        limits, ranks = self.limits, self.options.context_parallel
        size = max(ROOM_BYTES, limits.max_tokens * shape.num_q_heads * shape.value_dim * 16)
        size = INVARIANT_ROOM_BYTES if self.options.invariant else size
        tokens = 0 if ranks is None or ranks.group is None else limits.max_tokens
        with torch.inference_mode(False):  # else only inference mode could write to it
            names = {row.name for row in self.chosen.rows.values()}
            rooms = {
                name: torch.zeros(size, dtype=torch.uint8, device=self.device) for name in names
            }
            none = torch.empty(0, device=self.device)
            finished = none.new_empty(tokens, shape.num_q_heads, shape.value_dim)
        workspace = Workspace(none, none, finished, scratch=tuple(rooms.values()))
        masks = PackedMasks(limits.max_requests, self.device)
        return [self._new_slot(rooms, masks) for _ in range(self.options.plan_slots)], workspace

    def _new_slot(self, rooms: dict[str, torch.Tensor], masks: PackedMasks) -> PlanBuffers:
        device = self.chosen.device
        assert device is not None
        work: dict[tuple[str, int | None], HostWork] = {}
        for phase in PHASES:
            made = HostWork(
                room=rooms[self.chosen.rows[phase].name],
                query_dtype=getattr(torch, self.chosen.query_dtypes[phase]),
                family=device.family,
                invariant=self.options.invariant,
                masks=masks,
            )
            work.update(((phase, window), made) for window in self.features.windows)
        return PlanBuffers(work, CopyMemory(self.limits, self.page_size, self.device))

    def _refuse(self, fmt: Format) -> None:
        """Raise for what the table lets through and FlashInfer cannot answer rightly."""
        features, sharded = self.features, self.shard.world > 1
        kernels = f"kernels {self.options.kernels!r}"
        tables = self.chosen.rows["decode"].name == "flashinfer.trtllm-gen"
        if features.alibi and (features.soft_cap or features.lse or sharded):
            allowed = f"False with soft_cap, with lse and on several ranks, for {kernels}"
            raise bad("features.alibi", True, allowed)
        if sharded and tables and features.windows != (None,):
            allowed = f"(None,) on several ranks, for {kernels}: windows would be counted in the "
            raise bad("features.windows", features.windows, allowed + "rank's own keys")
        if fmt.name in NVFP4 and sharded:
            allowed = f"another format on several ranks, for {kernels}: its two kernels want V's "
            raise bad("cache.format", fmt.name, allowed + "block scales in different orders")
        order = self.chosen.cache.v_scale_order
        if fmt.name in NVFP4 and order != "swizzled":
            raise bad("cache.v_scale_order", order, f"swizzled, for {kernels}")

    def _fill_work(self, buffers: PlanBuffers, batch: Batch, lens: Lens) -> None:
        copy, decodes = buffers.batch, buffers.split.num_decodes
        if batch.slot_mapping is not None:
            slots = batch.slot_mapping
            buffers.copy = replace(copy, writes=DeviceWrites(slots, slots.shape[0]))
        given = copy.causal
        causal = given.cpu().numpy() if isinstance(given, torch.Tensor) else given
        bounds: dict[str, tuple[int, int]] = {
            "decode": (0, decodes),
            "prefill": (decodes, batch.num_requests),
        }
        for (phase, _), work in buffers.work.items():
            work.first, work.last = bounds[phase]
            work.starts, work.key_lens = lens.starts, lens.key_lens
            work.causal = np.broadcast_to(causal, lens.key_lens.shape)
            work.step.clear()
