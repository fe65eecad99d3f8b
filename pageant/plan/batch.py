"""What one engine step asks for: the Batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from pageant.select.bounds import LARGEST_INT32, require_whole
from pageant.types import bad


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests of one step, each with m new tokens after n - m cached ones (m or n may be 0).

    Tensors lie on the Attention's device; the four host bounds let planning avoid reading them.
    Pages are those of the Attention's CacheSpec: planning cannot tell that page_table and
    slot_mapping count in pages of another size, unless a row then is too narrow for its request.

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
        query_start_loc_cpu, seq_lens_cpu: host copies, for kernels that need them; ours do not, and
            follow the device where the two differ, with or without Options(adaptive=True).
        shared_prefix_lens: int32 [R], tokens believed to be shared with some other request; a hint
            that is checked, never trusted: what is shared is found in page_table. On a GPU it is
            looked for there only in batches that bring a hint, and the hint itself is not read,
            unless Options(validate=True).
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

        Raises:
            ArgumentError: for lists that do not fit each other, or hold no whole numbers.

        Two requests, pages of 4 tokens. The first decodes its 6th token, the second prefills 3:

        >>> batch = Batch.from_lengths([1, 3], [6, 3], [[7, 2], [5]], page_size=4)
        >>> batch.query_start_loc.tolist(), batch.slot_mapping.tolist()
        ([0, 1, 4], [9, 20, 21, 22])
        """
        _check_lists(query_lens, seq_lens, page_table, page_size)
        for name in set(others) - {field.name for field in dataclasses.fields(cls)}:
            raise bad(name, "given", "the fields of a pageant.Batch")
        if "slot_mapping" not in others:
            _check_room(query_lens, seq_lens, page_table, page_size)
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


def _check_lists(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_table: Sequence[Sequence[int]],
    page_size: int,
) -> None:
    """Raise unless all are lists of whole numbers, with one entry a request."""
    require_whole("page_size", page_size)
    _require_numbers("query_lens", query_lens, 0)
    _require_numbers("seq_lens", seq_lens, 0)
    _require_list("page_table", page_table)
    for request, pages in enumerate(page_table):
        _require_numbers(f"page_table[{request}]", pages, -LARGEST_INT32)
    for name, rows in (("seq_lens", seq_lens), ("page_table", page_table)):
        if len(rows) != len(query_lens):
            raise bad(name, f"{len(rows)} entries", f"one a request, {len(query_lens)}")


def _check_room(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_table: Sequence[Sequence[int]],
    page_size: int,
) -> None:
    """Raise unless every request with new tokens has pages for all of its tokens."""
    for request, (m, n, pages) in enumerate(zip(query_lens, seq_lens, page_table, strict=True)):
        need = -(-n // page_size)
        if m > 0 and len(pages) < need:
            allowed = f"at least {need} pages of {page_size} for {n} tokens"
            raise bad(f"page_table[{request}]", pages, allowed)


def _require_list(name: str, values: object) -> None:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
        raise bad(name, f"a {type(values).__name__}", "a list")


def _require_numbers(name: str, values: Any, least: int) -> None:
    """Raise unless these are whole numbers from `least` to what an int32 holds."""
    _require_list(name, values)
    for index, value in enumerate(values):
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not whole or not least <= int(value) <= LARGEST_INT32:
            allowed = f"a whole number from {least} to {LARGEST_INT32}"
            raise bad(f"{name}[{index}]", value, allowed)
