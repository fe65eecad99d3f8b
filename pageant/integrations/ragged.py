"""Attention over keys that lie one request after another; kernels and plans are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pageant.api import Attention
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.types import CacheSpec, Features, Layer, Limits, Shape


class Rows(NamedTuple):
    """Which rows of queries and keys belong to which request.

    Attributes:
        query_start_loc: int32 [R + 1], first query row of each request.
        key_table: int32 [R, W], rows of each request's keys, in order.
        key_lens: int32 [R], how many of them are its keys.
        max_query_len, max_key_len: bounds.
    """

    query_start_loc: torch.Tensor
    key_table: torch.Tensor
    key_lens: torch.Tensor
    max_query_len: int
    max_key_len: int

    @classmethod
    def between(
        cls, query: torch.Tensor, key: torch.Tensor, max_query_len: int, max_key_len: int
    ) -> Rows:
        """Rows between offsets: int32 [R + 1], of queries and of keys.

        >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> Rows.between(starts, starts, 2, 2).key_table
        tensor([[0, 1],
                [1, 2]], dtype=torch.int32)
        """
        steps = torch.arange(max_key_len, dtype=torch.int32, device=key.device)
        return cls(query, key[:-1, None] + steps, key.diff(), max_query_len, max_key_len)


class _Setting(NamedTuple):
    """What an Attention is made for."""

    shape: Shape
    features: Features
    device: torch.device


@dataclass
class _Kept:
    """An Attention, its limits, and the plan of the step that its key names."""

    attention: Attention
    limits: Limits
    key: tuple[object, ...] = ()
    plan: Plan | None = None


class Ragged(threading.local):
    """Attention over loose rows. Each thread has Attentions and plans of its own.

    A page of one token makes any row addressable, so keys are read where they are.
    """

    def __init__(self) -> None:
        self.kept: dict[_Setting, _Kept] = {}

    def __call__(
        self,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        layer: Layer,
        key: tuple[object, ...],
        rows: Callable[[], Rows],
        *,
        causal: bool = True,
    ) -> torch.Tensor:
        """Attend.

        Args:
            states: q [T, Hq, D], k [Tk, Hkv, D] and v [Tk, Hkv, Dv].
            layer: what the layer needs.
            key: names the step: as long as each part is the same object, `rows` are too.
            rows: makes them, once a step.
            causal: whether later keys are hidden.

        Returns:
            Out [T, Hq, Dv]; rows of no request are 0.
        """
        q, k, v = states
        shape = Shape(
            num_q_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[2],
            v_head_dim=v.shape[2],
            dtype=q.dtype,
        )
        setting = _Setting(shape, Features.of([layer], non_causal=not causal), q.device)
        kept, plan = self._planned(setting, q.shape[0], key, rows, causal=causal)
        cache = kept.attention.wrap_cache(k.unsqueeze(1), v.unsqueeze(1))
        out = kept.attention.run(plan, q, cache, layer)
        assert isinstance(out, torch.Tensor)  # no lse was asked for
        return out

    def _planned(
        self,
        setting: _Setting,
        num_tokens: int,
        key: tuple[object, ...],
        rows: Callable[[], Rows],
        *,
        causal: bool,
    ) -> tuple[_Kept, Plan]:
        """The Attention of a setting, and its plan of this step."""
        kept = self.kept.get(setting)
        key = (*key, num_tokens)
        if kept is not None and kept.plan is not None and _same(kept.key, key):
            return kept, kept.plan
        made = rows()
        batch = Batch(
            query_start_loc=made.query_start_loc,
            seq_lens=made.key_lens,
            page_table=made.key_table,
            num_requests=len(made.key_lens),
            num_tokens=num_tokens,
            max_query_len=made.max_query_len,
            max_seq_len=made.max_key_len,
            causal=causal,
        )
        if kept is None or not _fits(batch, kept.limits):
            kept = self.kept[setting] = _make(setting, batch)
        kept.key, kept.plan = key, kept.attention.plan(batch)
        return kept, kept.plan


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Whether two keys name the same step: tensors by identity, the rest by value."""
    return len(one) == len(other) and all(
        a is b or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b)
        for a, b in zip(one, other, strict=True)
    )


def _fits(batch: Batch, limits: Limits) -> bool:
    return (
        batch.num_requests <= limits.max_requests
        and batch.num_tokens <= limits.max_tokens
        and batch.max_seq_len <= limits.max_seq_len
    )


def _make(setting: _Setting, batch: Batch) -> _Kept:
    """An Attention with room for the batch, and for others up to twice as large."""
    limits = Limits(
        max_requests=_room(batch.num_requests),
        max_tokens=_room(batch.num_tokens),
        max_seq_len=_room(batch.max_seq_len),
    )
    attention = Attention(
        setting.shape, CacheSpec(page_size=1), limits, setting.features, device=setting.device
    )
    return _Kept(attention, limits)


def _room(size: int) -> int:
    """The next power of two.

    >>> _room(0), _room(5), _room(8)
    (1, 8, 8)
    """
    return 1 << max(0, size - 1).bit_length()
