"""What write and run are given, checked against what was declared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch

from pageant.cache.formats import Format
from pageant.cache.pages import LayerCache
from pageant.plan.batch import Batch
from pageant.plan.tensors import check_tensor
from pageant.types import Features, Layer, OutFormat, Scalar, Shape, bad

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN = Layer()


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """A Layer with every default and scale resolved: the numbers a kernel computes with.

    Attributes:
        score_scale: factor on q·k: scale, and q_scale and k_scale where those are quantised.
        value_scale: factor on the output: v_scale if the cache is quantised.
        window, soft_cap, sinks, alibi_slopes, out_format: as in Layer.
        out_scale: as in Layer; 1 for outputs that are not quantised.
    """

    score_scale: float
    value_scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    out_format: OutFormat = "model"
    out_scale: float = 1.0


def check_new_rows(
    k: torch.Tensor, v: torch.Tensor, shape: Shape, num_tokens: int, device: torch.device
) -> None:
    """Raise unless k is [>= T, Hkv, D] and v [>= T, Hkv, Dv], model dtype, any strides."""
    for name, x, dim in (("k", k, shape.head_dim), ("v", v, shape.value_dim)):
        check_rows(name, x, (num_tokens, shape.num_kv_heads, dim), (shape.dtype,), device)


def check_unpaged(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    shape: Shape,
    batch: Batch,
    device: torch.device,
) -> None:
    """Raise unless run's k and v are both None, or the batch's new keys and values."""
    if k is None and v is None:
        return
    if k is None or v is None:
        raise bad("k" if k is None else "v", None, "k and v together, or neither")
    num_rows = batch.num_tokens if batch.encoder_seq_lens is None else 0
    check_new_rows(k, v, shape, num_rows, device)


def check_query(q: torch.Tensor, shape: Shape, num_tokens: int, device: torch.device) -> None:
    """Raise unless q is [>= T, Hq, D], model dtype or fp8."""
    least = (num_tokens, shape.num_q_heads, shape.head_dim)
    check_rows("q", q, least, (shape.dtype, *FP8_DTYPES), device)
    if q.stride(-1) != 1:
        raise bad("q", f"content stride {q.stride(-1)}", "content stride 1")


def check_rows(
    name: str,
    x: torch.Tensor,
    least: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise unless `x` is of one of the types and three sizes, the first perhaps larger."""
    check_tensor(name, x, dtypes, device=device)
    if x.dim() != 3 or tuple(x.shape[1:]) != least[1:] or x.shape[0] < least[0]:
        raise bad(name, list(x.shape), f"[at least {least[0]}, {least[1]}, {least[2]}]")


def check_cache(cache: LayerCache, shape: Shape, fmt: Format, page_size: int) -> None:
    """Raise unless the pages are of this shape and format."""
    if not isinstance(cache, LayerCache):
        raise bad(
            "cache", type(cache).__name__, "one layer of a cache: kv[i], or wrap_cache's result"
        )
    if cache.k.dtype != fmt.element_dtype or cache.v.dtype != fmt.element_dtype:
        raise bad("cache", f"{cache.k.dtype} and {cache.v.dtype}", f"two of {fmt.element_dtype}")
    if cache.k.shape[:3] != cache.v.shape[:3]:
        raise bad("cache", f"{list(cache.v.shape)} for v", f"pages as of k, {list(cache.k.shape)}")
    have = (cache.format.name, *cache.k.shape[1:], cache.v.shape[3])
    sizes = (dim // fmt.per_byte for dim in (shape.head_dim, shape.value_dim))
    want = (fmt.name, page_size, shape.num_kv_heads, *sizes)
    if have != want:
        names = "(format, page_size, kv heads, elements a key, elements a value)"
        raise bad("cache", have, f"{want}, that is {names}")
    for side, dim in zip(cache.sides, (shape.head_dim, shape.value_dim), strict=True):
        size = (*side.elements.shape[:3], *([fmt.num_scales(dim)] if fmt.scale_block else []))
        scales = side.scales
        stored = None if scales is None else (scales.dtype, tuple(scales.shape))
        if stored != (None if fmt.scale_dtype is None else (fmt.scale_dtype, size)):
            raise bad("cache", "pages with other scales", f"{fmt.scale_dtype} scales {list(size)}")


def layer_of(layer: Layer | None) -> Layer:
    """What a call's `layer` means: None is a plain one."""
    if layer is None:
        return PLAIN
    if not isinstance(layer, Layer):
        raise bad("layer", type(layer).__name__, "None, or a pageant.Layer")
    return layer


def resolve_layer(
    layer: Layer, features: Features, shape: Shape, fmt: Format, q: torch.Tensor
) -> LayerParams:
    """The numbers a kernel computes with.

    Raises:
        ArgumentError: for a value that is not allowed, or a feature that was not declared.
    """
    if layer.window not in features.windows or isinstance(layer.window, bool | float):
        raise bad("layer.window", layer.window, f"one of the declared {features.windows}")
    if layer.out_format not in features.out_formats:
        raise bad(
            "layer.out_format", layer.out_format, f"one of the declared {features.out_formats}"
        )
    for name, declared in (("soft_cap", features.soft_cap), ("sinks", features.sinks)):
        if getattr(layer, name) is not None and not declared:
            raise bad(f"layer.{name}", "given", f"None, unless Features({name}=True) is declared")
    if layer.alibi_slopes is not None and not features.alibi:
        raise bad("layer.alibi_slopes", "given", "None, unless Features(alibi=True) is declared")
    if layer.soft_cap is not None and not (_is_finite(layer.soft_cap) and layer.soft_cap > 0):
        raise bad("layer.soft_cap", layer.soft_cap, "a finite number above 0, or None")
    if layer.scale is not None and not _is_finite(layer.scale):
        raise bad("layer.scale", layer.scale, "a finite number, or None")
    for name in ("sinks", "alibi_slopes"):
        _check_per_head(name, getattr(layer, name), shape.num_q_heads, q.device)
    score = shape.head_dim**-0.5 if layer.scale is None else layer.scale
    if q.dtype in FP8_DTYPES:
        score *= _number("layer.q_scale", layer.q_scale)
    value = 1.0
    if fmt.uses_layer_scales:
        score *= _number("layer.k_scale", layer.k_scale)
        value = _number("layer.v_scale", layer.v_scale)
    return LayerParams(
        score_scale=score,
        value_scale=value,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        alibi_slopes=layer.alibi_slopes,
        out_format=layer.out_format,
        out_scale=1.0
        if layer.out_format == "model"
        else _number("layer.out_scale", layer.out_scale),
    )


def _check_per_head(
    name: str, x: torch.Tensor | None, num_q_heads: int, device: torch.device
) -> None:
    if x is None:
        return
    check_tensor(f"layer.{name}", x, (torch.float32,), dims=1, device=device)
    if x.shape[0] != num_q_heads:
        raise bad(f"layer.{name}", list(x.shape), f"[{num_q_heads}], one a query head")


def _is_finite(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, Real):  # numpy's numbers are Real too
        return False
    return math.isfinite(number)


def check_scale(name: str, scale: Scalar) -> None:
    """Raise unless the scale is one number; what a tensor holds is not read."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise bad(name, list(scale.shape), "a float, or a tensor of one element")
        if scale.is_complex() or scale.dtype == torch.bool or scale.is_meta:
            have = "a meta tensor" if scale.is_meta else scale.dtype
            raise bad(name, have, "a float, or a tensor that holds a real number")
    elif not _is_finite(scale) or scale <= 0:
        raise bad(name, scale, "a finite number above 0, or a tensor of one element")


def _number(name: str, scale: Scalar) -> float:
    check_scale(name, scale)
    return float(scale)
