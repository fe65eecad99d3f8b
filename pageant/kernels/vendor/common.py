"""What every call of FlashInfer's needs: which requests and rows, pages, queries, numbers, results.

FlashInfer's log-sum-exp is to base 2. Its kernels multiply every value of a tile by a weight, 0 for
those that are hidden: what lies in a request's pages must be finite, seen or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from pageant.cache.pages import LayerCache
from pageant.kernels.call import AttentionCall
from pageant.plan.host_plan import HostWork
from pageant.types import Scalar

IntArray = np.ndarray[Any, Any]
LN_2 = math.log(2.0)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FA3_HEADS = (64, 128, 256)


def library(module: str = "") -> Any:
    """FlashInfer, or a module of it; imported when a kernel first runs."""
    name = f"flashinfer.{module}" if module else "flashinfer"
    try:
        return import_module(name)
    except ImportError as error:
        advice = "`pip install flashinfer-python`, or choose other kernels"
        raise RuntimeError(f"{name} cannot be imported: {error}; {advice}") from error


@dataclass(frozen=True, eq=False)
class Part:
    """Requests that one call of FlashInfer's computes, without rows that see no key.

    Attributes:
        ids: int64 [P], their numbers in the batch.
        query_lens: int64 [P], rows, 1 or more.
        total_lens: int64 [P], keys on all ranks together.
        key_lens: int64 [P], keys that lie here, 1 or more.
        causal: bool [P].
        rows: of q: a slice where they follow each other, else int64 [T] on the device.
    """

    ids: IntArray
    query_lens: IntArray
    total_lens: IntArray
    key_lens: IntArray
    causal: IntArray
    rows: slice | torch.Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """A phase's requests; `blank` rows are in none of the parts, None if there are none."""

    parts: tuple[Part, ...]
    blank: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages of a part's requests, as FlashInfer's wrappers take them.

    Attributes:
        indptr, last_page_len: int32 [P + 1] and [P], on the host.
        indices: int32 on the device.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def parts_of(call: AttentionCall, *, apart: bool) -> Parts:
    """The phase's requests, made once a step.

    Args:
        call: the launch.
        apart: whether causal requests and others cannot go together; a draft mask says it all.
    """
    work: HostWork = call.work
    key = ("parts", apart)
    if key not in work.step:
        work.step[key] = _parts(call, work, apart and call.draft_mask is None)
    found: Parts = work.step[key]
    return found


def _parts(call: AttentionCall, work: HostWork, apart: bool) -> Parts:
    ids = np.arange(work.first, work.last)
    begin, end = work.starts[ids], work.starts[ids + 1]
    total, causal = work.key_lens[ids], work.causal[ids]
    if call.draft_mask is None:  # causal rows before the first key
        begin = np.where(causal, np.maximum(begin, end - total), begin)
    held = call.shard.count(total)
    runs = (end > begin) & (held > 0)
    every = [runs & causal, runs & ~causal] if apart else [runs]
    device, made = call.q.device, []
    is_blank = np.ones(int(work.starts[work.last] - work.starts[work.first]), np.bool_)
    for group in (group for group in every if group.any()):
        first, last = begin[group], end[group]
        numbers = _counted(first, last)
        is_blank[numbers - work.starts[work.first]] = False
        lie_together = bool((first[1:] == last[:-1]).all())
        rows: slice | torch.Tensor = slice(int(first[0]), int(last[-1]))
        if not lie_together:
            rows = torch.from_numpy(numbers).to(device)
        lens = total[group], held[group]
        made.append(Part(ids[group], last - first, *lens, causal[group], rows))
    blank = np.flatnonzero(is_blank) + work.starts[work.first]
    return Parts(tuple(made), torch.from_numpy(blank).to(device) if len(blank) else None)


def _counted(first: IntArray, last: IntArray) -> IntArray:
    """All numbers from each `first` up to its `last`.

    >>> _counted(np.array([2, 7]), np.array([5, 8])).tolist()
    [2, 3, 4, 7]
    """
    lens = last - first
    shift: IntArray = np.repeat(first - np.cumsum(lens) + lens, lens)
    return np.arange(len(shift)) + shift


def starts_of(lens: IntArray) -> torch.Tensor:
    """int32 [P + 1] on the host: where each of some lengths begins.

    >>> starts_of(np.array([2, 3])).tolist()
    [0, 2, 5]
    """
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))


def pages_of(call: AttentionCall, ids: IntArray, low: IntArray, high: IntArray) -> Pages:
    """The pages of keys `low` to `high` of some requests; `low` are multiples of the page size."""
    size = call.cache.page_size
    counts = -(-(high - low) // size)
    owner, first = (
        np.repeat(ids, counts),
        np.repeat(low // size - np.cumsum(counts) + counts, counts),
    )
    places = owner * call.page_table.shape[1] + first + np.arange(len(owner))
    indices = call.page_table.reshape(-1)[torch.from_numpy(places).to(call.page_table.device)]
    last = (high - low) - np.maximum(counts - 1, 0) * size
    return Pages(starts_of(counts), indices, torch.from_numpy(last.astype(np.int32)))


def first_pages(call: AttentionCall, part: Part) -> IntArray:
    """int64 [P]: a multiple of the page size; keys before it are hidden by the window."""
    window, size = call.params.window, call.cache.page_size
    if window is None:
        return np.zeros_like(part.key_lens)
    first = np.maximum(part.total_lens - part.query_lens - window + 1, 0)
    held: IntArray = call.shard.count(first) // size * size
    return held


def window_left(call: AttentionCall) -> int:
    """The window as FlashInfer counts it: without the token itself; -1 for none."""
    return -1 if call.params.window is None else call.params.window - 1


def query_of(call: AttentionCall, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """The part's rows of q, contiguous; as codes where `dtype` is fp8."""
    q, scale = call.q[part.rows], call.params.query_scale
    if dtype in FP8 and scale is not None:
        most = torch.finfo(dtype).max
        q = (q.float() / _on(scale, q.device)).clamp(-most, most)
    return q.to(dtype).contiguous()


def _on(scale: Scalar, device: torch.device) -> Scalar:
    """A scale that can be combined with tensors of a device; the host does not wait for it."""
    if isinstance(scale, torch.Tensor):
        return float(scale) if scale.is_cpu else scale.to(device).float().reshape(1)
    return scale


def score_of(call: AttentionCall, dtype: torch.dtype) -> Scalar:
    """The factor on q·k where queries are of a type: a float, or a float32 [1] on the device."""
    params = call.params
    factors = [factor for factor in params.score_factors if factor is not None]
    score: Scalar = params.score_scale
    for factor in factors:
        score = score * _on(factor, call.q.device)
    if dtype in FP8 and params.query_scale is not None:
        score = score * _on(params.query_scale, call.q.device)
    return score


def value_of(call: AttentionCall) -> Scalar:
    """The factor on the output, likewise."""
    factor = call.params.value_factor
    scale = call.params.value_scale
    return scale if factor is None else scale * _on(factor, call.q.device)


def number_of(scale: Scalar) -> float:
    """A scale as a number, for what takes no tensor: here the host waits."""
    return float(scale)


def content_of(cache: LayerCache, layout: str = "NHD") -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in a layout, whatever their strides."""
    k, v = (strided(x if layout == "NHD" else x.transpose(1, 2)) for x in (cache.k, cache.v))
    return k, v


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same, with the strides of a contiguous tensor along axes of size 1.

    Copy engines look at them, though nobody ever steps along such an axis.

    >>> strided(torch.zeros(2, 1, 4).as_strided((2, 1, 4), (4, 1, 1))).stride()
    (4, 4, 1)
    """
    strides, step = list(x.stride()), 1
    for axis in reversed(range(x.dim())):
        if x.shape[axis] == 1:
            strides[axis] = step
        step = max(step, strides[axis] * x.shape[axis])
    return x.as_strided(x.shape, strides)


def room_for(call: AttentionCall, part: Part) -> torch.Tensor | None:
    """Where the call wants the part's rows, if FlashInfer can write them there itself."""
    if not isinstance(part.rows, slice) or call.out.dtype != call.q.dtype:
        return None
    rows = call.out[part.rows]
    return rows if rows.is_contiguous() else None


def put(
    call: AttentionCall, part: Part, out: torch.Tensor, lse_log2: torch.Tensor | None = None
) -> None:
    """Store the part's rows, unless they lie in their place already, and their log-sum-exp."""
    if not isinstance(part.rows, slice) or call.out[part.rows].data_ptr() != out.data_ptr():
        bits, codes = call.out, out.to(call.out.dtype)
        if bits.itemsize == 1:
            bits, codes = bits.view(torch.uint8), codes.view(torch.uint8)
        bits[part.rows] = codes
    if call.lse is not None and lse_log2 is not None:
        call.lse[part.rows] = lse_log2 * LN_2


def put_blank(call: AttentionCall, blank: torch.Tensor | None) -> None:
    """Store rows that see no key: 0, and -inf."""
    if blank is None:
        return
    bits = call.out.view(torch.uint8) if call.out.itemsize == 1 else call.out
    bits[blank] = 0
    if call.lse is not None:
        call.lse[blank] = -math.inf


def attend(
    call: AttentionCall,
    part: Part,
    wrapper: Any,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of a part and, where the call wants it, their log-sum-exp to base 2."""
    result = wrapper.run(
        query_of(call, part, dtype),
        content_of(call.cache),
        q_scale=number_of(score_of(call, dtype)),
        v_scale=number_of(value_of(call)),
        out=out,
        return_lse=call.lse is not None,
    )
    return result if call.lse is not None else (result, None)


def query_dtype(call: AttentionCall, *, is_masked: bool = False) -> torch.dtype:
    """The type of queries: fp8 where the row says so and FlashInfer then takes fa3."""
    wanted: torch.dtype = call.work.query_dtype
    fa3 = call.work.family == "sm90" and call.q.shape[2] in FA3_HEADS
    fa3 &= call.params.alibi_slopes is None and not is_masked
    return wanted if wanted not in FP8 or fa3 else call.q.dtype


def plan_prefill(
    call: AttentionCall, wrapper: Any, part: Part, pages: Pages, dtype: torch.dtype, **others: Any
) -> Any:
    """Plan a prefill wrapper for a part's rows over some pages."""
    wrapper.plan(
        starts_of(part.query_lens),
        pages.indptr,
        pages.indices,
        pages.last_page_len,
        call.q.shape[1],
        call.cache.k.shape[2],
        call.q.shape[2],
        call.cache.page_size,
        head_dim_vo=call.cache.v.shape[3],
        sm_scale=1.0,
        logits_soft_cap=call.params.soft_cap,
        q_data_type=dtype,
        kv_data_type=call.cache.k.dtype,
        o_data_type=call.q.dtype,
        disable_split_kv=call.work.invariant,
        **{"window_left": window_left(call), **others},
    )
    return wrapper
