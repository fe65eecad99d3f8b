"""Flat lists of the pages in use; see ``pageant.ops.page_indices``."""

from __future__ import annotations

import torch


def page_indices(
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write offsets, page ids and lengths of last pages.

    Args:
        seq_lens: int32 [R], checked.
        page_table: int32 [R, W].
        page_size: tokens a page.
        out: indptr int32 [R + 1], indices int32 [>= R * W], last_page_len int32 [R].
    """
    indptr, indices, last_page_len = out
    counts = -(-seq_lens // page_size)
    indptr[:1] = 0
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    is_used = torch.arange(page_table.shape[1]) < counts[:, None]
    ids = page_table[is_used]
    indices[: len(ids)] = ids
    last_page_len.copy_(seq_lens - (counts - 1).clamp(min=0) * page_size)
