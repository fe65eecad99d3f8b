"""FlashInfer on a case. It compiles its kernels at first use, which can take minutes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from pageant.bench.gpu.setting import Contender, Setting
from pageant.bench.peers import CannotRunError

WORKSPACE_BYTES = 512 << 20
XQA_NEW_TOKENS = 4


def imported(name: str = "flashinfer") -> Any:
    """One of FlashInfer's modules."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise CannotRunError(f"{name} cannot be imported: {error}") from None


def _pages(setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First page of each request and page ids, both flat, and tokens of each last page."""
    table, size = setting.problem.page_table, setting.case.page_size
    starts = torch.tensor([0, *map(len, table)]).cumsum(0).to(torch.int32)
    flat = [page for row in table for page in row]
    indices = torch.tensor(flat, dtype=torch.int32, device=setting.problem.q.device)
    last = [(n - 1) % size + 1 for _, n in setting.case.lengths]
    return starts, indices, torch.tensor(last, dtype=torch.int32)


def _plan_options(setting: Setting) -> dict[str, Any]:
    case, (keys, _) = setting.case, setting.stores[0][0]
    return {
        "sm_scale": case.head_dim**-0.5,
        "window_left": -1 if case.window is None else case.window - 1,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": keys.dtype,
    }


def _require_format(setting: Setting, *formats: str) -> None:
    if setting.case.format not in (None, *formats):
        raise CannotRunError(f"no {setting.case.format} cache")


def _sizes(setting: Setting) -> tuple[int, int, int, int]:
    case = setting.case
    return case.q_heads, case.kv_heads, case.head_dim, case.page_size


def _runs(setting: Setting, wrapper: Any, q: torch.Tensor, plan: Any) -> Contender:
    layer, out = setting.layer, torch.empty_like(setting.problem.q)
    options: dict[str, Any] = {"out": out}
    if setting.case.format is not None:
        options |= {"k_scale": float(layer.k_scale), "v_scale": float(layer.v_scale)}

    def run(copy: int) -> torch.Tensor:
        (k, k_scales), (v, v_scales) = setting.stores[copy]
        scales = {} if k_scales is None else {"kv_cache_sf": (k_scales, v_scales)}
        wrapper.run(q, (k, v), **options, **scales)
        return out

    plan()
    return Contender(run, plan, plans_on_host=True)


def _workspace(setting: Setting, num_bytes: int = WORKSPACE_BYTES) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=setting.problem.q.device)


def decode(setting: Setting) -> Contender:
    """The decode wrapper, with tensor cores: its fa2 kernel."""
    _require_format(setting, "fp8_e4m3", "nvfp4")
    if any(m != 1 for m, _ in setting.case.lengths):
        raise CannotRunError("one new token a request only")
    wrapper = imported().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(setting), "NHD", use_tensor_cores=True
    )
    pages, options = _pages(setting), _plan_options(setting)

    def plan() -> None:
        wrapper.plan(*pages, *_sizes(setting), **options)

    return _runs(setting, wrapper, setting.problem.q, plan)


def prefill(setting: Setting, backend: str) -> Contender:
    """The prefill wrapper, by one backend."""
    case = setting.case
    _require_format(setting, "fp8_e4m3", *(["nvfp4"] if backend == "fa2" else []))
    if case.is_decode and case.drafts == 0:
        raise CannotRunError("the decode wrapper runs the same kernel")
    wrapper = imported().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(setting), "NHD", backend=backend
    )
    pages, options, q = _pages(setting), _plan_options(setting), setting.problem.q
    if backend == "fa3" and case.format is not None:  # it wants both of one type
        q = q.to(torch.float8_e4m3fn)
        options |= {"q_data_type": q.dtype, "o_data_type": case.dtype}
    starts = torch.tensor([0, *(m for m, _ in case.lengths)]).cumsum(0).to(torch.int32)

    def plan() -> None:
        wrapper.plan(starts, *pages, *_sizes(setting), causal=case.causal, **options)

    return _runs(setting, wrapper, q, plan)


def xqa(setting: Setting) -> Contender:
    """TensorRT-LLM's decode kernel, which needs no plan."""
    _require_format(setting, "fp8_e4m3")
    case, problem, layer = setting.case, setting.problem, setting.layer
    new = {m for m, _ in case.lengths}
    if len(new) > 1 or max(new) > XQA_NEW_TOKENS:
        raise CannotRunError(f"as many new tokens for all requests, at most {XQA_NEW_TOKENS}")
    call = imported("flashinfer.decode").xqa_batch_decode_with_kv_cache
    workspace, out = _workspace(setting, WORKSPACE_BYTES // 2), torch.empty_like(problem.q)
    scales: dict[str, float] = {"bmm1_scale": case.head_dim**-0.5, "bmm2_scale": 1.0}
    if case.format is not None:
        scales["bmm1_scale"] *= float(layer.k_scale)
        scales["bmm2_scale"] = float(layer.v_scale)
    options: dict[str, Any] = {"kv_layout": "NHD", "out": out, **scales}
    (count,) = new
    if count > 1:  # bit c of row i: whether new token i sees new token c
        mask = torch.zeros(len(case.lengths), count, 2, dtype=torch.int32)
        mask[:, :, 0] = torch.tensor([(2 << row) - 1 for row in range(count)])
        options |= {"q_len_per_req": count, "mask": mask.to(torch.uint16).to(problem.q.device)}
    longest = max(n for _, n in case.lengths)

    def run(copy: int) -> torch.Tensor:
        (k, _), (v, _) = setting.stores[copy]
        call(problem.q, (k, v), workspace, setting.page_table, setting.key_lens, longest, **options)
        return out

    return Contender(run)
