"""FlashInfer's calls without a wrapper: block tables and lengths are given to each layer's call.

What Pageant keeps from call to call (an Attention for each configuration) hangs on the workspace
tensor, which like FlashInfer's serves one stream at a time, and goes with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from pageant.cache.out_scales import SwizzledScales
from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import Cache, DType, dtype_of, sides
from pageant.integrations.flashinfer._lengths import Keys, Queries
from pageant.integrations.flashinfer._runner import Runner
from pageant.integrations.flashinfer._setting import Factors, Setting
from pageant.integrations.flashinfer.absent import refuse
from pageant.integrations.flashinfer.utils import FP4Tensor
from pageant.plan.masks import unpack_mask
from pageant.types import Scalar

_RUNNERS: Any = WeakTensorKeyDictionary()  # workspace -> its Runner


def _runner_of(workspace: torch.Tensor, device: torch.device) -> Runner:
    if workspace not in _RUNNERS:
        _RUNNERS[workspace] = Runner(device)
    runner: Runner = _RUNNERS[workspace]
    return runner


def attend(
    given: tuple[torch.Tensor, Cache, Cache | None, str],
    workspace: torch.Tensor,
    queries: Queries,
    keys: tuple[torch.Tensor, torch.Tensor, int],
    setting: Setting,
    factors: Factors,
    outs: tuple[torch.Tensor | FP4Tensor | None, torch.Tensor | None, bool],
    drafts: torch.Tensor | None = None,
) -> Any:
    """Plan and run one call.

    Args:
        given: query, cache, its block scales, kv_layout.
        workspace: what keeps the Attention.
        queries: the new tokens.
        keys: block_tables, seq_lens and the longest.
        setting: types, window and causality; sizes are filled in here.
        factors: scales and sinks.
        outs: out, lse, return_lse.
        drafts: bool [T, longest], who sees whom among new tokens.
    """
    q, cache, scales, kv_layout = given
    pair = _sides(cache, kv_layout)
    table, lens, longest = keys
    per_byte = 2 if pair[0].dtype == torch.uint8 else 1
    setting = replace(
        setting,
        num_q_heads=q.shape[1],
        num_kv_heads=pair[0].shape[2],
        head_dim=q.shape[2],
        v_head_dim=pair[1].shape[3] * per_byte,
        q_dtype=q.dtype,
        kv_dtype=pair[0].dtype,
    )
    page_size = pair[0].shape[1]
    where = Keys(
        lens=_lengths.on(lens, q.device),
        table=_lengths.on(table, q.device),
        page_size=page_size,
        longest=min(longest, table.shape[1] * page_size),
        host=lens.int() if lens.is_cpu else None,
    )
    runner = _runner_of(workspace, q.device)
    runner.plan(setting, queries, where, drafts=drafts)
    out, lse, return_lse = outs
    result = runner.run(
        q,
        pair,
        None if scales is None else sides(scales, kv_layout),
        factors,
        out=_rows(out, q, setting) if isinstance(out, FP4Tensor) else out,
        out_scales=_block_scales(out) if isinstance(out, FP4Tensor) else None,
        lse=lse,
        return_lse=return_lse,
    )
    if not isinstance(out, FP4Tensor):
        return result
    return out if isinstance(result, torch.Tensor) else (out, result[1])


def _sides(cache: Cache, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(cache, torch.Tensor) and cache.dim() > 1 and cache.shape[1] == 1:
        refuse("a cache whose dimension 1 is 1")
    return sides(cache, kv_layout)


def _rows(out: FP4Tensor, q: torch.Tensor, setting: Setting) -> torch.Tensor:
    return out.data.view(q.shape[0], setting.num_q_heads, setting.out_width)


def _block_scales(out: FP4Tensor) -> SwizzledScales:
    return SwizzledScales(out.scale, out.scale_start_index)


def blank(q: torch.Tensor, out_dtype: torch.dtype, **others: Any) -> Setting:
    """A setting whose sizes `attend` fills in."""
    formats = {torch.float8_e4m3fn: "fp8_e4m3", torch.uint8: "nvfp4"}
    return Setting(
        num_q_heads=0,
        num_kv_heads=0,
        head_dim=0,
        v_head_dim=0,
        q_dtype=q.dtype,
        kv_dtype=q.dtype,
        out_dtype=out_dtype,
        scale=1.0,
        out_format=formats.get(out_dtype, "model"),  # type: ignore[arg-type]
        **others,
    )


def output(
    q: torch.Tensor,
    out: torch.Tensor | FP4Tensor | None,
    out_dtype: DType | None,
    o_sf_scale: Scalar | None,
    o_sf_vec_size: int | None,
    value_dim: int,
) -> tuple[torch.Tensor | FP4Tensor | None, torch.dtype]:
    """Where nvfp4 output goes, made if need be; and the type of the output's elements."""
    if out_dtype != "nvfp4" and not isinstance(out, FP4Tensor):
        named = None if out_dtype is None else dtype_of(out_dtype)
        if isinstance(out, torch.Tensor):
            if named not in (None, out.dtype):
                raise ValueError(f"out is of {out.dtype}; allowed: {named}, the out_dtype")
            return out, out.dtype
        return out, named or q.dtype
    if o_sf_scale is None:
        raise ValueError("o_sf_scale is None; allowed for nvfp4 output: a number")
    if o_sf_vec_size not in (None, 16):
        raise ValueError(f"o_sf_vec_size is {o_sf_vec_size}; allowed: 16")
    if isinstance(out, torch.Tensor):
        raise ValueError("out is a torch.Tensor; allowed for nvfp4 output: an FP4Tensor")
    if out is None:
        tokens, heads, _ = q.shape
        size = (-(-tokens // 128) * 128, -(-(heads * value_dim // 16) // 4) * 4)
        out = FP4Tensor(
            q.new_zeros((tokens, heads, value_dim // 2), dtype=torch.uint8),
            torch.zeros(size, dtype=torch.uint8, device=q.device).view(torch.float8_e4m3fn),
        )
    return out, torch.uint8


def is_nvfp4(cache: Cache) -> bool:
    """Whether the cache holds packed nvfp4."""
    return (cache if isinstance(cache, torch.Tensor) else cache[0]).dtype == torch.uint8


def draft_mask(mask: torch.Tensor | None, queries: Queries) -> torch.Tensor | None:
    """bool [T, longest] of XQA's packed words, uint16 [B, q_len, ..] or [T, ..]."""
    if mask is None or not queries.longest:
        return None
    return unpack_mask(mask.reshape(-1, mask.shape[-1]), queries.longest)
