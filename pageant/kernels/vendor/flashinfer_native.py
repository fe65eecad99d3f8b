"""FlashInfer's native kernels (fa2, fa3), which its wrappers plan on the host.

    BatchDecodeWithPagedKVCacheWrapper       one new token a request
    BatchPrefillWithPagedKVCacheWrapper      many; with a custom mask where drafts have one
    BatchAttentionWithAttentionSinkWrapper   many, with sinks

All are planned with a scale of 1 and told the layer's when they run, so layers whose scales differ
share a plan. Layout: NHD views of any strides.
"""

from __future__ import annotations

from typing import Any

import torch

from pageant.kernels.call import AttentionCall
from pageant.kernels.vendor.common import (
    FA3_HEADS,
    FP8,
    Part,
    attend,
    content_of,
    first_pages,
    library,
    number_of,
    pages_of,
    parts_of,
    plan_prefill,
    put,
    put_blank,
    query_dtype,
    query_of,
    room_for,
    score_of,
    value_of,
    window_left,
)
from pageant.types import bad

SINK_MODULES: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def decode(call: AttentionCall) -> None:
    """One row a request."""
    found = parts_of(call, apart=False)
    for part in found.parts:
        dtype = query_dtype(call)
        run(call, part, _planned_decode(call, part, dtype), dtype)
    put_blank(call, found.blank)


def prefill(call: AttentionCall) -> None:
    """Any number of rows a request; causal requests and others are computed apart."""
    found = parts_of(call, apart=True)
    is_masked = call.draft_mask is not None
    for number, part in enumerate(found.parts):
        dtype = query_dtype(call, is_masked=is_masked)
        run(call, part, _planned_prefill(call, part, dtype, number), dtype)
    put_blank(call, found.blank)


def prefill_with_sinks(call: AttentionCall) -> None:
    """The same with sinks; queries stay as they are, for the output is of their type."""
    found, sinks, dtype = parts_of(call, apart=True), call.params.sinks, call.q.dtype
    for number, part in enumerate(found.parts):
        wrapper = _planned_with_sinks(call, part, number)
        out = wrapper.run(
            query_of(call, part, dtype),
            content_of(call.cache),
            sinks,
            number_of(score_of(call, dtype)),
            v_scale=number_of(value_of(call)),
            out=room_for(call, part),
        )
        put(call, part, out)
    put_blank(call, found.blank)


def run(call: AttentionCall, part: Part, wrapper: Any, dtype: torch.dtype) -> None:
    """Run a planned wrapper over a part's rows and store what comes of it."""
    out, lse = attend(call, part, wrapper, dtype, room_for(call, part))
    put(call, part, out, lse)


def _traits(call: AttentionCall, dtype: torch.dtype) -> tuple[Any, ...]:
    """What layers that share a plan have in common."""
    params = call.params
    return params.window, params.soft_cap, params.alibi_slopes is not None, dtype


def _planned_decode(call: AttentionCall, part: Part, dtype: torch.dtype) -> Any:
    work, key = call.work, ("decode", *_traits(call, dtype))
    if key not in work.step:
        wrapper = work.kept.get(key)
        if wrapper is None:
            make = library().BatchDecodeWithPagedKVCacheWrapper
            wrapper = work.kept[key] = make(work.room, "NHD", use_tensor_cores=True)
        pages = pages_of(call, part.ids, first_pages(call, part), part.key_lens)
        wrapper.plan(
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            call.q.shape[1],
            call.cache.k.shape[2],
            call.q.shape[2],
            call.cache.page_size,
            pos_encoding_mode=_positions(call),
            window_left=window_left(call),
            logits_soft_cap=call.params.soft_cap,
            q_data_type=dtype,
            kv_data_type=call.cache.k.dtype,
            o_data_type=call.q.dtype,
            sm_scale=1.0,
            disable_split_kv=work.invariant,
        )
        work.step[key] = wrapper
    return work.step[key]


def _planned_prefill(call: AttentionCall, part: Part, dtype: torch.dtype, number: int) -> Any:
    work, key = call.work, ("prefill", number, *_traits(call, dtype))
    if key not in work.step:
        key_kept = (*key, call.draft_mask is None)  # a wrapper's first plan chooses its kernel
        wrapper = work.kept.get(key_kept)
        if wrapper is None:
            make = library().BatchPrefillWithPagedKVCacheWrapper
            wrapper = work.kept[key_kept] = make(work.room, "NHD")
        low = first_pages(call, part)
        pages = pages_of(call, part.ids, low, part.key_lens)
        work.step[key] = plan_prefill(
            call,
            wrapper,
            part,
            pages,
            dtype,
            causal=bool(part.causal.all()),
            custom_mask=_custom_mask(call, part, low),
            pos_encoding_mode=_positions(call),
        )
    return work.step[key]


def _planned_with_sinks(call: AttentionCall, part: Part, number: int) -> Any:
    work, key = call.work, ("sinks", number, call.params.window)
    if key not in work.step:
        wrapper = work.kept.get(key)
        if wrapper is None:
            wrapper = work.kept[key] = _sink_wrapper(call)
        pages = pages_of(call, part.ids, first_pages(call, part), part.key_lens)
        work.step[key] = plan_prefill(
            call, wrapper, part, pages, call.q.dtype, causal=bool(part.causal.all())
        )
    return work.step[key]


def _sink_wrapper(call: AttentionCall) -> Any:
    """A wrapper whose kernel FlashInfer compiles now.

    It names that kernel by the type of queries, whether there is a window, and fa2 or fa3, so two
    of different head sizes or cache types cannot live in one process.
    """
    dim, kv_dtype = call.q.shape[2], call.cache.k.dtype
    fa3 = call.work.family == "sm90" and dim in FA3_HEADS and kv_dtype not in FP8
    name, content = (call.q.dtype, call.params.window is None, fa3), (dim, kv_dtype)
    held = SINK_MODULES.setdefault(name, content)
    if held != content:
        allowed = (
            f"{held[0]} over {held[1]}: this process runs that, and FlashInfer's sink kernels "
        )
        raise bad("shape.head_dim", f"{dim} over {kv_dtype}", allowed + "of both have one name")
    return library().BatchAttentionWithAttentionSinkWrapper(
        call.work.room,
        "NHD",
        q_data_type=call.q.dtype,
        kv_data_type=kv_dtype,
        head_dim_qk=dim,
        head_dim_vo=call.cache.v.shape[3],
        window_left=window_left(call),
    )


def _custom_mask(call: AttentionCall, part: Part, low: Any) -> torch.Tensor | None:
    """bool, flat: [m, keys from `low`] of one request after another; None without drafts' own."""
    if call.draft_mask is None:
        return None
    masks = []
    lens = zip(part.ids, part.query_lens, part.key_lens, low, strict=True)
    for request, m, n, first in lens:
        token = int(call.work.starts[request])
        mask = torch.ones(int(m), int(n - first), dtype=torch.bool, device=call.q.device)
        newest = int(min(m, n))
        drafts = call.draft_mask[token : token + int(m), int(m) - newest : int(m)]
        mask[:, mask.shape[1] - newest :] = drafts
        masks.append(mask.flatten())
    return torch.cat(masks)


def _positions(call: AttentionCall) -> str:
    """How FlashInfer biases scores: ALiBi has slopes of its own, which the layer's must be."""
    slopes = call.params.alibi_slopes
    if slopes is None:
        return "NONE"
    if "slopes" not in call.kept:
        own = torch.tensor(alibi_slopes(slopes.shape[0]), device=slopes.device)
        if not torch.allclose(slopes, own, rtol=1e-5, atol=0.0):
            allowed = f"FlashInfer's own of {slopes.shape[0]} heads, for its kernels"
            raise bad("layer.alibi_slopes", "others", allowed)
        call.kept["slopes"] = True
    return "ALIBI"


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8 k / n) for the power of two n within the heads; odd steps of 2n for the rest.

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    whole = 1 << num_heads.bit_length() - 1
    first = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    rest = range(num_heads - whole)
    return first + [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in rest]
