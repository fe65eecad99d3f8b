"""Partial results joined: outs and base-2 lse of attention over disjoint keys."""

from __future__ import annotations

import torch

from pageant.integrations.flashinfer._inputs import LN_2, LOG2_E
from pageant.kernels.merge import merge_states as merge_natural

Pair = tuple[torch.Tensor, torch.Tensor]


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> Pair:
    """Two states v [T, H, D], s [T, H] as one; s is float32.

    >>> zero = torch.zeros(1, 1)
    >>> v, s = merge_state(torch.ones(1, 1, 2), zero, torch.zeros(1, 1, 2), zero)
    >>> v.flatten().tolist(), s.item()
    ([0.5, 0.5], 1.0)
    """
    out, lse = merge_natural([v_a, v_b], [s_a.float() * LN_2, s_b.float() * LN_2])
    return out, lse * LOG2_E


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Join a state into v and s, in rows where mask, bool [T], says so; s of any float type."""
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        out = torch.where(mask[:, None, None], out, v)
        lse = torch.where(mask[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> Pair:
    """N states v [T, N, H, D], s [T, N, H] as one; none are zeros and -inf."""
    if v.shape[1] == 0:
        size = (v.shape[0], *v.shape[2:])
        return v.new_zeros(size), s.new_full(size[:2], -torch.inf, dtype=torch.float32)
    out, lse = merge_natural(list(v.unbind(1)), list((s.float() * LN_2).unbind(1)))
    return out, lse * LOG2_E
