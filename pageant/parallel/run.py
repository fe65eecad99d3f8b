"""One layer's attention where a group of ranks holds the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pageant.cache.pages import LayerCache
from pageant.kernels.launch import launch
from pageant.kernels.merge import merge_states
from pageant.parallel.combine import combine, gather_heads
from pageant.plan.build import Plan
from pageant.plan.inputs import LayerParams
from pageant.plan.outputs import new_lse
from pageant.ranks import ContextParallel
from pageant.select.rows import Row


def run(
    rows: Mapping[str, Row],
    plan: Plan,
    q: torch.Tensor,
    cache: LayerCache,
    params: LayerParams,
    ranks: ContextParallel,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole result of the real tokens, the sink in it once; every rank of the group calls this.

    Args:
        rows: the chosen row of each phase.
        plan: the step's plan.
        q: [>= T, Hq, D], model dtype.
        cache: this rank's pages.
        params: the layer's.
        ranks: with a group.

    Returns:
        float32 [T, Hq, Dv] and lse [T, Hq], without padding.
    """
    slopes, real = params.alibi_slopes, plan.buffers.real_tokens
    if slopes is not None:
        slopes = gather_heads(slopes, ranks, dim=0)
    q = gather_heads(q[:real], ranks, dim=1)
    parts, lse = plan.planner.workspace.finished[:real], new_lse(q)
    bare = replace(params, sinks=None, alibi_slopes=slopes)
    launch(rows, plan, q, cache, bare, parts, lse)
    out, lse = combine(parts, lse, ranks)
    if params.sinks is not None:
        out, lse = merge_states([out], [lse], params.sinks)
    return out, lse
