"""Attention in one call: over pages, or over keys that lie one request after another."""

from __future__ import annotations

from typing import Any

import torch

from pageant.api import Attention
from pageant.cache.formats import resolve
from pageant.cache.out_scales import OutScales
from pageant.plan.batch import Batch
from pageant.plan.inputs import layer_of
from pageant.plan.op_inputs import (
    BATCH_FIELDS,
    KEY_NAMES,
    PAGE_NAMES,
    SCALE_NAMES,
    check_flag,
    check_lengths,
    check_names,
    check_starts,
    check_states,
)
from pageant.types import CacheSpec, Features, Layer, Limits, Options, Shape

RUN_NAMES = ("layer", "format", "kernels", "out", "out_scales", "return_lse")


def paged_attention(  # budget: one argument for each thing attention needs
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    layer: Layer | None = None,
    format: str = "auto",
    kernels: str = "auto",
    out: torch.Tensor | None = None,
    out_scales: OutScales | None = None,
    return_lse: bool = False,
    **batch_fields: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over pages that are already written.

    Args:
        q: [T, Hq, D], model dtype.
        k_cache, v_cache: [P, N, Hkv, D] and [P, N, Hkv, Dv], any strides with unit content stride.
        k_scales, v_scales: scales beside them, as in ``LayerCache``, for formats that store them.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        page_table: int32 [R, W].
        layer: scale, window, cap, sinks, slopes, cache scales.
        format: the cache's format.
        kernels: as ``Options.kernels``.
        out, out_scales: as in ``Attention.run``.
        return_lse: also return float32 [T, Hq], natural log.
        **batch_fields: causal, draft_mask, draft_parents or encoder_seq_lens, as in ``Batch``.

    Two keys that weigh the same (the query is zero); lse is ln 2:

    >>> v = torch.tensor([1.0, 3.0])[None, :, None, None].repeat(1, 1, 1, 16)
    >>> out, lse = paged_attention(
    ...     torch.zeros(1, 1, 16),
    ...     torch.ones(1, 2, 1, 16),
    ...     v,
    ...     torch.tensor([0, 1], dtype=torch.int32),
    ...     torch.tensor([2], dtype=torch.int32),
    ...     torch.tensor([[0]], dtype=torch.int32),
    ...     return_lse=True,
    ... )
    >>> out[0, 0, 0], lse
    (tensor(2.), tensor([[0.6931]]))
    """
    layer = layer_of(layer)
    check_states(q, k_cache, v_cache, PAGE_NAMES, format)
    check_flag("return_lse", return_lse)
    check_names(batch_fields, BATCH_FIELDS)
    batch = _batch(q, query_start_loc, seq_lens, page_table, batch_fields)
    attn = Attention(
        Shape(
            num_q_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            v_head_dim=v_cache.shape[3] * resolve(format, q.dtype).per_byte,
            dtype=q.dtype,
        ),
        CacheSpec(format=format, page_size=k_cache.shape[1]),
        _limits(batch),
        Features.of(
            [layer],
            lse=return_lse,
            non_causal=batch.causal is not True,
            draft_masks=batch.draft_mask is not None or batch.draft_parents is not None,
        ),
        Options(kernels=kernels),
        q.device,
    )
    cache = attn.wrap_cache(k_cache, v_cache, k_scales, v_scales)
    to: dict[str, Any] = {"out": out, "out_scales": out_scales, "return_lse": return_lse}
    return attn.run(attn.plan(batch), q, cache, layer, **to)


def _batch(
    q: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    others: dict[str, Any],
) -> Batch:
    """The batch of these tensors, with bounds read from them."""
    lengths = {"query_start_loc": query_start_loc, "seq_lens": seq_lens, "page_table": page_table}
    if others.get("encoder_seq_lens") is not None:
        lengths["encoder_seq_lens"] = others["encoder_seq_lens"]
    check_lengths(lengths, q.device, dims={"page_table": 2})
    return Batch(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        page_table=page_table,
        num_requests=len(seq_lens),
        num_tokens=q.shape[0],
        max_query_len=_most(query_start_loc.diff()),
        max_seq_len=_most(seq_lens),
        **others,
    )


def _limits(batch: Batch) -> Limits:
    """Just room enough for one batch."""
    return Limits(
        max_requests=max(1, batch.num_requests),
        max_tokens=max(1, batch.num_tokens),
        max_seq_len=max(1, batch.max_seq_len, _most(batch.key_lens)),
    )


def _most(lens: torch.Tensor) -> int:
    """The largest, or 0 if all are less: that is another check's to say."""
    return max(0, int(lens.max())) if lens.numel() else 0


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over keys that lie one request after another, without pages.

    Args:
        q: [T, Hq, D], model dtype.
        k, v: [Tk, Hkv, D] and [Tk, Hkv, Dv], the same dtype.
        query_start_loc: int32 [R + 1], first query row of each request.
        key_start_loc: int32 [R + 1], first key row of each request.
        **others: layer, kernels, out, return_lse, causal, draft_mask … as for `paged_attention`;
            scales of keys stored in a format that has them: [Tk, Hkv] or [Tk, Hkv, blocks].

    Two requests of one and two keys:

    >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> v = torch.tensor([1.0, 2.0, 4.0])[:, None, None].repeat(1, 1, 16)
    >>> ragged_attention(torch.zeros(3, 1, 16), torch.ones(3, 1, 16), v, starts, starts)[:, 0, 0]
    tensor([1., 2., 3.])
    """
    check_states(q, k, v, KEY_NAMES, others.get("format", "auto"))
    check_names(others, (*RUN_NAMES, *SCALE_NAMES, *BATCH_FIELDS))
    check_lengths({"key_start_loc": key_start_loc}, q.device, dims={})
    check_starts("key_start_loc", key_start_loc, k.shape[0])
    lens = key_start_loc.diff()
    # A page of one token makes any row addressable; entries past a request's end are not read.
    steps = torch.arange(_most(lens), dtype=torch.int32, device=k.device)
    table = key_start_loc[:-1, None] + steps
    for name in SCALE_NAMES:
        if isinstance(others.get(name), torch.Tensor):
            others[name] = others[name].unsqueeze(1)
    return paged_attention(
        q, k.unsqueeze(1), v.unsqueeze(1), query_start_loc, lens, table, **others
    )
