"""What one engine step asks for: the Batch, and the checks that find any mistake in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageant.types import Features, Limits, bad


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests of one step, each with m new tokens after n - m cached ones (m or n may be 0).

    Tensors lie on the Attention's device; the four host bounds let planning avoid reading them.

    Attributes:
        query_start_loc: int32 [R + 1], first token of each request; the last entry ends the tokens.
        seq_lens: int32 [R], n: cached and new tokens.
        page_table: int32 [R, W], page ids in order; entries no row can see may hold anything.
        slot_mapping: int64 [T], where each new token is written; negative = not written. None if
            nothing is written with this plan. Cross attention: one entry per encoder token.
        num_requests: R.
        num_tokens: T; more than query_start_loc[-1] is padding, whose rows are left alone.
        max_query_len, max_seq_len: bounds on m and n.
        causal: for all requests, or bool [R].
        draft_mask: bool [T, max_query_len]; column c of a row is key n - m + c of its request.
        draft_parents: int32 [T], index of each new token's parent among its request's, -1 for none.
        encoder_seq_lens: int32 [R]; the whole plan is then cross attention over that many keys.
        query_start_loc_cpu, seq_lens_cpu: host copies, for kernels that need them.
        shared_prefix_lens: int32 [R], tokens believed to be shared; a hint, never trusted.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool | torch.Tensor = True
    draft_mask: torch.Tensor | None = None
    draft_parents: torch.Tensor | None = None
    encoder_seq_lens: torch.Tensor | None = None
    query_start_loc_cpu: torch.Tensor | None = None
    seq_lens_cpu: torch.Tensor | None = None
    shared_prefix_lens: torch.Tensor | None = None

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table: Sequence[Sequence[int]],
        page_size: int,
        **others: Any,
    ) -> Batch:
        """A batch from plain lists, on the CPU; every new token is written at its own position.

        Args:
            query_lens, seq_lens: m and n of each request.
            page_table: each request's page ids; rows may differ in length.
            page_size: tokens a page, as the CacheSpec says.
            **others: further fields of the batch; a slot_mapping among them replaces ours.

        Two requests, pages of 4 tokens. The first decodes its 6th token, the second prefills 3:

        >>> batch = Batch.from_lengths([1, 3], [6, 3], [[7, 2], [5]], page_size=4)
        >>> batch.query_start_loc.tolist(), batch.slot_mapping.tolist()
        ([0, 1, 4], [9, 20, 21, 22])
        """
        for name, rows in (("seq_lens", seq_lens), ("page_table", page_table)):
            if len(rows) != len(query_lens):
                raise bad(name, f"{len(rows)} entries", f"one a request, {len(query_lens)}")
        for request, (m, n, pages) in enumerate(zip(query_lens, seq_lens, page_table, strict=True)):
            need = -(-n // page_size)
            if m > 0 and len(pages) < need and "slot_mapping" not in others:
                allowed = f"at least {need} pages of {page_size} for {n} tokens"
                raise bad(f"page_table[{request}]", pages, allowed)
        width = max((len(row) for row in page_table), default=0)
        table = torch.tensor([[*row, *[0] * (width - len(row))] for row in page_table])
        slots = [
            pages[position // page_size] * page_size + position % page_size if position >= 0 else -1
            for m, n, pages in zip(query_lens, seq_lens, page_table, strict=True)
            for position in range(n - m, n)
            if "slot_mapping" not in others
        ]
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        fields: dict[str, Any] = {
            "query_start_loc": torch.tensor(starts, dtype=torch.int32),
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "page_table": table.to(torch.int32).reshape(len(page_table), width),
            "slot_mapping": torch.tensor(slots, dtype=torch.int64),
            "num_requests": len(query_lens),
            "num_tokens": int(starts[-1]),
            "max_query_len": max(query_lens, default=0),
            "max_seq_len": max(seq_lens, default=0),
        }
        return cls(**{**fields, **others})

    @property
    def key_lens(self) -> torch.Tensor:
        """int32 [R]: keys each request attends to; the encoder's for cross attention."""
        return self.seq_lens if self.encoder_seq_lens is None else self.encoder_seq_lens


def check_host(batch: Batch, limits: Limits, features: Features, device: torch.device) -> None:
    """Raise for what can be seen without reading device memory: types, shapes, bounds, features."""
    for name, highest in (
        ("num_requests", limits.max_requests),
        ("num_tokens", limits.max_tokens),
        ("max_query_len", None),
        ("max_seq_len", limits.max_seq_len),
    ):
        value = getattr(batch, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise bad(f"batch.{name}", value, "a whole number from 0 up")
        if highest is not None and value > highest:
            raise bad(f"batch.{name}", value, f"at most {highest}, as the limits say")
    if not isinstance(batch.causal, bool | torch.Tensor):
        raise bad("batch.causal", batch.causal, "a bool, or a bool tensor [num_requests]")
    _check_tensors(batch, device)
    if batch.draft_mask is not None and batch.draft_parents is not None:
        raise bad("batch.draft_parents", "given beside draft_mask", "one of the two")
    drafts = batch.draft_mask is not None or batch.draft_parents is not None
    if drafts and not features.draft_masks:
        name = "draft_mask" if batch.draft_mask is not None else "draft_parents"
        raise bad(f"batch.{name}", "given", "None, unless Features(draft_masks=True) is declared")
    if batch.causal is not True and not features.non_causal:
        raise bad(
            "batch.causal", batch.causal, "True, unless Features(non_causal=True) is declared"
        )


def _check_tensors(batch: Batch, device: torch.device) -> None:
    r, t, host = batch.num_requests, batch.num_tokens, torch.device("cpu")
    optional = {"slot_mapping", "draft_mask", "draft_parents", "encoder_seq_lens"}
    optional |= {"query_start_loc_cpu", "seq_lens_cpu", "shared_prefix_lens"}
    mask = batch.draft_mask
    mask_rows = mask.shape[:1] if isinstance(mask, torch.Tensor) else ()
    rows: tuple[tuple[str, torch.dtype, tuple[int | None, ...], torch.device], ...] = (
        ("query_start_loc", torch.int32, (r + 1,), device),
        ("seq_lens", torch.int32, (r,), device),
        ("page_table", torch.int32, (r, None), device),
        ("slot_mapping", torch.int64, (None,), device),
        ("draft_mask", torch.bool, (*(mask_rows or (t,)), batch.max_query_len), device),
        ("draft_parents", torch.int32, (None,), device),
        ("encoder_seq_lens", torch.int32, (r,), device),
        ("query_start_loc_cpu", torch.int32, (r + 1,), host),
        ("seq_lens_cpu", torch.int32, (r,), host),
        ("shared_prefix_lens", torch.int32, (r,), device),
    )
    if isinstance(batch.causal, torch.Tensor):
        rows = (*rows, ("causal", torch.bool, (r,), device))
    for name, dtype, shape, where in rows:
        value, named = getattr(batch, name), f"batch.{name}"
        if value is None and name in optional:
            continue
        if not isinstance(value, torch.Tensor):
            raise bad(named, value, f"a tensor of {dtype}")
        if value.dtype != dtype:
            raise bad(named, value.dtype, str(dtype))
        if value.device != where:
            raise bad(named, str(value.device), f"a tensor on {where}")
        if value.dim() != len(shape) or any(
            want is not None and have != want for want, have in zip(shape, value.shape, strict=True)
        ):
            sizes = ", ".join("any" if want is None else str(want) for want in shape)
            raise bad(named, f"a tensor of shape {list(value.shape)}", f"[{sizes}]")
        if value.numel() > 1 and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise bad(named, f"stride {value.stride(-1)} along the last axis", "stride 1")


def check_values(batch: Batch, limits: Limits, page_size: int) -> None:
    """Raise for lengths, offsets and parents that contradict each other; reads the tensors."""
    starts, lens = batch.query_start_loc.cpu().numpy(), batch.seq_lens.cpu().numpy()
    query_lens = np.diff(starts)
    if starts[0] != 0:
        raise bad("batch.query_start_loc[0]", int(starts[0]), "0")
    _check_each("query_start_loc", query_lens >= 0, starts, "not below the entry before it", 1)
    if starts[-1] > batch.num_tokens:
        allowed = f"at most num_tokens, {batch.num_tokens}"
        raise bad("batch.query_start_loc[-1]", int(starts[-1]), allowed)
    allowed = f"at most max_query_len, {batch.max_query_len}, above the entry before it"
    _check_each("query_start_loc", query_lens <= batch.max_query_len, starts, allowed, 1)
    bound = min(batch.max_seq_len, limits.max_seq_len)
    _check_each("seq_lens", (lens >= 0) & (lens <= bound), lens, f"0 to max_seq_len, {bound}")
    key_lens, name = lens, "seq_lens"
    if batch.encoder_seq_lens is not None:
        key_lens, name = batch.encoder_seq_lens.cpu().numpy(), "encoder_seq_lens"
        top = limits.max_seq_len
        _check_each(name, (key_lens >= 0) & (key_lens <= top), key_lens, f"0 to the limit, {top}")
    total = int(key_lens.sum(dtype=np.int64))
    if limits.max_cached_tokens is not None and total > limits.max_cached_tokens:
        raise bad(
            f"the sum of batch.{name}",
            total,
            f"at most {limits.max_cached_tokens}, as the limits say",
        )
    room = batch.page_table.shape[1] * page_size
    fits = (key_lens <= room) | (query_lens == 0)
    _check_each(name, fits, key_lens, f"at most {room}, the tokens a page_table row holds")
    real = int(starts[-1])
    for field in ("slot_mapping", "draft_mask", "draft_parents"):
        tensor = getattr(batch, field)
        cross = field == "slot_mapping" and batch.encoder_seq_lens is not None
        if tensor is not None and not cross and not real <= tensor.shape[0] <= batch.num_tokens:
            allowed = f"{real} (query_start_loc[-1]) to {batch.num_tokens} (num_tokens) rows"
            raise bad(f"batch.{field}", f"{tensor.shape[0]} rows", allowed)
    if batch.draft_parents is not None:
        parents = batch.draft_parents.cpu().numpy()[:real]
        own = np.arange(real) - np.repeat(starts[:-1], query_lens)
        fits = (parents >= -1) & (parents < own)
        _check_each("draft_parents", fits, parents, "-1, or an earlier token of the same request")


def _check_each(
    name: str,
    fits: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    allowed: str,
    first: int = 0,
) -> None:
    """Raise for the first value that does not fit; `fits` speaks of values from `first` on."""
    if not fits.all():
        where = first + int(np.argmin(fits))
        raise bad(f"batch.{name}[{where}]", int(values[where]), allowed)
