"""What the GPU tests share: an attention, pages of noise, and batches on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import pageant

PAGE = 16
SHAPE = pageant.Shape(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def attention(
    limits: pageant.Limits,
    layers: Sequence[pageant.Layer] = (pageant.Layer(),),
    *,
    shape: pageant.Shape = SHAPE,
    cache: pageant.CacheSpec | None = None,
    features: dict[str, Any] | None = None,
    **options: Any,
) -> pageant.Attention:
    """An Attention of our own kernels on the GPU."""
    return pageant.Attention(
        shape,
        cache or pageant.CacheSpec(page_size=PAGE),
        limits,
        pageant.Features.of(layers, lse=True, **(features or {})),
        pageant.Options(kernels="pageant", **options),
        "cuda",
    )


def noise(attn: pageant.Attention, num_pages: int, num_layers: int = 1) -> pageant.PagedCache:
    """A cache of normal numbers."""
    kv = attn.new_cache(num_layers=num_layers, num_pages=num_pages)
    torch.manual_seed(7)
    for layer in range(num_layers):
        for view in (kv[layer].k, kv[layer].v):
            view.copy_(torch.randn(view.shape, device="cuda", dtype=attn.shape.dtype))
    return kv


def rows(count: int, heads: int, dim: int, seed: int = 1) -> torch.Tensor:
    """Queries, keys or values of `count` tokens."""
    rng = torch.Generator("cuda").manual_seed(seed)
    size = (count, heads, dim)
    return torch.randn(size, generator=rng, device="cuda").to(SHAPE.dtype)


def batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    pages: Sequence[int] | None = None,
    **others: Any,
) -> pageant.Batch:
    """Requests whose pages follow each other in `pages`, by default 0, 1, 2, …"""
    ids = iter(range(10**9) if pages is None else pages)
    table = [[int(next(ids)) for _ in range(-(-n // PAGE))] for n in seq_lens]
    made = pageant.Batch.from_lengths(query_lens, seq_lens, table, PAGE, **others)
    tensors = {
        field.name: value.cuda()
        for field in dataclasses.fields(made)
        if isinstance(value := getattr(made, field.name), torch.Tensor)
        and not field.name.endswith("_cpu")
    }
    return dataclasses.replace(made, **tensors)


def random_batch(
    rng: np.random.Generator, limits: pageant.Limits, pool: int, longest: int
) -> pageant.Batch:
    """Up to all requests of the limits, of 0 to `longest` new tokens, on pages of their own."""
    count = int(rng.integers(0, limits.max_requests + 1))
    query_lens, left = [], limits.max_tokens
    for _ in range(count):
        query_lens.append(int(rng.integers(0, min(longest, left) + 1)))
        left -= query_lens[-1]
    seq_lens = [
        int(rng.integers(m, rng.choice([m + 20, limits.max_seq_len]) + 1)) for m in query_lens
    ]
    return batch(query_lens, seq_lens, rng.permutation(pool))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def seconds(launch: Callable[[], Any], times: int) -> float:
    """Device time of one launch, the median over `times` groups of three."""
    for _ in range(3):
        launch()
    spans = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            launch()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 3e3)
    return float(np.median(spans))
