"""Batches of one size at fixed addresses, for CUDA graphs: what comes is copied in and padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pageant.plan.batch import Batch
from pageant.types import Features, Limits, bad

Drafts = Literal["mask", "parents"]
DRAFT_FIELDS = {"mask": "draft_mask", "parents": "draft_parents"}


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Which batches one graph takes.

    Attributes:
        tokens, requests: the most of each; what a batch lacks is padding.
        max_query_len: most new tokens of a request.
        drafts: what every batch says of its drafts: "mask", "parents", or None for nothing.
        shares: whether prefixes are looked for, in batches with a hint or without.

    >>> Bucket(tokens=8, requests=8, max_query_len=1).check(
    ...     Batch.from_lengths([1, 4], [9, 4], [[3, 1], [2]], page_size=8)
    ... )
    Traceback (most recent call last):
    pageant.types.ArgumentError: batch.max_query_len is 4; allowed: at most 1, as captured
    """

    tokens: int
    requests: int
    max_query_len: int
    drafts: Drafts | None = None
    shares: bool = False

    def check(self, batch: Batch) -> None:
        """Raise unless a batch without other mistakes is one of these."""
        slots, mask, parents = batch.slot_mapping, batch.draft_mask, batch.draft_parents
        for name, value, most in (
            ("num_requests", batch.num_requests, self.requests),
            ("num_tokens", batch.num_tokens, self.tokens),
            ("max_query_len", batch.max_query_len, self.max_query_len),
            ("slot_mapping", 0 if slots is None else slots.shape[0], self.tokens),
            ("draft_mask", 0 if mask is None else mask.shape[0], self.tokens),
            ("draft_parents", 0 if parents is None else parents.shape[0], self.tokens),
        ):
            if value > most:
                shown = value if name.startswith(("num", "max")) else f"{value} rows"
                raise bad(f"batch.{name}", shown, f"at most {most}, as captured")
        for kind, name in DRAFT_FIELDS.items():
            is_given, is_taken = getattr(batch, name) is not None, self.drafts == kind
            if is_given != is_taken:
                allowed = f"{'a tensor' if is_taken else 'None'}: the graph was captured with "
                allowed += f"drafts={self.drafts!r}"
                raise bad(f"batch.{name}", "given" if is_given else None, allowed)
        if batch.encoder_seq_lens is not None:
            raise bad("batch.encoder_seq_lens", "given", "None: no graph holds cross attention")


class BatchRoom:
    """Tensors for any batch within the limits; the batches of all buckets are views of them.

    Args:
        limits: what they are sized by: the page table is [max_requests, pages of max_seq_len].
        features: with non_causal, each request says whether it is causal.
        page_size: tokens a page.
        device: where they lie.

    Raises:
        ArgumentError: no memory holds them.
    """

    def __init__(
        self, limits: Limits, features: Features, page_size: int, device: torch.device
    ) -> None:
        requests, width = limits.max_requests, -(-limits.max_seq_len // page_size)
        self._device, self._max_seq_len = device, limits.max_seq_len
        try:
            self._starts = self._new(0, torch.int32, requests + 1)
            self._lens = self._new(0, torch.int32, requests)
            self._table = self._new(0, torch.int32, requests, width)
            self._slots = self._new(-1, torch.int64, limits.max_tokens)
            self._hint = self._new(0, torch.int32, requests)
            self._causal = self._new(1, torch.bool, requests) if features.non_causal else None
        except RuntimeError:  # torch's error when memory does not suffice
            raise bad("limits", limits, "bounds whose page table fits in memory") from None

    def _new(self, value: int, dtype: torch.dtype, *size: int) -> torch.Tensor:
        with torch.inference_mode(False):  # else only inference mode could write to it
            return torch.full(size, value, dtype=dtype, device=self._device)

    def batch(self, bucket: Bucket) -> Batch:
        """A batch of a bucket's size, all of it padding until another one is copied in."""
        requests, tokens, drafts = bucket.requests, bucket.tokens, bucket.drafts
        mask = parents = None
        if drafts == "mask":
            mask = self._new(0, torch.bool, tokens, bucket.max_query_len)
        elif drafts == "parents":
            parents = self._new(-1, torch.int32, tokens)
        self._starts.zero_()
        self._lens.zero_()
        self._slots.fill_(-1)
        return Batch(
            query_start_loc=self._starts[: requests + 1],
            seq_lens=self._lens[:requests],
            page_table=self._table[:requests],
            slot_mapping=self._slots[:tokens],
            num_requests=requests,
            num_tokens=tokens,
            max_query_len=bucket.max_query_len,
            max_seq_len=self._max_seq_len,
            causal=True if self._causal is None else self._causal[:requests],
            draft_mask=mask,
            draft_parents=parents,
            shared_prefix_lens=self._hint[:requests] if bucket.shares else None,
        )


def copy_in(static: Batch, batch: Batch) -> None:
    """Copy a batch into a larger static one, in stream order: nothing waits or is allocated.

    Requests and slots that the batch lacks become padding: requests of no tokens and no keys after
    the last one, and slots of -1. Page ids past the batch's table stay as they are: nothing reads
    them.

    >>> room = BatchRoom(Limits(max_requests=4, max_tokens=6, max_seq_len=8), Features(), 4, "cpu")
    >>> static = room.batch(Bucket(tokens=6, requests=4, max_query_len=6))
    >>> copy_in(static, Batch.from_lengths([1, 3], [6, 3], [[7, 2], [5]], page_size=4))
    >>> static.query_start_loc.tolist(), static.seq_lens.tolist()
    ([0, 1, 4, 4, 4], [6, 3, 0, 0])
    >>> static.slot_mapping.tolist()
    [9, 20, 21, 22, -1, -1]
    """
    requests = batch.num_requests
    starts, slots = batch.query_start_loc, batch.slot_mapping
    static.query_start_loc[: requests + 1].copy_(starts)
    static.query_start_loc[requests + 1 :].copy_(starts[-1:])
    static.seq_lens[:requests].copy_(batch.seq_lens)
    static.seq_lens[requests:].zero_()
    width = min(static.page_table.shape[1], batch.page_table.shape[1])
    static.page_table[:requests, :width].copy_(batch.page_table[:, :width])
    assert static.slot_mapping is not None
    written = 0 if slots is None else slots.shape[0]
    if slots is not None:
        static.slot_mapping[:written].copy_(slots)
    static.slot_mapping[written:].fill_(-1)
    if isinstance(static.causal, torch.Tensor):
        if isinstance(batch.causal, torch.Tensor):
            static.causal[:requests].copy_(batch.causal)
        else:
            static.causal.fill_(batch.causal)
    if static.draft_mask is not None and batch.draft_mask is not None:
        rows, columns = batch.draft_mask.shape
        static.draft_mask[:rows, :columns].copy_(batch.draft_mask)
    if static.draft_parents is not None and batch.draft_parents is not None:
        static.draft_parents[: batch.draft_parents.shape[0]].copy_(batch.draft_parents)
