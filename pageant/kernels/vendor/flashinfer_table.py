"""FlashInfer's table kernels, which read lengths and the page table on the device.

    xqa_batch_decode_with_kv_cache       sm90, sm12x: decodes and drafts, with packed masks
    trtllm_batch_decode_with_kv_cache    sm10x: decodes and drafts, with log-sum-exp
    trtllm_batch_context_with_kv_cache   sm10x: prefill

    out = value · softmax(score · q·k) · v

with the layer's scales in both factors. Quantised outputs are written by trtllm-gen itself: fp8
divided by the layer's out_scale, nvfp4 with block scales in tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pageant.cache.formats import resolve
from pageant.cache.out_scales import SwizzledScales
from pageant.cache.pages import LayerCache, PagedCache, layout_for
from pageant.kernels.call import AttentionCall
from pageant.kernels.vendor.common import (
    FP8,
    LN_2,
    Part,
    content_of,
    library,
    number_of,
    parts_of,
    put,
    put_blank,
    query_of,
    room_for,
    score_of,
    starts_of,
    value_of,
    window_left,
)
from pageant.plan.masks import pack_mask
from pageant.select.choose import load_step
from pageant.types import CacheSpec, Scalar, Shape, bad


@dataclass(frozen=True, eq=False)
class Table:
    """A part's requests on the device.

    Attributes:
        query_starts, key_starts: int32 [P + 1], first row and first key of each.
        key_lens: int32 [P].
        pages: int32 [P, W]; what no row needs names some page too.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_lens: torch.Tensor
    pages: torch.Tensor


@dataclass(frozen=True, eq=False)
class Output:
    """Where trtllm-gen writes: rows, in nvfp4 with their scales; and what it is told of scales.

    Attributes:
        out: a tensor, or FlashInfer's FP4Tensor.
        rows: the tensor that holds the rows, or None if they lie where they belong.
        value: the factor on the output.
        block_factor: of nvfp4, the factor on block scales; else None.
    """

    out: Any
    rows: torch.Tensor | None
    value: Scalar
    block_factor: float | None


def xqa(call: AttentionCall) -> None:
    """Decodes and drafts; who of a request's new tokens sees whom is said by bits."""
    found = parts_of(call, apart=False)
    for part in found.parts:
        table, layout = _table(call, part), _layout(call.cache)
        query_len, mask, is_ragged = _drafts(call, part)
        out = room_for(call, part)
        q = query_of(call, part, call.q.dtype)
        out = torch.empty_like(q) if out is None else out
        score, value = _alike(score_of(call, q.dtype), value_of(call), q.device)
        library("decode").xqa_batch_decode_with_kv_cache(
            q,
            content_of(call.cache, layout),
            call.work.room,
            table.pages,
            table.key_lens,
            int(part.key_lens.max()),
            bmm1_scale=score,
            bmm2_scale=value,
            window_left=window_left(call),
            out=out,
            sinks=call.params.sinks,
            kv_layout=layout,
            q_len_per_req=query_len,
            mask=mask,
            q_cu_seq_lens=table.query_starts if is_ragged else None,
        )
        put(call, part, out)
    put_blank(call, found.blank)


def trtllm_decode(call: AttentionCall) -> None:
    """Decodes and drafts, as many for each request or not."""
    found = parts_of(call, apart=False)
    for part in found.parts:
        table, longest = _table(call, part), int(part.query_lens.max())
        is_ragged = bool((part.query_lens != longest).any())
        dtype, wants_lse = call.work.query_dtype, call.lse is not None
        to = _output(call, part)
        result = library("decode").trtllm_batch_decode_with_kv_cache(
            query_of(call, part, dtype),
            content_of(call.cache, "HND"),
            call.work.room,
            table.pages,
            table.key_lens,
            int(part.key_lens.max()),
            bmm1_scale=score_of(call, dtype),
            bmm2_scale=to.value,
            window_left=window_left(call),
            out=to.out,
            o_sf_scale=to.block_factor,
            sinks=None if wants_lse else call.params.sinks,
            kv_layout="HND",
            backend="trtllm-gen",
            q_len_per_req=None if is_ragged else longest,
            max_q_len=longest if is_ragged else None,
            cum_seq_lens_q=table.query_starts if is_ragged else None,
            kv_cache_sf=_block_scales(call.cache),
            return_lse=wants_lse,
        )
        _put(call, part, to, result[1] if wants_lse else None)
    put_blank(call, found.blank)


def trtllm_prefill(call: AttentionCall) -> None:
    """Many new tokens."""
    found = parts_of(call, apart=False)
    for part in found.parts:
        table, dtype, wants_lse = _table(call, part), call.work.query_dtype, call.lse is not None
        cache, pages = call.cache, table.pages
        if cache.k.dtype in FP8 and dtype not in FP8:  # it reads keys of the query's type alone
            cache, pages = _plain(call, table)
        to = _output(call, part)
        result = library("prefill").trtllm_batch_context_with_kv_cache(
            query_of(call, part, dtype),
            content_of(cache, "HND"),
            call.work.room,
            pages,
            table.key_lens,
            int(part.query_lens.max()),
            int(part.key_lens.max()),
            score_of(call, dtype),
            to.value,
            len(part.ids),
            table.query_starts,
            table.key_starts,
            window_left=window_left(call),
            out=to.out,
            o_sf_scale=to.block_factor,
            kv_layout="HND",
            sinks=None if wants_lse else call.params.sinks,
            kv_cache_sf=_block_scales(cache),
            return_lse=wants_lse,
        )
        _put(call, part, to, result[1] if wants_lse else None)
    put_blank(call, found.blank)


def _table(call: AttentionCall, part: Part) -> Table:
    work, device, num_pages = call.work, call.q.device, call.cache.num_pages
    key = ("table", num_pages)
    if key not in work.step:
        lens = torch.from_numpy(part.key_lens.astype("int32")).to(device)
        rows = call.page_table[torch.from_numpy(part.ids).to(device)]
        work.step[key] = Table(
            starts_of(part.query_lens).to(device),
            starts_of(part.key_lens).to(device),
            lens,
            rows.clamp(0, num_pages - 1),
        )
    found: Table = work.step[key]
    return found


def _layout(cache: LayerCache) -> str:
    """Whose rows lie together in a page: a token's heads, or a head's tokens."""
    return "HND" if cache.k.stride(2) > cache.k.stride(1) else "NHD"


def _drafts(call: AttentionCall, part: Part) -> tuple[int, torch.Tensor | None, bool]:
    """Most rows of a request, the packed mask, and whether rows are packed by offsets."""
    if "drafts" not in call.work.step:
        call.work.step["drafts"] = _packed(call, part)
    found: tuple[int, torch.Tensor | None, bool] = call.work.step["drafts"]
    return found


def _packed(call: AttentionCall, part: Part) -> tuple[int, torch.Tensor | None, bool]:
    lens, longest, draft = part.query_lens, int(part.query_lens.max()), call.draft_mask
    is_ragged = bool((lens != longest).any()) or draft is not None
    if draft is not None and (lens > part.total_lens).any():
        raise bad("batch.seq_lens", "less than a request's new tokens", "all of them, for XQA")
    if not is_ragged and longest == 1:
        return 1, None, False
    if not is_ragged and (part.causal == part.causal[0]).all():
        causal = bool(part.causal[0])
        return longest, call.work.masks.uniform(len(lens), longest, causal=causal), False
    width, device = max(longest, 2), call.q.device
    own = torch.from_numpy(lens).to(device).repeat_interleave(torch.from_numpy(lens).to(device))
    column = torch.arange(width, device=device)
    if draft is not None:
        seen = torch.nn.functional.pad(draft[part.rows], (0, max(0, width - draft.shape[1])))
        seen = seen[:, :width]
    else:
        starts = starts_of(lens).to(device)
        row = torch.arange(len(own), device=device) - starts[:-1].repeat_interleave(
            torch.from_numpy(lens).to(device)
        )
        is_causal = torch.from_numpy(part.causal.repeat(lens)).to(device)
        seen = (column <= row[:, None]) | ~is_causal[:, None]
    words = pack_mask(seen & (column < own[:, None]))
    if not is_ragged:
        return longest, words.view(len(lens), longest, -1), False
    return width, words, True


def _alike(score: Scalar, value: Scalar, device: torch.device) -> tuple[Scalar, Scalar]:
    """Two scales: both numbers, or both tensors."""
    if isinstance(score, torch.Tensor) == isinstance(value, torch.Tensor):
        return score, value
    score, value = (
        x if isinstance(x, torch.Tensor) else torch.full((1,), x, device=device)
        for x in (score, value)
    )
    return score, value


def _block_scales(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scales of nvfp4 pages, head by head."""
    if cache.k_scales is None or cache.v_scales is None:
        return None
    return cache.k_scales.transpose(1, 2), cache.v_scales.transpose(1, 2)


def _plain(call: AttentionCall, table: Table) -> tuple[LayerCache, torch.Tensor]:
    """The requests' fp8 codes as numbers of the model's type, and the table to read them by."""
    _, size, heads, dim = call.cache.k.shape
    shape = Shape(
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=call.cache.v.shape[3],
        dtype=call.q.dtype,
    )
    count, device = table.pages.numel(), call.q.device
    memory = layout_for(shape, CacheSpec(page_size=size), 1, count)
    plain = PagedCache(memory, resolve("auto", call.q.dtype), device)[0]
    step = load_step("dequantize_pages", device)
    step(call.cache, table.pages, table.key_lens, (1.0, 1.0), plain)
    pages = torch.arange(count, dtype=torch.int32, device=device).view(table.pages.shape)
    return plain, pages


def _output(call: AttentionCall, part: Part) -> Output:
    value, kind, scale = value_of(call), call.params.out_format, call.params.out_scale
    if kind != "model" and call.lse is not None and call.params.sinks is not None:
        raise bad("return_lse", True, "False with sinks and quantised output, for FlashInfer")
    if kind == "nvfp4":
        return _nvfp4_output(call, part, value)
    size = (int(part.query_lens.sum()), *call.out.shape[1:])
    rows = None
    if isinstance(part.rows, slice) and call.out.dtype != torch.float32:
        rows = call.out[part.rows]
    is_there = rows is not None and rows.is_contiguous()
    dtype = call.q.dtype if kind == "model" else call.out.dtype
    out = rows if is_there else torch.empty(size, dtype=dtype, device=call.q.device)
    factor = 1.0 if kind == "model" else scale
    return Output(out, None if is_there else out, value / factor, None)


def _nvfp4_output(call: AttentionCall, part: Part, value: Scalar) -> Output:
    scales, rows = call.out_scales, part.rows
    if not isinstance(scales, SwizzledScales):
        raise bad("out_scales", "linear", "pageant.SwizzledScales, for FlashInfer's kernels")
    if not isinstance(rows, slice) or not call.out[rows].is_contiguous():
        allowed = "nvfp4 without empty requests among others and with contiguous rows, or another"
        raise bad("layer.out_format", "nvfp4", allowed)
    shape = (rows.stop - rows.start, *call.q.shape[1:])
    start = scales.start_row + rows.start
    make = library("utils").FP4Tensor
    out = make(call.out[rows], scales.scales, scale_start_index=start, original_shape=shape)
    return Output(out, None, value, number_of(call.params.out_scale))


def _put(call: AttentionCall, part: Part, to: Output, lse_log2: torch.Tensor | None) -> None:
    """Store rows and their log-sum-exp, and only then let sinks take their share."""
    sinks = call.params.sinks
    if lse_log2 is not None and sinks is not None:
        share = torch.sigmoid(lse_log2 * LN_2 - sinks)
        to.out.copy_(to.out * share[..., None])
    if to.rows is not None:
        put(call, part, to.rows, lse_log2)
    elif call.lse is not None and lse_log2 is not None:
        call.lse[part.rows] = lse_log2 * LN_2
