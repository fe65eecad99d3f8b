"""Pageant in the place of ``flashinfer``, with what FlashInfer's tests import beside attention."""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import pageant.integrations.flashinfer as ours
from pageant.cache.quantize import dequantize, quantize
from pageant.kernels import reference
from pageant.plan.inputs import LayerParams

SUBMODULES = (
    "attention", "cascade", "decode", "fp4_quantization", "page", "pod", "prefill", "quantization",
    "sparse", "utils", "xqa",
)  # fmt: skip


class SfLayout(enum.Enum):
    """Orders of block scales, by FlashInfer's names."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


def single_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Any:
    """The reference in float32, by plain torch; what it does not know is refused."""
    for name in ("backend", "use_fp16_qk_reduction", "rope_scale", "rope_theta"):
        others.pop(name, None)
    if others or pos_encoding_mode != "NONE":
        raise NotImplementedError(f"the reference of single prefill: {pos_encoding_mode}, {others}")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    window = window_left + 1 if window_left >= 0 else None
    mask = reference.visible(q.shape[0], k.shape[0], causal=causal, window=window, draft=None)
    if custom_mask is not None:
        mask = custom_mask.view(q.shape[0], -1).cpu()
    scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    params = LayerParams(score_scale=scale, soft_cap=logits_soft_cap or None)
    out, lse = reference.attend(q.float(), k.float(), v.float(), mask, params)
    return (out.to(q.dtype), lse / torch.log(torch.tensor(2.0))) if return_lse else out.to(q.dtype)


def single_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """The same for one token [Hq, D]."""
    names = ("kv_layout", "pos_encoding_mode")
    named |= dict(zip(names, args, strict=False))
    named.pop("use_tensor_cores", None)
    result = single_prefill(q[None], k, v, causal=True, **named)
    return result[0] if isinstance(result, torch.Tensor) else (result[0][0], result[1][0])


def nvfp4_quantize(
    x: torch.Tensor, global_scale: torch.Tensor, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as packed elements and linear block scales; values are multiplied by global_scale."""
    layout = others.get("sfLayout", SfLayout.layout_linear)
    if layout is not SfLayout.layout_linear:
        raise NotImplementedError(str(layout))
    codes, scales = quantize(x, "nvfp4", (1.0 / global_scale).float())
    assert scales is not None
    return codes, scales


def e2m1_to_float(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Float32 values of packed rows with linear block scales, on the CPU as FlashInfer has it."""
    shaped = scales.reshape(*codes.shape[:-1], -1).view(torch.float8_e4m3fn)
    return dequantize(codes, shaped, "nvfp4", global_scale)


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def _repeat(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """The one pattern of einops.repeat that FlashInfer's reference of sinks uses."""
    if pattern != "h -> b h m 1":
        raise NotImplementedError(f"einops.repeat {pattern!r}: install einops")
    return x[None, :, None, None].expand(sizes["b"], -1, sizes["m"], -1)


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def install() -> None:
    """Put copies of our modules, and the extra names, where ``import flashinfer`` finds them."""
    singles: dict[str, Callable[..., Any]] = {
        "single_prefill_with_kv_cache": single_prefill,
        "single_decode_with_kv_cache": single_decode,
    }
    major, minor = map(int, os.environ.get("PAGEANT_PEER_CAPABILITY", "9.0").split("."))
    helpers: dict[str, Any] = {
        "has_flashinfer_jit_cache": lambda: True,
        "get_compute_capability": lambda *_: (major, minor),
        "is_sm90a_supported": lambda *_: major == 9,
        "is_fa3_backend_supported": lambda *_, **__: major == 9,
        "is_fa3_prefill_head_dim_supported": lambda *_, **__: major == 9,
        "GPUArchitectureError": type("GPUArchitectureError", (RuntimeError,), {}),
    }
    fp4 = {
        "SfLayout": SfLayout,
        "nvfp4_quantize": nvfp4_quantize,
        "e2m1_and_ufp8sf_scale_to_float": e2m1_to_float,
    }
    root = _module("flashinfer", **{k: v for k, v in vars(ours).items() if not k.startswith("__")})
    root.__path__ = []
    vars(root).update(singles, SfLayout=SfLayout, __getattr__=ours.__getattr__)
    for name in SUBMODULES:
        own = vars(importlib.import_module(f"{ours.__name__}.{name}"))
        module = _module(f"flashinfer.{name}", **own)
        vars(module).update({k: v for k, v in singles.items() if k in own})
        if not callable(getattr(root, name, None)):  # `xqa` is the function in it
            setattr(root, name, module)
    vars(sys.modules["flashinfer.utils"]).update(helpers)
    vars(sys.modules["flashinfer.fp4_quantization"]).update(fp4)
    own = vars(importlib.import_module(f"{ours.__name__}.triton.cascade"))
    triton = _module("flashinfer.triton.cascade", **own)
    setattr(root, "triton", _module("flashinfer.triton", cascade=triton))  # noqa: B010
    _install_jit(root)
    if importlib.util.find_spec("einops") is None:
        _module("einops", repeat=_repeat)
    sys.modules["flashinfer.quantization"].__path__ = []
    _module(
        "flashinfer.quantization.nvfp4_quantization_utils",
        NVFP44Over6Config=type("NVFP44Over6Config", (), {}),
        NVFP44Over6ErrMode=enum.Enum("NVFP44Over6ErrMode", "MSE"),
        nvfp4_e4m3_max=lambda *_, **__: 448.0,
    )


def _install_jit(root: types.ModuleType) -> None:
    """Compilers that compile nothing."""
    names = {torch.float16: "f16", torch.bfloat16: "bf16"}
    variants = _module(
        "flashinfer.jit.attention.variants", attention_sink_decl={"fa2": "", "fa3": ""}
    )
    attention = _module(
        "flashinfer.jit.attention",
        gen_batch_prefill_attention_sink_module=_nothing,
        gen_pod_module=_nothing,
        variants=variants,
    )
    utils = _module("flashinfer.jit.utils", filename_safe_dtype_map=names)
    jit = _module(
        "flashinfer.jit",
        JitSpec=type("JitSpec", (), {}),
        build_jit_specs=_nothing,
        attention=attention,
        utils=utils,
    )
    for package in (jit, attention):
        package.__path__ = []
    setattr(root, "jit", jit)  # noqa: B010
    _module(
        "tests.test_helpers.jit_utils",
        gen_decode_attention_modules=_nothing,
        gen_persistent_batch_attention_modules=_nothing,
        gen_prefill_attention_modules=_nothing,
    )
