"""What kernels read of a batch: copied when it is planned, into memory of the plan's slot.

The batch's own tensors may change as soon as planning is done. No kernel can then read past the
end of anything: what it reads is what was checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pageant.plan.batch import Batch
from pageant.plan.pages import WriteIndex, write_index
from pageant.types import Limits

IntArray = np.ndarray[Any, Any]

MOST_PAGE_IDS = 1 << 24  # of a page table made in advance: 64 MiB


@dataclass(frozen=True)
class DeviceWrites:
    """Where new tokens go, as the batch says: slots are looked at on the device.

    Attributes:
        slots: int64 [T].
        num_tokens: T.
    """

    slots: torch.Tensor
    num_tokens: int

    def check(self, num_slots: int) -> None:
        """Nothing: slots the cache does not have are skipped."""


@dataclass(frozen=True, eq=False)
class BatchCopy:
    """One batch, as kernels see it; views of a CopyMemory.

    Attributes:
        query_start_loc: int32 [R + 1].
        key_lens: int32 [R].
        page_table: int32 [R, W], at least as wide as the longest request's keys need; entries past
            a request's keys hold anything.
        causal: for all requests (False for cross attention), or bool [R].
        draft_mask: bool [T, M], T without padding; or None.
        writes: where new tokens go; None if the batch has no slot mapping.
    """

    query_start_loc: torch.Tensor
    key_lens: torch.Tensor
    page_table: torch.Tensor
    causal: bool | torch.Tensor
    draft_mask: torch.Tensor | None
    writes: WriteIndex | DeviceWrites | None


class CopyMemory:
    """Room for one BatchCopy at a time, at addresses that stay.

    Lengths, offsets and page ids have the room that the limits may ever need; only page tables that
    could exceed 64 MiB, masks and slots, whose width no limit bounds, have what the largest batch
    so far needed, and move when a larger one comes.
    """

    def __init__(self, limits: Limits, page_size: int, device: torch.device) -> None:
        requests = limits.max_requests
        page_ids = requests * -(-limits.max_seq_len // page_size)
        self._starts = _Room(requests + 1, torch.int32, device)
        self._key_lens = _Room(requests, torch.int32, device)
        self._page_table = _Room(min(page_ids, MOST_PAGE_IDS), torch.int32, device)
        self._causal = _Room(requests, torch.bool, device)
        self._draft_mask = _Room(0, torch.bool, device)
        self._slots = _Room(0, torch.int64, device)

    def copy(self, batch: Batch, starts: IntArray, held: IntArray, page_size: int) -> BatchCopy:
        """Copy a batch that has no mistake.

        Args:
            batch: the batch.
            starts: int64 [R + 1], its offsets on the host.
            held: int64 [R], how many keys its pages hold.
            page_size: tokens a page.
        """
        width = min(batch.page_table.shape[1], -(-int(held.max(initial=0)) // page_size))
        causal = batch.causal if batch.encoder_seq_lens is None else False
        mask = batch.draft_mask
        if batch.draft_parents is not None:
            mask = _tree_mask(batch.draft_parents.cpu().numpy(), starts)
        slots = batch.slot_mapping
        return BatchCopy(
            self._starts.hold(batch.query_start_loc),
            self._key_lens.hold(batch.key_lens),
            self._page_table.hold(batch.page_table[:, :width]),
            self._causal.hold(causal) if isinstance(causal, torch.Tensor) else causal,
            None if mask is None else self._draft_mask.hold(mask[: starts[-1]]),
            None
            if slots is None
            else write_index(slots, page_size, self._slots.take(3, slots.shape[0])),
        )

    def views(self, requests: int, width: int, slots: int) -> Views:
        """Where a copy of this size lies."""
        tensors = (
            self._starts.take(requests + 1),
            self._key_lens.take(requests),
            self._page_table.take(requests, width),
        )
        pages, rows, tokens = self._slots.take(3, slots).unbind()
        return Views((requests, width, slots), tensors, (pages, rows, tokens))


class Views(NamedTuple):
    """Where a copy of so many requests, pages and slots lies, for whoever fills it.

    Attributes:
        size: requests, pages of the table's rows, and slots.
        tensors: query_start_loc, key_lens and page_table of a BatchCopy.
        slots: int64 [S] each, pages, rows and tokens of a WriteIndex, one after another.
    """

    size: tuple[int, int, int]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    slots: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Room:
    """Memory for one tensor after another, made anew only for one that does not fit."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._memory = self._make(size)

    def _make(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # else only inference mode could write to it
            return torch.empty(size, dtype=self._dtype, device=self._device)

    def take(self, *sizes: int) -> torch.Tensor:
        """A contiguous tensor; what the one before held is lost."""
        if math.prod(sizes) > self._memory.numel():
            self._memory = self._make(math.prod(sizes))
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return self._memory.as_strided(sizes, strides)

    def hold(self, source: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return self.take(*source.shape).copy_(source)


def _tree_mask(parents: IntArray, starts: IntArray) -> torch.Tensor:
    """bool [T, M] on the host: a draft token sees itself and its ancestors.

    A root, two children of it, and a child of the second:

    >>> _tree_mask(np.array([-1, 0, 0, 2]), np.array([0, 4])).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    query_lens = np.diff(starts)
    seen = np.zeros((starts[-1], query_lens.max(initial=0)), np.bool_)
    own = np.arange(starts[-1]) - np.repeat(starts[:-1], query_lens)
    for token in range(len(seen)):
        if parents[token] >= 0:
            seen[token] = seen[token - own[token] + parents[token]]
        seen[token, own[token]] = True
    return torch.from_numpy(seen)
