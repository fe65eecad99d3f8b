"""A problem's keys dealt out to ranks, each with pages of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

import pageant
from pageant import ContextParallel
from tests.inputs import NO_SUCH_PAGE, Problem

PAGE = 4  # tokens a page of a rank's cache, whatever the problem's


def on_rank(problem: Problem, ranks: ContextParallel, kernels: str = "auto") -> Problem:
    """The same problem as one rank sees it: its keys alone; other slots and pages hold NaN."""
    case, whole = problem.case, problem.attn
    if ranks.heads == "split":
        problem = _own_heads(problem, ranks)
    attn = pageant.Attention(
        replace(whole.shape, num_q_heads=problem.q.shape[1]),
        replace(whole.cache, page_size=PAGE, v_scale_order="linear"),
        whole.limits,
        whole.features,
        replace(whole.options, context_parallel=ranks, kernels=kernels),
    )
    held = [ranks.count(n) for _, n in case.lengths]
    counts = [-(-n // PAGE) for n in held]
    order = iter(torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(7)))
    table = torch.full((len(counts), max(counts, default=0) + 1), NO_SUCH_PAGE, dtype=torch.int32)
    cache = attn.new_cache(num_layers=1, num_pages=sum(counts) + 2)[0]
    for view in _views(cache):
        nan = torch.tensor(torch.nan) if view.is_floating_point() else torch.tensor(-1)
        view[:] = nan.to(view.dtype)
    copies: dict[tuple[tuple[int, int], ...], int] = {}  # full pages that requests have in common
    for request, keys in enumerate(held):
        for page in range(counts[request]):
            slots = [_slot(problem, request, ranks.position(page * PAGE + i)) for i in range(PAGE)]
            whole = (page + 1) * PAGE <= keys
            known = copies.get(tuple(slots)) if whole else None
            table[request, page] = int(next(order)) if known is None else known
            if whole:
                copies[tuple(slots)] = int(table[request, page])
        for key in range(keys):
            page = int(table[request, key // PAGE])
            _copy(problem, cache, request, key, ranks.position(key), page)
    return replace(problem, attn=attn, cache=cache, batch=replace(problem.batch, page_table=table))


def _own_heads(problem: Problem, ranks: ContextParallel) -> Problem:
    heads = problem.q.shape[1] // ranks.world
    own = slice(ranks.rank * heads, (ranks.rank + 1) * heads)
    layer = problem.layer
    return replace(
        problem,
        q=problem.q[:, own],
        layer=replace(
            layer,
            sinks=None if layer.sinks is None else layer.sinks[own],
            alibi_slopes=None if layer.alibi_slopes is None else layer.alibi_slopes[own],
        ),
        expected_out=problem.expected_out[:, own],
        expected_lse=problem.expected_lse[:, own],
    )


def _copy(
    problem: Problem, cache: pageant.LayerCache, request: int, key: int, position: int, page: int
) -> None:
    source, row = _slot(problem, request, position)
    if 0 <= source < problem.cache.num_pages:
        for into, taken in zip(_views(cache), _views(problem.cache), strict=True):
            into[page, key % PAGE] = taken[source, row]


def _slot(problem: Problem, request: int, position: int) -> tuple[int, int]:
    """Page and row of the problem's own cache; page -1 past the table."""
    column, row = divmod(position, problem.attn.cache.page_size)
    table = problem.batch.page_table[request]
    return (int(table[column]) if column < len(table) else -1), row


def _views(cache: pageant.LayerCache) -> list[torch.Tensor]:
    views = (cache.k, cache.v, cache.k_scales, cache.v_scales)
    return [view for view in views if view is not None]
