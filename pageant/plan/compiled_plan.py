"""Plans of ordinary batches on the CPU: a few compiled loops, in a tenth of the time.

Ordinary is what most steps bring. Whatever is rarer, mistakes among it, is left to ``build.py``,
which says what is wrong; of an ordinary batch both make the same plan, to the last number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pageant.plan import prefix
from pageant.plan.batch import Batch
from pageant.plan.buffers import PlanBuffers
from pageant.plan.build import Planner
from pageant.plan.copies import BatchCopy
from pageant.plan.loops import FACTS, copy, cut_decode, cut_prefill, read
from pageant.plan.pages import PageUse
from pageant.plan.split import Split
from pageant.plan.work import KEY_TILE, MIN_SHARE, QUERY_TILE

NO_LIMIT, NO_SLOTS = 1 << 62, np.zeros(0, np.int64)


class CompiledPlanner(Planner):
    """Plans on a CPU whose kernels are compiled by numba too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        windows, most = self.features.windows, self.limits.max_cached_tokens
        widest = 0 if None in windows else max(filter(None, windows))
        keys = NO_LIMIT if most is None else most
        fixed = self.page_size, self.decode_threshold, keys, widest
        self._bounds = np.array((*fixed, 0, 0, 0, 0, 0), np.int64)
        self._facts = np.zeros(FACTS, np.int64)
        self._never = self.shard.world > 1 or self.options.debug_splits is not None

    def _write(self, buffers: PlanBuffers, batch: Batch) -> None:
        if not self.fill_ordinary(buffers, batch):
            super()._write(buffers, batch)

    def fill_ordinary(self, buffers: PlanBuffers, batch: Batch) -> bool:
        """Plan into a slot; False, and nothing written, if the batch is out of the ordinary."""
        if self._never or not self._is_ordinary(batch):
            return False
        bounds, facts, slots = self._bounds, self._facts, batch.slot_mapping
        starts, lens = batch.query_start_loc.numpy(), batch.seq_lens.numpy()
        table = batch.page_table.numpy()
        rows = NO_SLOTS if slots is None else slots.numpy()
        worth = min([rule.tokens for rule in prefix.RULES]) if self.shares else NO_LIMIT
        most = batch.num_tokens, batch.max_query_len, batch.max_seq_len
        bounds[4:] = worth, *most, slots is not None
        if not read(starts, lens, table, rows, bounds, facts):
            return False
        width, page, request, written, slot, decodes, real, decode_tokens = facts.tolist()
        num_requests, num_rows = len(lens), len(rows)
        views = buffers.memory.views(num_requests, width, num_rows)
        copy(starts, lens, table, rows, self.page_size, *views.arrays)
        writes = None if slots is None else views.writes(written, slot)
        buffers.copy = BatchCopy(
            *views.tensors, causal=batch.causal, draft_mask=None, writes=writes
        )
        buffers.packed, buffers.pages = None, PageUse(page, request)
        buffers.real_tokens = buffers.known_tokens = real
        buffers.split = (
            Split(num_requests, 0, batch.num_tokens, 0)
            if decodes == num_requests
            else Split(
                decodes, num_requests - decodes, decode_tokens, batch.num_tokens - decode_tokens
            )
        )
        buffers.shared.clear()
        for (phase, window), work in buffers.work.items():
            lists, window = (work.items, work.share_start), window or 0
            if phase == "decode" and not self.options.invariant:
                sizes = decodes, window, KEY_TILE, MIN_SHARE
                cut_decode(starts, lens, *sizes, *lists, work.groups, work.counts)
            else:
                part = (0, decodes) if phase == "decode" else (decodes, num_requests)
                how = window, not batch.causal, QUERY_TILE
                cut_prefill(starts, lens, *part, *how, *lists, work.counts)
        return True

    def _is_ordinary(self, batch: Batch) -> bool:
        """Whether the batch's types and sizes are right, and nothing rarer than `causal` is given.

        Only whether: `mistakes.check_host` says what is wrong.
        """
        if type(batch) is not Batch:
            return False
        requests, tokens, limits = batch.num_requests, batch.num_tokens, self.limits
        numbers = requests, tokens, batch.max_query_len, batch.max_seq_len
        slots, table, causal = batch.slot_mapping, batch.page_table, batch.causal
        return (
            all(type(number) is int and number >= 0 for number in numbers)
            and requests <= limits.max_requests
            and tokens <= limits.max_tokens
            and batch.max_seq_len <= limits.max_seq_len
            and (causal is True or (causal is False and self.features.non_causal))
            and batch.draft_mask is batch.draft_parents is batch.encoder_seq_lens is None
            and batch.query_start_loc_cpu is batch.seq_lens_cpu is batch.shared_prefix_lens is None
            and _is_row(batch.query_start_loc, torch.int32, requests + 1)
            and _is_row(batch.seq_lens, torch.int32, requests)
            and (slots is None or (_is_row(slots, torch.int64, -1)))
            and type(table) is torch.Tensor
            and table.dtype is torch.int32
            and table.is_cpu
            and table.layout is torch.strided
            and table.dim() == 2
            and table.shape[0] == requests
            and table.stride(1) == 1
        )


def _is_row(x: object, dtype: torch.dtype, size: int) -> bool:
    """Whether this is a contiguous CPU tensor of so many numbers; -1: of any number."""
    return (
        type(x) is torch.Tensor
        and x.dtype is dtype
        and x.is_cpu
        and x.layout is torch.strided
        and x.dim() == 1
        and (size < 0 or x.shape[0] == size)
        and x.is_contiguous()
    )
