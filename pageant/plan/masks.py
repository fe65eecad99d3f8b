"""Draft masks as bits in 16-bit words, for kernels that read those (FlashInfer's XQA).

Bit j of a row says whether the row sees new token j of its own request: token j is bit j % 16 of
word j // 16. Rows are padded to an even number of words with zeros. Keys before the new tokens have
no bit; every row sees those, as far as its window lets it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from pageant.plan.copies import BatchCopy

WORD = 16  # bits
ROW = 32  # bits; a row is padded to a multiple


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Words of a mask.

    Args:
        mask: bool [.., M].

    Returns:
        uint16 [.., 2 * ceil(M / 32)].

    >>> pack_mask(torch.tensor([[True, False, True], [True] * 3])).tolist()
    [[5, 0], [7, 0]]
    """
    rows = pad(mask, (0, -mask.shape[-1] % ROW)).unflatten(-1, (-1, WORD))
    bits = 1 << torch.arange(WORD, dtype=torch.int32, device=mask.device)
    words: torch.Tensor = (rows * bits).sum(-1).to(torch.uint16)
    return words


def unpack_mask(words: torch.Tensor, width: int) -> torch.Tensor:
    """What was packed: bool [.., width] of uint16 [.., W].

    >>> unpack_mask(pack_mask(torch.tensor([True, False, True])), 3).tolist()
    [True, False, True]
    """
    bits = torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (words.to(torch.int32)[..., None] >> bits & 1).flatten(-2)[..., :width].bool()


class PackedMasks:
    """The packed masks of one Attention; those without drafts of their own are made once.

    Args:
        max_requests: most requests of a batch.
        device: where masks lie.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._max_requests, self._device = max_requests, device
        self._uniform: dict[tuple[int, bool], torch.Tensor] = {}

    def uniform(self, num_requests: int, query_len: int, *, causal: bool) -> torch.Tensor:
        """uint16 [R, m, 2 * ceil(m / 32)] of requests of m tokens each, always at one address."""
        if (query_len, causal) not in self._uniform:
            mask = torch.ones(query_len, query_len, dtype=torch.bool, device=self._device)
            words = pack_mask(mask.tril() if causal else mask)
            with torch.inference_mode(False):
                every = words.expand(self._max_requests, -1, -1).clone()
            self._uniform[query_len, causal] = every
        return self._uniform[query_len, causal][:num_requests]

    def of(self, batch: BatchCopy, num_decodes: int) -> torch.Tensor | None:
        """The mask of a batch's first requests, for ``Plan.packed_draft_mask``."""
        starts = batch.query_start_loc[: num_decodes + 1].cpu().numpy().astype(np.int64)
        lens = np.diff(starts)
        longest, causal, draft = int(lens.max(initial=0)), batch.causal, batch.draft_mask
        if longest == 0 or (longest == 1 and draft is None):
            return None
        if draft is None and isinstance(causal, bool) and (lens == longest).all():
            return self.uniform(num_decodes, longest, causal=causal)
        owner = np.repeat(np.arange(num_decodes), lens)
        row = torch.from_numpy(np.arange(starts[-1]) - starts[owner])[:, None].to(self._device)
        column = torch.arange(longest, device=self._device)
        own = torch.from_numpy(lens[owner])[:, None].to(self._device)
        if draft is not None:
            seen = draft[: starts[-1], :longest]
        else:
            seen = column <= row
            open_ended = ~torch.as_tensor(causal, device=self._device).expand(len(batch.key_lens))
            seen |= open_ended[torch.from_numpy(owner).to(self._device)][:, None]
        return pack_mask(seen & (column < own))
