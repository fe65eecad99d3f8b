"""Other libraries on a case: FlashAttention-3, and torch's attention over keys without pages.

Each takes a Setting and returns a Contender, or says why it cannot. They are imported when asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pageant.bench.gpu import flashinfer
from pageant.bench.gpu.setting import Contender, Setting
from pageant.bench.peers import CannotRunError

Make = Callable[[Setting], Contender]


def one_length(setting: Setting) -> int | None:
    """How many new tokens every request has; None if they differ."""
    new = {m for m, _ in setting.case.lengths}
    return new.pop() if len(new) == 1 else None


def fa3(setting: Setting) -> Contender:
    """``flash_attn_with_kvcache`` of FlashAttention-3; an fp8 cache needs fp8 queries there."""
    try:
        module: Any = importlib.import_module("flash_attn_interface")
    except ImportError as error:
        raise CannotRunError(f"flash_attn_interface cannot be imported: {error}") from None
    case, problem, new = setting.case, setting.problem, one_length(setting)
    if case.format not in (None, "fp8_e4m3"):
        raise CannotRunError(f"no {case.format} cache")
    q = problem.q
    options: dict[str, Any] = {
        "page_table": setting.page_table,
        "cache_seqlens": setting.key_lens,
        "softmax_scale": case.head_dim**-0.5,
        "causal": case.causal,
        "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
        "softcap": case.soft_cap or 0.0,
    }
    if case.format is not None:
        q = q.to(torch.float8_e4m3fn)
        size = (len(case.lengths), case.kv_heads)
        for name, scale in (
            ("q_descale", 1.0),
            ("k_descale", setting.layer.k_scale),
            ("v_descale", setting.layer.v_scale),
        ):
            options[name] = torch.full(size, float(scale), device=q.device)
    if new is None:
        lens = torch.tensor([0, *(m for m, _ in case.lengths)], device=q.device)
        options["cu_seqlens_q"] = lens.cumsum(0).to(torch.int32)
        options["max_seqlen_q"] = max(m for m, _ in case.lengths)
    else:
        q = q.view(-1, new, *q.shape[1:])

    def run(copy: int) -> torch.Tensor:
        (k, _), (v, _) = setting.stores[copy]
        out = module.flash_attn_with_kvcache(q, k, v, **options)
        return torch.as_tensor(out).view(problem.q.shape)

    return Contender(run)


def sdpa(setting: Setting, backend: SDPBackend) -> Contender:
    """torch's attention by one backend, over keys that lie gathered already."""
    case, problem = setting.case, setting.problem
    if len(set(case.lengths)) > 1 or any(m != n for m, n in case.lengths):
        raise CannotRunError("is_causal is another mask, unless all keys are new and of one length")
    if case.window is not None or case.soft_cap is not None:
        raise CannotRunError("no window and no soft cap")
    if case.format is not None:
        raise CannotRunError("keys of the model's dtype only")
    requests = len(case.lengths)

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.view(requests, -1, *x.shape[1:]).transpose(1, 2)

    q, keys, values = batched(problem.q), torch.cat(problem.keys), torch.cat(problem.values)
    copies = [(keys.clone(), values.clone()) for _ in range(setting.copies)]

    def run(copy: int) -> torch.Tensor:
        k, v = map(batched, copies[copy])
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(problem.q.shape)

    return Contender(run)


DECODE_PEERS: dict[str, Make] = {
    "fa3": fa3,
    "flashinfer-decode-tc": flashinfer.decode,
    "flashinfer-xqa": flashinfer.xqa,
    "flashinfer-fa2": partial(flashinfer.prefill, backend="fa2"),
}
PREFILL_PEERS: dict[str, Make] = {
    "fa3": fa3,
    "sdpa-flash2": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flashinfer-fa2": partial(flashinfer.prefill, backend="fa2"),
    "flashinfer-fa3": partial(flashinfer.prefill, backend="fa3"),
}
PEERS = {"decode": DECODE_PEERS, "prefill": PREFILL_PEERS}
