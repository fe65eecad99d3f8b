"""The function that transformers' layers call, whoever runs the model.

=============================  ==================================================================
who runs it                    how it is known
=============================  ==================================================================
Pageant's engine               the keyword ``pageant_step``
continuous batching            offsets of queries and keys: ``cu_seq_lens_q``, ``cu_seq_lens_k``
``generate``, or one forward   neither; a mask [B, Tk] marks padding, if there is any
=============================  ==================================================================
"""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.ragged import Ragged, Rows
from pageant.integrations.transformers.engine import LayerCall, layer_of
from pageant.types import bad

RAGGED = Ragged()


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pageant_step: LayerCall | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, RoPE applied: query [B, Hq, Tq, D], key and value [B, Hkv, Tk, D].

    Returns:
        Out [B, Tq, Hq, Dv], and None in place of the weights.
    """
    for name in ("dropout", "position_bias", "output_attentions", "block_table"):
        value_of = features.get(name)
        if isinstance(value_of, torch.Tensor) or value_of:
            raise bad(name, "given", "none of it with Pageant's attention")
    if pageant_step is not None:
        if attention_mask is not None or query.shape[0] != 1:
            raise bad("attention_mask", "given or batched", "one packed row without a mask")
        rows = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
        return pageant_step(module.layer_idx, *rows, **features)[None], None
    causal = features.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if features.get("cu_seq_lens_q") is not None:
        key, value = _updated(module, key, value, features)
        return _packed(query, key, value, features, causal=causal), None
    return _batched(query, key, value, attention_mask, features, causal=causal), None


def _updated(
    module: Any, key: torch.Tensor, value: torch.Tensor, features: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of past and new tokens; offsets of this layer replace those of all.

    In some versions of transformers (5.19) the attention function itself writes to the paged
    cache; in others (5.24) the model has done so, and the cache is not given.
    """
    cache = features.get("cache")
    if cache is None or not isinstance(features["cu_seq_lens_k"], dict):
        return key, value
    updated: tuple[torch.Tensor, torch.Tensor] = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=features
    )
    return updated


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    features: dict[str, Any],
    *,
    causal: bool,
) -> torch.Tensor:
    """One row that holds all requests, divided by offsets."""
    starts, key_starts = features["cu_seq_lens_q"], features["cu_seq_lens_k"]
    bounds = int(features["max_length_q"]), int(features["max_length_k"])

    def rows() -> Rows:
        return Rows.between(starts.int(), key_starts.int(), *bounds)

    states = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = states
    step = (starts, key_starts, *bounds, causal)
    out = RAGGED((q.contiguous(), k, v), layer_of(features), step, rows, causal=causal)
    return out.unsqueeze(0)


def _batched(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    features: dict[str, Any],
    *,
    causal: bool,
) -> torch.Tensor:
    """Rows of equal length, each a request; a mask [B, <= Tk] is False where tokens are padding."""
    if mask is not None and mask.dim() != 2:
        raise bad("attention_mask", f"{mask.dim()} dimensions", "None, or [batch, keys]")
    batch, _, tokens, _ = query.shape
    keys = key.shape[2]
    positions = features.get("position_ids") if mask is None and batch == 1 else None

    def rows() -> Rows:
        if mask is not None:
            return _of_mask(mask.bool(), tokens, keys)
        if positions is not None and tokens == keys > 1:
            return _of_positions(positions[0])
        starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        return Rows.between(starts * tokens, starts * keys, tokens, keys)

    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    real = None if mask is None else mask[:, -tokens:].bool().flatten()
    out = q.new_zeros(batch * tokens, q.shape[1], v.shape[2])
    step = (mask, positions, batch, tokens, keys, causal)
    if real is None:
        out = RAGGED((q.contiguous(), k, v), layer_of(features), step, rows, causal=causal)
    else:
        out[real] = RAGGED((q[real], k, v), layer_of(features), step, rows, causal=causal)
    return out.view(batch, tokens, *out.shape[1:])


def _of_mask(mask: torch.Tensor, tokens: int, keys: int) -> Rows:
    """Rows that a mask leaves: its last `tokens` columns are those of the queries.

    >>> rows = _of_mask(torch.tensor([[False, True, True], [True, True, True]]), 2, 3)
    >>> rows.query_start_loc.tolist(), rows.key_lens.tolist(), rows.key_table.tolist()
    ([0, 2, 4], [2, 3], [[1, 2, 0], [3, 4, 5]])
    """
    query_lens = mask[:, -tokens:].sum(1)
    starts = torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int()
    order = (~mask).int().argsort(dim=1, stable=True)  # keys first, in their order
    table = order + torch.arange(len(mask), device=mask.device)[:, None] * keys
    lens = mask.sum(1).int()
    return Rows(starts, table.int(), lens, min(tokens, mask.shape[1]), mask.shape[1])


def _of_positions(positions: torch.Tensor) -> Rows:
    """Requests packed into one row: each begins where positions do not go on.

    >>> _of_positions(torch.tensor([0, 1, 2, 0, 1])).query_start_loc.tolist()
    [0, 3, 5]
    """
    breaks = torch.nonzero(positions.diff() != 1).flatten() + 1
    starts = torch.nn.functional.pad(breaks, (1, 1)).int()
    starts[-1] = len(positions)
    longest = int(starts.diff().max())
    return Rows.between(starts, starts, longest, longest)
