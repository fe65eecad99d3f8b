"""Every mistake that a batch can hold, found before anything is written."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from pageant.cache.tensors import check_tensor
from pageant.plan.batch import Batch
from pageant.ranks import ContextParallel
from pageant.types import Features, Limits, bad

IntArray = np.ndarray[Any, Any]


class Lens(NamedTuple):
    """A batch's lengths, read once.

    Attributes:
        starts: int64 [R + 1], first token of each request.
        query_lens, key_lens: int64 [R].
    """

    starts: IntArray
    query_lens: IntArray
    key_lens: IntArray


def lens_of(batch: Batch) -> Lens:
    """Read the lengths of a batch whose types and shapes are right."""
    starts = batch.query_start_loc.cpu().numpy().astype(np.int64)
    return Lens(starts, np.diff(starts), batch.key_lens.cpu().numpy().astype(np.int64))


def traits_of(batch: Batch) -> Hashable:
    """All that `check_host` looks at; None if something is of a wrong type."""
    try:
        traits = (type(batch), *[_traits(value) for value in vars(batch).values()])
        hash(traits)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return traits


def _traits(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    return value.shape, value.stride(), value.dtype, value.layout, value.device, value.requires_grad


def check_host(batch: Batch, limits: Limits, features: Features, device: torch.device) -> None:
    """Raise for what can be seen without reading device memory: types, shapes, bounds, features."""
    if not isinstance(batch, Batch):
        raise bad("batch", type(batch).__name__, "a pageant.Batch")
    for name, highest in (
        ("num_requests", limits.max_requests),
        ("num_tokens", limits.max_tokens),
        ("max_query_len", None),
        ("max_seq_len", limits.max_seq_len),
    ):
        value = getattr(batch, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise bad(f"batch.{name}", value, "a whole number from 0 up")
        if highest is not None and value > highest:
            raise bad(f"batch.{name}", value, f"at most {highest}, as the limits say")
    if not isinstance(batch.causal, bool | torch.Tensor):
        raise bad("batch.causal", batch.causal, "a bool, or a bool tensor [num_requests]")
    _check_tensors(batch, device)
    if batch.draft_mask is not None and batch.draft_parents is not None:
        raise bad("batch.draft_parents", "given beside draft_mask", "one of the two")
    drafts = batch.draft_mask is not None or batch.draft_parents is not None
    if drafts and not features.draft_masks:
        name = "draft_mask" if batch.draft_mask is not None else "draft_parents"
        raise bad(f"batch.{name}", "given", "None, unless Features(draft_masks=True) is declared")
    if batch.causal is not True and not features.non_causal:
        raise bad(
            "batch.causal", batch.causal, "True, unless Features(non_causal=True) is declared"
        )


def _check_tensors(batch: Batch, device: torch.device) -> None:
    r, t, host = batch.num_requests, batch.num_tokens, torch.device("cpu")
    optional = {"slot_mapping", "draft_mask", "draft_parents", "encoder_seq_lens"}
    optional |= {"query_start_loc_cpu", "seq_lens_cpu", "shared_prefix_lens"}
    mask = batch.draft_mask
    mask_rows = mask.shape[:1] if isinstance(mask, torch.Tensor) else ()
    rows: tuple[tuple[str, torch.dtype, tuple[int | None, ...], torch.device], ...] = (
        ("query_start_loc", torch.int32, (r + 1,), device),
        ("seq_lens", torch.int32, (r,), device),
        ("page_table", torch.int32, (r, None), device),
        ("slot_mapping", torch.int64, (None,), device),
        ("draft_mask", torch.bool, (*(mask_rows or (t,)), batch.max_query_len), device),
        ("draft_parents", torch.int32, (None,), device),
        ("encoder_seq_lens", torch.int32, (r,), device),
        ("query_start_loc_cpu", torch.int32, (r + 1,), host),
        ("seq_lens_cpu", torch.int32, (r,), host),
        ("shared_prefix_lens", torch.int32, (r,), device),
    )
    if isinstance(batch.causal, torch.Tensor):
        rows = (*rows, ("causal", torch.bool, (r,), device))
    for name, dtype, shape, where in rows:
        value, named = getattr(batch, name), f"batch.{name}"
        if value is None and name in optional:
            continue
        check_tensor(named, value, (dtype,), device=where)
        if value.dim() != len(shape) or any(
            want is not None and have != want for want, have in zip(shape, value.shape, strict=True)
        ):
            sizes = ", ".join("any" if want is None else str(want) for want in shape)
            raise bad(named, f"a tensor of shape {list(value.shape)}", f"[{sizes}]")
        if value.numel() > 1 and value.shape[-1] > 1 and value.stride(-1) != 1:
            raise bad(named, f"stride {value.stride(-1)} along the last axis", "stride 1")


def check_values(
    batch: Batch, read: Lens, limits: Limits, page_size: int, shard: ContextParallel
) -> None:
    """Raise for lengths, offsets and parents that contradict each other; reads the tensors."""
    starts, query_lens, key_lens = read
    cross = batch.encoder_seq_lens is not None
    lens = batch.seq_lens.cpu().numpy() if cross else key_lens
    if starts[0] != 0:
        raise bad("batch.query_start_loc[0]", int(starts[0]), "0")
    _check_each("query_start_loc", query_lens >= 0, starts, "not below the entry before it", 1)
    if starts[-1] > batch.num_tokens:
        allowed = f"at most num_tokens, {batch.num_tokens}"
        raise bad("batch.query_start_loc[-1]", int(starts[-1]), allowed)
    allowed = f"at most max_query_len, {batch.max_query_len}, above the entry before it"
    _check_each("query_start_loc", query_lens <= batch.max_query_len, starts, allowed, 1)
    bound = min(batch.max_seq_len, limits.max_seq_len)
    _check_each("seq_lens", (lens >= 0) & (lens <= bound), lens, f"0 to max_seq_len, {bound}")
    name = "encoder_seq_lens" if cross else "seq_lens"
    if cross:
        top = limits.max_seq_len
        _check_each(name, (key_lens >= 0) & (key_lens <= top), key_lens, f"0 to the limit, {top}")
    total = int(key_lens.sum())
    if limits.max_cached_tokens is not None and total > limits.max_cached_tokens:
        raise bad(
            f"the sum of batch.{name}",
            total,
            f"at most {limits.max_cached_tokens}, as the limits say",
        )
    width = batch.page_table.shape[1]
    room = width * page_size
    fits = (shard.count(key_lens) <= room) | (query_lens == 0)
    rows = "" if shard.world == 1 else f" of this rank, one of {shard.world}"
    table = f"page_table is {width} wide, and a page holds {page_size} tokens{rows}"
    _check_each(name, fits, key_lens, f"at most {room}, for {table}")
    real = int(starts[-1])
    for field in ("slot_mapping", "draft_mask", "draft_parents"):
        tensor = getattr(batch, field)
        free = field == "slot_mapping" and cross  # one entry an encoder token
        if tensor is not None and not free and not real <= tensor.shape[0] <= batch.num_tokens:
            allowed = f"{real} (query_start_loc[-1]) to {batch.num_tokens} (num_tokens) rows"
            raise bad(f"batch.{field}", f"{tensor.shape[0]} rows", allowed)
    if batch.draft_parents is not None:
        parents = batch.draft_parents.cpu().numpy()[:real]
        own = np.arange(real) - np.repeat(starts[:-1], query_lens)
        fits = (parents >= -1) & (parents < own)
        _check_each("draft_parents", fits, parents, "-1, or an earlier token of the same request")


def _check_each(
    name: str,
    fits: IntArray,
    values: IntArray,
    allowed: str,
    first: int = 0,
) -> None:
    """Raise for the first value that does not fit; `fits` speaks of values from `first` on."""
    if not fits.all():
        where = first + int(np.argmin(fits))
        raise bad(f"batch.{name}[{where}]", int(values[where]), allowed)
