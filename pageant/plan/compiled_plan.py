"""Plans of ordinary batches on the CPU: one compiled call, in a tenth of the time.

Ordinary is what most steps bring. Whatever is rarer, mistakes among it, is left to ``build.py``,
which says what is wrong; of an ordinary batch both make the same plan, to the last number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pageant.plan import prefix
from pageant.plan.batch import Batch
from pageant.plan.buffers import PlanBuffers
from pageant.plan.build import Planner
from pageant.plan.copies import BatchCopy, Views
from pageant.plan.loops import FACTS, plan_step
from pageant.plan.pages import PageUse, WriteIndex
from pageant.plan.split import Split
from pageant.plan.work import KEY_TILE, MIN_SHARE, QUERY_TILE, WorkList

NO_LIMIT = 1 << 62


@dataclass
class _Room:
    """Where batches of one size go.

    Attributes:
        views: where the copy lies.
        known: int64, what `plan_step` knows.
        copy: the last batch's; its tensors are the views.
        kind: how many slots were written, and whether it was causal.
    """

    views: Views
    known: np.ndarray[Any, Any]
    copy: BatchCopy | None = None
    kind: tuple[int, bool] | None = None


class CompiledPlanner(Planner):
    """Plans on a CPU whose kernels are compiled by numba too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._widest = -(-self.limits.max_seq_len // self.page_size)
        self._rules: tuple[prefix.Rule, ...] = ()
        self._worth = NO_LIMIT
        self._rooms: dict[int, _Room] = {}  # by a slot's id
        self._never = self.shard.world > 1 or self.options.debug_splits is not None

    def _write(self, buffers: PlanBuffers, batch: Batch) -> None:
        if not self.fill_ordinary(buffers, batch):
            super()._write(buffers, batch)

    def fill_ordinary(self, buffers: PlanBuffers, batch: Batch) -> bool:
        """Plan into a slot; False, and nothing written, if the batch is out of the ordinary."""
        if self._never or not self._is_ordinary(batch):
            return False
        requests, tokens, most = batch.num_requests, batch.num_tokens, batch.max_query_len
        slots = batch.slot_mapping
        assert slots is not None
        if self.shares and self._rules is not prefix.RULES:
            self._rules, self._worth = prefix.RULES, min(rule.tokens for rule in prefix.RULES)
        try:
            arrays = (
                batch.query_start_loc.numpy(),
                batch.seq_lens.numpy(),
                batch.page_table.numpy(),
                slots.numpy(),
            )
            table_width = arrays[2].shape[1]
            if table_width > 1 and arrays[2].strides[1] != arrays[2].itemsize:
                return False
            size = requests, min(table_width, self._widest), arrays[3].shape[0]
            room = self._rooms.get(id(buffers))
            if room is None or room.views.size != size:
                room = self._rooms[id(buffers)] = self._new_room(buffers, size)
            known = room.known
            bounds = requests, tokens, most, batch.max_seq_len
            if not plan_step(*arrays, *bounds, not batch.causal, self._worth, known):
                return False
        except (AttributeError, RuntimeError, TypeError, IndexError):  # no such tensors
            return False
        page, request, written, slot, decodes, real, decode_tokens = known[:FACTS].tolist()
        kind = written, bool(batch.causal)
        if room.copy is None or room.kind != kind:
            room.copy, room.kind = _copied(room.views, *kind), kind
        assert isinstance(room.copy.writes, WriteIndex)
        room.copy.writes.largest_slot = slot
        buffers.copy = room.copy
        buffers.packed, buffers.pages = None, PageUse(page, request)
        buffers.real_tokens = buffers.known_tokens = real
        prefills = requests - decodes
        decode_tokens = decode_tokens if prefills else tokens
        buffers.split = Split(decodes, prefills, decode_tokens, tokens - decode_tokens)
        buffers.shared.clear()
        return True

    def _is_ordinary(self, batch: Batch) -> bool:
        """Whether the bounds are right, and nothing rarer than `causal` is given."""
        if type(batch) is not Batch:
            return False
        limits, causal = self.limits, batch.causal
        return (
            type(batch.num_requests) is type(batch.num_tokens) is int
            and type(batch.max_query_len) is type(batch.max_seq_len) is int
            and 0 <= batch.num_requests <= limits.max_requests
            and 0 <= batch.num_tokens <= limits.max_tokens
            and batch.max_query_len >= 0
            and 0 <= batch.max_seq_len <= limits.max_seq_len
            and (causal is True or (causal is False and self.features.non_causal))
            and batch.slot_mapping is not None
            and batch.draft_mask is batch.draft_parents is batch.encoder_seq_lens is None
            and batch.query_start_loc_cpu is batch.seq_lens_cpu is batch.shared_prefix_lens is None
        )

    def _new_room(self, buffers: PlanBuffers, size: tuple[int, int, int]) -> _Room:
        """Where batches of so many requests, pages of each, and slots go; see ``loops.py``."""
        views, windows = buffers.memory.views(*size), self.features.windows
        addresses = [x.data_ptr() for x in (*views.tensors, views.slots[0])]
        for window in windows:
            decode: WorkList = buffers.work["decode", window]
            prefill: WorkList = buffers.work["prefill", window]
            for work in (decode, prefill):
                lists = (work.items, work.share_start, work.groups, work.counts)
                kept = lists if work is decode else (*lists[:2], lists[3])
                addresses += [array.ctypes.data for array in kept]
        keys, workers = self.limits.max_cached_tokens, len(decode.share_start) - 1
        fixed = (
            *(self.page_size, self.decode_threshold, NO_LIMIT if keys is None else keys),
            *(0 if None in windows else max(filter(None, windows)), self.options.invariant),
            *(workers, KEY_TILE, MIN_SHARE, QUERY_TILE, size[1], len(windows)),
        )
        given = (*[-1] * FACTS, *fixed, *(window or 0 for window in windows), *addresses)
        return _Room(views, np.array(given, np.int64))


def _copied(views: Views, written: int, causal: bool) -> BatchCopy:
    """The copy of a batch that writes so many of its slots."""
    (starts, lens, table), (pages, rows, tokens) = views.tensors, views.slots
    count = views.size[2]
    everyone = written == count > 0
    places = (None if everyone else tokens[:written], pages[:written], rows[:written])
    return BatchCopy(starts, lens, table, causal, None, WriteIndex(*places, count, -1))
