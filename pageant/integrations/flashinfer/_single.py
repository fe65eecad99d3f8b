"""Attention of one request in one call; each call plans anew."""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer._inputs import DType, rows
from pageant.integrations.flashinfer._ragged import BatchPrefillWithRaggedKVCacheWrapper
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._setting import Factors
from pageant.types import Scalar


def single_decode_with_kv_cache(  # budget: FlashInfer's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Result:
    """Out [Hq, D], and lse [Hq], of one token q [Hq, D] over k and v [n, Hkv, D]; HND [Hkv, n, D].

    Two keys that weigh the same, and the base-2 logarithm of their number:

    >>> v = torch.tensor([1.0, 3.0])[:, None, None].repeat(1, 1, 16)
    >>> out, lse = single_decode_with_kv_cache(
    ...     torch.zeros(1, 16), torch.ones(2, 1, 16), v, return_lse=True
    ... )
    >>> out[0, 0], lse
    (tensor(2.), tensor([1.]))
    """
    result = single_prefill_with_kv_cache(
        q.unsqueeze(0),
        k,
        v,
        k_scale=_times(q_scale, k_scale),
        v_scale=v_scale,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=return_lse,
        causal=True,
    )
    return result[0] if isinstance(result, torch.Tensor) else (result[0][0], result[1][0])


def _times(first: Scalar | None, second: Scalar | None) -> Scalar | None:
    return second if first is None else first if second is None else first * second


def single_prefill_with_kv_cache(  # budget: FlashInfer's signature
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: DType | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_scale: Scalar | None = None,
    v_scale: Scalar | None = None,
) -> Result:
    """Out [m, Hq, Dv], and lse [m, Hq], of q [m, Hq, D] over k [n, Hkv, D] and v; HND [Hkv, n, D].

    Args:
        scale_q, scale_k, scale_v: float32, one a head, for fp8.
        custom_mask: bool [m, n], in place of `causal`.
        packed_custom_mask: the same as little-endian bits.
        kv_cache_sf: block scales of nvfp4 keys and values, laid out like them.
        k_scale, v_scale: on scores and output.
        others: as in the wrappers' plan.
    """
    k, v = rows(k, kv_layout), rows(v, kv_layout)
    per_byte = 2 if v.dtype == torch.uint8 else 1
    workspace = torch.empty(0, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.tensor([0, q.shape[0]], dtype=torch.int32),
        torch.tensor([0, k.shape[0]], dtype=torch.int32),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2] * per_byte,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        o_data_type=o_dtype,
    )
    factors = Factors(
        k_scale=k_scale, v_scale=v_scale, q_heads=scale_q, k_heads=scale_k, v_heads=scale_v
    )
    scales = None
    if kv_cache_sf is not None:
        scales = rows(kv_cache_sf[0], kv_layout), rows(kv_cache_sf[1], kv_layout)
    return wrapper.attend(q, (k, v), scales, factors, return_lse=return_lse)


def single_prefill_with_kv_cache_return_lse(*args: Any, **others: Any) -> Result:
    """`single_prefill_with_kv_cache` with return_lse=True."""
    return single_prefill_with_kv_cache(*args, **{**others, "return_lse": True})
