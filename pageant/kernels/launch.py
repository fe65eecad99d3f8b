"""Each phase's chosen kernel, given its part of the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from pageant.cache.out_scales import OutScales
from pageant.cache.pages import LayerCache
from pageant.kernels.call import AttentionCall
from pageant.plan.build import Plan
from pageant.plan.inputs import LayerParams
from pageant.select.choose import load, load_shared
from pageant.select.rows import Row

Params = ParamSpec("Params")
Result = TypeVar("Result")


def never_compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Make ``torch.compile`` leave a function alone.

    ``torch.compiler.disable`` as a decorator would load the compiler, a second or more, on import.
    """

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if torch.compiler.is_compiling():
            eager: Callable[Params, Result] = torch.compiler.disable(function)
            return eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def launch(  # budget: what one layer gives, and its plan
    rows: Mapping[str, Row],
    plan: Plan,
    q: torch.Tensor,
    cache: LayerCache,
    params: LayerParams,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    kept: dict[Any, Any] | None = None,
    out_scales: OutScales | None = None,
) -> None:
    """Run one layer; phases without work launch nothing.

    Args:
        rows: the chosen row of each phase.
        plan: the step's plan.
        q, cache, params, out, lse, kept, out_scales: as in AttentionCall.
    """
    buffers, batch = plan.buffers, plan.buffers.batch
    for phase, row in rows.items():
        work = buffers.work[phase, params.window]
        if work.has_work:
            call = AttentionCall(
                q=q,
                cache=cache,
                out=out,
                lse=lse,
                query_start_loc=batch.query_start_loc,
                key_lens=batch.key_lens,
                page_table=batch.page_table,
                causal=batch.causal,
                draft_mask=batch.draft_mask,
                params=params,
                work=work,
                workspace=plan.planner.workspace,
                shard=plan.planner.shard,
                out_scales=out_scales,
                kept={} if kept is None else kept,
            )
            if phase == "decode" and params.window in buffers.shared:
                load_shared(row)(load(row), buffers.shared[params.window], call)
            else:
                load(row)(call)
