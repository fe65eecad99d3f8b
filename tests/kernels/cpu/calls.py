"""Calls for one kernel alone, made without planning, and what their answers must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pageant.cache.formats import resolve
from pageant.cache.pages import LayerCache
from pageant.cache.quantize import encode
from pageant.kernels import reference
from pageant.kernels.call import AttentionCall
from pageant.plan.buffers import Workspace
from pageant.plan.inputs import LayerParams
from pageant.plan.work import QUERY_TILE, Lengths, WorkList, fill_decode, fill_prefill
from tests.inputs import BOUNDS, assert_close

Pairs = list[tuple[int, int]]
UNTOUCHED = 77.0
HEADS = (6, 2)
WORKERS = 3
PADDING = 2  # rows that no request has
NO_PAGE = 10**6


def make_call(
    lengths: Pairs,
    phase: str,
    *,
    dtype: torch.dtype = torch.float32,
    format: str = "auto",
    page_size: int = 16,
    heads: tuple[int, int] = HEADS,
    dims: tuple[int, int] = (32, 32),
    causal: bool | torch.Tensor = True,
    draft: torch.Tensor | None = None,
    splits: int | None = None,
    heads_inside: bool = True,
    **params: Any,
) -> AttentionCall:
    """A call over random queries and pages in random order; outputs hold UNTOUCHED."""
    rng = torch.Generator().manual_seed(len(lengths) + page_size)
    fmt = resolve(format, dtype)
    rows, keys = (np.array(column) for column in zip(*lengths, strict=True))
    counts = -(-keys // page_size)
    order = iter(torch.randperm(int(counts.sum()), generator=rng).tolist())
    table = torch.full((len(lengths), max(int(counts.max()), 1)), NO_PAGE, dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count] = torch.tensor([next(order) for _ in range(count)])
    middle = (page_size, heads[1]) if heads_inside else (heads[1], page_size)
    stored = [
        encode(torch.randn(int(counts.sum()), *middle, dim, generator=rng), fmt) for dim in dims
    ]
    (k, v), (k_scales, v_scales) = zip(*stored, strict=True)
    if not heads_inside:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if k_scales is not None:
            k_scales, v_scales = k_scales.transpose(1, 2), v_scales.transpose(1, 2)
    tokens = int(rows.sum())
    resolved = LayerParams(**{"score_scale": dims[0] ** -0.5, **params})
    each = np.full(len(lengths), causal) if isinstance(causal, bool) else causal.numpy()
    part = Lengths(0, len(lengths), rows, keys, ~each | (draft is not None))
    work = WorkList.empty(
        len(lengths) * (splits or 1) + 64 + int(rows.sum()) // QUERY_TILE, WORKERS
    )
    if phase == "decode":
        fill_decode(work, part, resolved.window, splits)
    else:
        fill_prefill(work, part, resolved.window)
    partials = (len(lengths) * (splits or WORKERS) + 1, int(rows.max()), heads[0])
    return AttentionCall(
        q=torch.randn(tokens + PADDING, heads[0], dims[0], generator=rng).to(dtype),
        cache=LayerCache(k, v, fmt, k_scales, v_scales),
        out=torch.full((tokens + PADDING, heads[0], dims[1]), UNTOUCHED, dtype=dtype),
        lse=torch.full((tokens + PADDING, heads[0]), UNTOUCHED),
        query_start_loc=torch.tensor([0, *rows.cumsum()], dtype=torch.int32),
        key_lens=torch.tensor(keys, dtype=torch.int32),
        page_table=table,
        causal=causal,
        draft_mask=draft,
        params=resolved,
        work=work,
        workspace=Workspace(
            torch.full((*partials, dims[1]), torch.nan), torch.full(partials, torch.nan)
        ),
    )


def fresh(call: AttentionCall) -> AttentionCall:
    """The same call with outputs and partial results of its own."""
    assert call.lse is not None
    room = Workspace(
        torch.full_like(call.workspace.partial_out, torch.nan),
        torch.full_like(call.workspace.partial_lse, torch.nan),
    )
    out, lse = torch.full_like(call.out, UNTOUCHED), torch.full_like(call.lse, UNTOUCHED)
    return replace(call, out=out, lse=lse, workspace=room)


def check(run: Callable[[AttentionCall], None], call: AttentionCall, lse_bound: float) -> None:
    """Run, and compare with the float64 reference; padding rows are left alone."""
    run(call)
    assert call.lse is not None
    want = replace(call, out=call.out.double(), lse=call.lse.double())
    assert want.lse is not None
    want.out[:-PADDING], want.lse[:-PADDING] = 0, 0
    reference.run(want)
    assert_close(call.out[:-PADDING], want.out[:-PADDING], BOUNDS[call.out.dtype])
    assert_close(call.lse[:-PADDING], want.lse[:-PADDING], lse_bound)
    assert (call.out[-PADDING:] == UNTOUCHED).all()
    assert (call.lse[-PADDING:] == UNTOUCHED).all()
