"""Join attention over disjoint sets of keys: all parts at once; see ``kernels/merge.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write one state from several; parts may lie anywhere in `out`.

    Args:
        outs, lses, sinks, out: as in ``pageant.ops.merge_states``, one part or more.
        lse: float32 [T, H], written.
    """
    parts_lse = torch.stack([part.to(torch.float32) for part in lses])
    parts_lse = parts_lse.masked_fill(parts_lse == torch.inf, -torch.inf)
    peak = parts_lse.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    tally = torch.exp(parts_lse - peak).sum(0)
    whole = torch.where(tally == 1.0, peak, peak + tally.log())  # a lone -0.0 keeps its sign
    empty = whole == -torch.inf
    weights = torch.exp(parts_lse - peak) / tally.masked_fill(empty, 1.0)
    # -0.0 is the sum of nothing: adding it changes no number, and no sign of a zero.
    total = torch.full(outs[0].shape, -0.0, dtype=torch.float32, device=lse.device)
    for part, weight, part_lse in zip(outs, weights, parts_lse, strict=True):
        share = part.to(torch.float32) * weight[..., None]
        total += share.masked_fill(part_lse[..., None] == -torch.inf, -0.0)
    if sinks is not None:
        total *= torch.sigmoid(whole - sinks)[..., None]
    out.copy_(total.masked_fill(empty[..., None], 0.0))
    lse.copy_(whole)
