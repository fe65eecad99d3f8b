"""FlashInfer's prefill wrapper over the keys that one rank of several holds.

A row at position p sees the rank's keys up to p, as many as the rank happens to hold, which is no
causal mask of FlashInfer's. So keys are cut at a page: whole pages that every row sees whole, and
the rest, over which a custom mask says who sees whom.

    whole = log2(2^a + 2^b);  out = 2^(a - whole) out_a + 2^(b - whole) out_b

Each row's result is this rank's alone; its log-sum-exp lets others join it, and add sinks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pageant.kernels.call import AttentionCall
from pageant.kernels.vendor.common import (
    IntArray,
    Part,
    attend,
    first_pages,
    library,
    pages_of,
    parts_of,
    plan_prefill,
    put,
    put_blank,
    query_dtype,
)


def run(call: AttentionCall) -> None:
    """The rows of a phase; all of them are causal."""
    found, work = parts_of(call, apart=False), call.work
    key = ("ranks", call.params.window, call.params.soft_cap)
    for part in found.parts:
        if key not in work.step:
            work.step[key] = _planned(call, part)
        count = int(part.query_lens.sum())
        size = (count, call.q.shape[1], call.out.shape[2])
        out = torch.zeros(size, device=call.q.device)
        lse = out.new_full(size[:2], -torch.inf)
        for wrapper, piece, within, sees in work.step[key]:
            dtype = query_dtype(call, is_masked=sees is not None)
            own, own_lse = attend(replace(call, lse=lse), piece, wrapper, dtype)
            assert own_lse is not None
            if sees is not None:  # of a row that sees nothing FlashInfer may make anything
                own_lse = torch.where(sees[:, None], own_lse, -torch.inf)
            out[within], lse[within] = joined(out[within], lse[within], own.float(), own_lse)
        put(call, part, out, lse)
    put_blank(call, found.blank)


def joined(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results [T, H, Dv] over disjoint keys as one, and their lse [T, H] to base 2."""
    peak = torch.maximum(lse, other_lse)
    base = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp2(lse - base)[..., None], torch.exp2(other_lse - base)[..., None]
    total = weights[0] + weights[1]
    other = torch.where(weights[1] > 0, other, 0.0)
    merged = (out * weights[0] + other * weights[1]) / torch.where(total > 0, total, 1.0)
    return merged, base + torch.log2(total[..., 0])


def _planned(call: AttentionCall, part: Part) -> list[tuple[Any, Part, Any, torch.Tensor | None]]:
    """Wrappers; for each the requests it serves, which of the part's rows, and which see a key."""
    low = first_pages(call, part)
    cut = low
    if call.params.window is None:
        size = call.cache.page_size
        cut = call.shard.count(part.total_lens - part.query_lens + 1) // size * size
    starts = np.concatenate([[0], np.cumsum(part.query_lens)])
    made = []
    for name, first, last in (("whole", low, cut), ("masked", cut, part.key_lens)):
        chosen = np.flatnonzero(last > first)
        if not len(chosen):
            continue
        piece, within = _piece(call, part, starts, chosen)
        pages = pages_of(call, piece.ids, first[chosen], last[chosen])
        mask = sees = None
        if name == "masked":
            mask, sees = _mask(call, piece, first[chosen])
        key = ("ranks", name, call.params.window, call.params.soft_cap)
        wrapper = call.work.kept.get(key)
        if wrapper is None:
            make = library().BatchPrefillWithPagedKVCacheWrapper
            wrapper = call.work.kept[key] = make(call.work.room, "NHD")
        dtype = query_dtype(call, is_masked=mask is not None)
        others = {"causal": False, "custom_mask": mask, "window_left": -1}
        plan_prefill(call, wrapper, piece, pages, dtype, **others)
        made.append((wrapper, piece, within, sees))
    return made


def _piece(
    call: AttentionCall, part: Part, starts: IntArray, chosen: IntArray
) -> tuple[Part, slice | torch.Tensor]:
    """Some requests of a part, and which of the part's rows are theirs."""
    lens = part.query_lens[chosen], part.total_lens[chosen], part.key_lens[chosen]
    if len(chosen) == len(part.ids):
        return part, slice(None)
    counts = part.query_lens[chosen]
    shift = np.repeat(starts[chosen] - np.cumsum(counts) + counts, counts)
    within = torch.from_numpy(np.arange(len(shift)) + shift).to(call.q.device)
    rows = part.rows
    rows = within + rows.start if isinstance(rows, slice) else rows[within]
    return Part(part.ids[chosen], *lens, part.causal[chosen], rows), within


def _mask(call: AttentionCall, piece: Part, low: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Who sees whom among rows and the keys from `low` on, flat; and which rows see any: [T]."""
    device, window = call.q.device, call.params.window
    masks, sees = [], []
    lens = zip(piece.query_lens, piece.total_lens, piece.key_lens, low, strict=True)
    for m, total, held, first in lens:
        row = torch.arange(int(total - m), int(total), device=device)[:, None]
        key = call.shard.position(torch.arange(int(first), int(held), device=device))[None]
        mask = key <= row
        if window is not None:
            mask &= key > row - window
        masks.append(mask.flatten())
        sees.append(mask.any(1))
    return torch.cat(masks), torch.cat(sees)
