"""FlashInfer's second set of names for joining partial results, as many a row as it has."""

from __future__ import annotations

import torch

from pageant.integrations.flashinfer._merge import (
    Pair,
    merge_state,
    merge_state_in_place,
    merge_states,
)

__all__ = [
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]


def variable_length_merge_states(v: torch.Tensor, s: torch.Tensor, indptr: torch.Tensor) -> Pair:
    """Row i of the result joins states indptr[i] to indptr[i + 1]; none are zeros and -inf.

    Nothing waits for a device that indptr lies on.

    Args:
        v: [N, H, D].
        s: [N, H], base 2, of any float type.
        indptr: int [T + 1].

    Returns:
        v [T, H, D] and s float32 [T, H].

    >>> v, s = torch.tensor([1.0, 0.0, 7.0]).view(3, 1, 1), torch.zeros(3, 1)
    >>> v, s = variable_length_merge_states(v, s, torch.tensor([0, 2, 2, 3]))
    >>> v.flatten().tolist(), s.flatten().tolist()
    ([0.5, 0.0, 7.0], [1.0, -inf, 0.0])
    """
    if v.dim() != 3 or s.dim() != 2 or v.shape[:2] != s.shape:
        raise ValueError(
            f"v and s are {list(v.shape)} and {list(s.shape)}; allowed: [N, H, D], [N, H]"
        )
    rows, count = indptr.shape[0] - 1, v.shape[0]
    starts = indptr.to(device=v.device, dtype=torch.int64, non_blocking=True)
    state = torch.arange(count, device=v.device)
    # States before the first row and after the last belong to one that is thrown away.
    owner = torch.searchsorted(starts, state, right=True) - 1
    owner = torch.where((owner < 0) | (state >= starts[-1]), rows, owner)
    lse = s.float()
    peaks = lse.new_full((rows + 1, *s.shape[1:]), -torch.inf)
    peaks = peaks.scatter_reduce(0, owner[:, None].expand_as(lse), lse, "amax")
    peaks = torch.where(peaks == -torch.inf, 0.0, peaks)
    weights = torch.exp2(lse - peaks[owner])
    total = torch.zeros_like(peaks).index_add(0, owner, weights)
    parts = torch.where(weights[..., None] > 0, v.float() * weights[..., None], 0.0)
    out = parts.new_zeros(rows + 1, *v.shape[1:]).index_add(0, owner, parts)
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    return out[:rows].to(v.dtype), (peaks + torch.log2(total))[:rows]
