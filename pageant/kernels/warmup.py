"""Everything an Attention may launch, compiled before it is needed.

Whatever differs between launches is gone through: layers, kinds of batches, outputs. Each is run
once on a few zeros; on a GPU nothing is launched, the kernels are only compiled, in parallel.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch

from pageant.cache.pages import LayerCache
from pageant.plan.batch import Batch
from pageant.types import Features, Layer, Shape, bad

Progress = Callable[[int, int], None]


def layers_of(features: Features, num_q_heads: int, device: torch.device) -> list[Layer]:
    """A layer for every combination of what the features declare.

    >>> features = Features(windows=(None, 128), sinks=True)
    >>> [(one.window, one.sinks is not None) for one in layers_of(features, 8, torch.device("cpu"))]
    [(None, False), (None, True), (128, False), (128, True)]
    """
    heads = torch.zeros(num_q_heads, device=device)
    choices = (
        features.windows,
        (None, heads) if features.sinks else (None,),
        (None, 30.0) if features.soft_cap else (None,),
        (None, heads) if features.alibi else (None,),
        features.out_formats,
    )
    return [
        Layer(window=window, sinks=sinks, soft_cap=cap, alibi_slopes=slopes, out_format=out)  # type: ignore[arg-type]
        for window, sinks, cap, slopes, out in itertools.product(*choices)
    ]


def batches_of(
    features: Features, tokens: int, device: torch.device, *, shares: bool = False
) -> Iterator[Batch]:
    """A batch of one request, for every kind of batch that the features declare.

    Args:
        features: of the Attention.
        tokens: of each batch.
        device: where its tensors lie.
        shares: whether batches with a hint of shared prefixes are of another kind.
    """
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    causal: list[bool | torch.Tensor] = [True]
    if features.non_causal:
        causal += [False, torch.zeros(1, dtype=torch.bool, device=device)]
    drafts: list[torch.Tensor | None] = [None]
    if features.draft_masks:
        drafts.append(torch.full((tokens,), -1, dtype=torch.int32, device=device))
    hints = [None, torch.zeros_like(starts[1:])] if shares else [None]
    for sees, parents, hint in itertools.product(causal, drafts, hints):
        yield Batch(
            query_start_loc=starts,
            seq_lens=starts[1:],
            page_table=torch.zeros(1, tokens, dtype=torch.int32, device=device),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            num_requests=1,
            num_tokens=tokens,
            max_query_len=tokens,
            max_seq_len=tokens,
            causal=sees,
            draft_parents=parents,
            shared_prefix_lens=hint,
        )


def queries_of(shape: Shape, layer: Layer, tokens: int, device: torch.device) -> list[torch.Tensor]:
    """Queries a layer may be given: one, and an fp8 one if its scale lies in a tensor."""
    size = (tokens, shape.num_q_heads, shape.head_dim)
    query = torch.zeros(size, dtype=shape.dtype, device=device)
    scaled = isinstance(layer.q_scale, torch.Tensor)
    return [query, query.to(torch.float8_e4m3fn)] if scaled else [query]


def scales_of(shape: Shape, layer: Layer, tokens: int, device: torch.device) -> torch.Tensor | None:
    """Room for the block scales of a layer's output, if it has any."""
    if layer.out_format != "nvfp4":
        return None
    blocks = shape.num_q_heads * shape.value_dim // 16
    return torch.zeros(tokens, blocks, device=device).to(torch.float8_e4m3fn)


class _FarCache(LayerCache):
    """Passes for one of 2**31 elements or more."""

    @property
    def is_far(self) -> bool:
        return True


def caches_of(attn: Any) -> list[LayerCache]:
    """New caches of every kind: small ones, and where code differs, what passes for a large one."""
    cache = attn.new_cache(num_layers=1, num_pages=1)[0]
    if not attn.explain().rows["decode"].is_planned_on_device:
        return [cache]
    return [cache, _FarCache(**{part.name: getattr(cache, part.name) for part in fields(cache)})]


def warm_up(
    attn: Any,
    cache: LayerCache | None,
    layers: Iterable[Layer] | None,
    progress: Progress | None,
    forget: Callable[[], None],
) -> None:
    """Go through all that an Attention may be asked for; see ``Attention.warmup``.

    Args:
        attn, cache, layers, progress: as there.
        forget: called at the end, with or without an error: drops what was only tried.
    """
    place, shape, limits, answer = attn.device, attn.shape, attn.limits, attn.explain()
    if layers is not None and not isinstance(layers, Iterable):
        raise bad("layers", type(layers).__name__, "pageant.Layer values, in a list")
    layers = layers_of(attn.features, shape.num_q_heads, place) if layers is None else list(layers)
    for layer in layers:
        if not isinstance(layer, Layer):
            raise bad("layers", layer, "pageant.Layer values, in a list")
    ranks, lses = attn.options.context_parallel, (False, True) if attn.features.lse else (False,)
    if ranks is not None and ranks.group is None:  # whose parts others merge
        layers, lses = [one for one in layers if one.out_format == "model"], (True,)
    tokens = min(answer.decode_threshold + 1, limits.max_tokens, limits.max_seq_len)
    tokens = min(tokens, limits.max_cached_tokens or tokens)
    caches = caches_of(attn) if cache is None else [cache]
    with ExitStack() as stack:
        stack.callback(forget)
        if answer.rows["decode"].is_planned_on_device:
            stack.enter_context(_compiling(progress))
        for batch in batches_of(attn.features, tokens, place, shares=answer.shares_prefixes):
            plan = attn.plan(batch)
            k = torch.zeros(tokens, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
            v = torch.zeros(tokens, shape.num_kv_heads, shape.value_dim, dtype=shape.dtype)
            for layer, kv in itertools.product(layers, caches):
                attn.write(plan, kv, k.to(place), v.to(place), layer)
                to = {"out_scales": scales_of(shape, layer, tokens, place)}
                for q in queries_of(shape, layer, tokens, place):
                    for lse in lses:
                        attn.run(plan, q, kv, layer, **to, return_lse=lse)


@contextmanager
def _compiling(progress: Progress | None) -> Iterator[None]:
    """Within it launches only compile; leaving it waits for all of them."""
    from pageant.plan.bound import compiling_only  # only for GPUs is Triton needed

    with ThreadPoolExecutor(processors()) as pool:
        with compiling_only(pool) as futures:
            yield
        for done, future in enumerate(as_completed(futures.values()), start=1):
            future.result()
            if progress is not None:
                progress(done, len(futures))


def processors() -> int:
    """How many threads may compile at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
