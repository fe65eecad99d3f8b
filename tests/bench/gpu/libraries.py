"""Stand-ins for FlashAttention-3 and FlashInfer: their signatures, our reference's arithmetic."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from pageant.cache.quantize import dequantize
from pageant.kernels.reference import attend, visible
from pageant.plan.inputs import LayerParams


def attention(
    q: list[torch.Tensor],
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    *,
    scale: float,
    causal: bool,
    window_left: int,
    cap: float,
) -> torch.Tensor:
    """Request after request, in float64."""
    params = LayerParams(score_scale=scale, soft_cap=cap or None)
    outs = []
    for rows, k, v in zip(q, keys, values, strict=True):
        window = None if window_left < 0 else window_left + 1
        mask = visible(len(rows), len(k), causal=causal, window=window, draft=None)
        outs.append(attend(rows.double(), k.double(), v.double(), mask, params)[0])
    return torch.cat(outs)


def rows_of(pool: torch.Tensor, pages: torch.Tensor, n: int) -> torch.Tensor:
    assert pool.is_contiguous()
    return pool.flatten(0, 1)[
        (pages[:, None] * pool.shape[1] + torch.arange(pool.shape[1])).view(-1)[:n]
    ]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> torch.Tensor:
    if softcap:
        raise RuntimeError("This flash attention build does not support tanh softcapping.\nmore")
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert (q.dim() == 3) == (cu_seqlens_q is not None) == (max_seqlen_q is not None)
    rows = list(q)
    if cu_seqlens_q is not None:
        assert cu_seqlens_q.dtype == torch.int32
        rows = list(q.split(cu_seqlens_q.diff().tolist()))
    stored = [
        [rows_of(pool, pages, int(n)) for pages, n in zip(page_table, cache_seqlens, strict=True)]
        for pool in (k_cache, v_cache)
    ]
    for parts, descale in zip(stored, (k_descale, v_descale), strict=True):
        for request in range(len(parts)):
            if descale is not None:
                parts[request] = parts[request].float() * descale[request][:, None]
    out = attention(
        rows,
        *stored,
        scale=softmax_scale,
        causal=causal,
        window_left=window_size[0],
        cap=softcap,
    )
    return out.view(q.shape).bfloat16()


class PrefillWrapper:
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str = "auto") -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self.backend = backend

    def plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        *sizes: int,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype | None = None,
    ) -> None:
        assert qo_indptr.dtype == indptr.dtype == indices.dtype == last.dtype == torch.int32
        self.new = qo_indptr.diff().tolist()
        self.pages = indices.split(indptr.diff().tolist())
        self.lens = ((indptr.diff() - 1) * sizes[3] + last).tolist()
        self.sizes, self.dtypes = sizes, (q_data_type, kv_data_type)
        self.options: dict[str, Any] = {
            "scale": sm_scale,
            "causal": causal,
            "window_left": window_left,
            "cap": logits_soft_cap or 0.0,
        }

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        assert self.dtypes == (q.dtype, paged_kv_cache[0].dtype)
        pools = []
        for side, (pool, scale) in enumerate(zip(paged_kv_cache, (k_scale, v_scale), strict=True)):
            if kv_cache_sf is not None:
                pool = dequantize(pool, kv_cache_sf[side], "nvfp4")
            pools.append(pool.float() * scale)
        stored = [
            [rows_of(pool, pages, n) for pages, n in zip(self.pages, self.lens, strict=True)]
            for pool in pools
        ]
        out.copy_(attention(list(q.split(self.new)), *stored, **self.options))
        return out


class DecodeWrapper(PrefillWrapper):
    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert use_tensor_cores
        super().__init__(workspace, layout)

    def plan(self, indptr: torch.Tensor, *others: Any, **options: Any) -> None:
        starts = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(starts, indptr, *others, causal=True, **options)


def xqa(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    workspace: torch.Tensor,
    page_table: torch.Tensor,
    lens: torch.Tensor,
    longest: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    kv_layout: str,
    out: torch.Tensor,
    q_len_per_req: int = 1,
    mask: torch.Tensor | None = None,
) -> None:
    assert longest == int(lens.max())
    if q_len_per_req > 1:
        assert mask is not None
        assert mask.dtype == torch.uint16
        causal = [(1 << row + 1) - 1 for row in range(q_len_per_req)]
        assert mask[0].int().tolist() == [[bits, 0] for bits in causal]
    stored = [
        [rows_of(x, pages, int(n)).float() for pages, n in zip(page_table, lens, strict=True)]
        for x in caches
    ]
    rows = list(q.split(q_len_per_req))
    options: dict[str, Any] = {"causal": True, "window_left": -1, "cap": 0.0}
    out.copy_(attention(rows, *stored, scale=bmm1_scale, **options) * bmm2_scale)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both be imported."""
    modules = {
        "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache},
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
            "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
        },
        "flashinfer.decode": {"xqa_batch_decode_with_kv_cache": xqa},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(__import__("sys").modules, name, module)
