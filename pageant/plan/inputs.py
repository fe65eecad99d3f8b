"""What write and run are given, checked against what was declared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pageant.cache.formats import Format
from pageant.cache.pages import LayerCache
from pageant.cache.scales import LOADED, check_scale, is_finite
from pageant.cache.tensors import check_tensor, check_writable
from pageant.plan.batch import Batch
from pageant.types import CacheSpec, Features, Layer, OutFormat, Scalar, Shape, bad

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN = Layer()


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """A Layer with every default and scale resolved: the numbers a kernel computes with.

    Attributes:
        score_scale: factor on q·k: scale, and q_scale and k_scale where those are quantised.
        value_scale: factor on the output: v_scale if the cache is quantised.
        query_scale: q_scale, for kernels that quantise queries: codes are q / query_scale; None for
            queries that came quantised, which are codes already.
        window, soft_cap, sinks, alibi_slopes, out_format: as in Layer.
        out_scale: as in Layer; 1 for outputs that are not quantised.
        score_factors, value_factor: floats [1] on a GPU, or None: q_scale and k_scale, and
            v_scale, where those lie there; kernels multiply by them too.
    """

    score_scale: float
    value_scale: float = 1.0
    query_scale: Scalar | None = 1.0
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    out_format: OutFormat = "model"
    out_scale: Scalar = 1.0
    score_factors: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    value_factor: torch.Tensor | None = None


def partial_params(params: LayerParams, return_lse: bool) -> LayerParams:
    """The parameters of a rank's part, which others merge; raises where it could not be merged."""
    if not return_lse:
        allowed = "True: without a group of ranks a run gives parts, for pageant.ops.merge_states"
        raise bad("return_lse", return_lse, allowed)
    if params.out_format != "model":
        allowed = "model: without a group of ranks a run gives parts, to be quantised when merged"
        raise bad("layer.out_format", params.out_format, allowed)
    return replace(params, sinks=None)


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
    batch: Batch | None,
    device: torch.device,
) -> None:
    """Raise unless run's k and v are both None, or the new keys and values of the batch, if any."""
    if k is None and v is None:
        return
    if k is None or v is None:
        raise bad("k" if k is None else "v", None, "k and v together, or neither")
    num_rows = 0 if batch is None or batch.encoder_seq_lens is not None else batch.num_tokens
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


def check_cache(
    cache: LayerCache | None, shape: Shape, spec: CacheSpec, fmt: Format, device: torch.device
) -> LayerCache:
    """Raise unless the pages are strided tensors of this shape, format and order of scales."""
    if not isinstance(cache, LayerCache):
        raise bad(
            "cache", type(cache).__name__, "one layer of a cache: kv[i], or wrap_cache's result"
        )
    if cache.format is not fmt or cache.v_scale_order != spec.v_scale_order:
        have = f"pages of format {getattr(cache.format, 'name', cache.format)!r}"
        have += f", v_scale_order {cache.v_scale_order!r}"
        raise bad("cache", have, f"{fmt.name}, {spec.v_scale_order}")
    rows = (spec.page_size, shape.num_kv_heads)
    for name, side, dim in zip("kv", cache.sides, (shape.head_dim, shape.value_dim), strict=True):
        want: tuple[int, ...] = (*rows, dim // fmt.per_byte)
        _check_pages(name, side.elements, fmt.element_dtype, want, device)
        if fmt.scale_dtype is None:
            if side.scales is not None:
                raise bad("cache", f"pages with {name}_scales", f"none for format {fmt.name}")
            continue
        want = (*rows, fmt.num_scales(dim)) if fmt.scale_block else rows
        _check_pages(f"{name}_scales", side.scales, fmt.scale_dtype, want, device)
    for name, part in zip(("v", "k_scales", "v_scales"), cache.tensors[1:], strict=False):
        if part.shape[0] != cache.num_pages:
            have = f"{part.shape[0]} pages of {name}"
            raise bad("cache", have, f"{cache.num_pages} pages, as of k")
    return cache


def _check_pages(
    name: str,
    x: torch.Tensor | None,
    dtype: torch.dtype,
    want: tuple[int, ...],
    device: torch.device,
) -> None:
    check_tensor("cache", x, (dtype,), dims=1 + len(want), device=device)
    assert x is not None
    if x.shape[1:] != want:
        allowed = f"[pages, {', '.join(map(str, want))}]"
        raise bad("cache", f"{name} of shape {list(x.shape)}", allowed)
    if len(want) == 3 and want[2] > 1 and x.stride(3) != 1:
        raise bad("cache", f"{name} with content stride {x.stride(3)}", "content stride 1")


def check_cache_writable(cache: LayerCache) -> None:
    """Raise if torch would not let us write to some part of the pages."""
    for part in cache.tensors:
        check_writable("cache", part)


def layer_of(layer: Layer | None) -> Layer:
    """What a call's `layer` means: None is a plain one."""
    if layer is None:
        return PLAIN
    if not isinstance(layer, Layer):
        raise bad("layer", type(layer).__name__, "None, or a pageant.Layer")
    if not isinstance(layer.shares_cache, bool):
        raise bad("layer.shares_cache", layer.shares_cache, "True or False")
    return layer


def resolve_layer(
    layer: Layer,
    features: Features,
    shape: Shape,
    fmt: Format,
    q: torch.Tensor,
    *,
    on_device: bool = False,
) -> LayerParams:
    """The numbers a kernel computes with; `on_device` leaves scales that lie there to the kernel.

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
    cap = layer.soft_cap
    if cap is not None and not (is_finite(cap) and 1e-37 <= cap <= 1e37):
        raise bad("layer.soft_cap", cap, "a number from 1e-37 to 1e37, or None")
    if layer.scale is not None and not (is_finite(layer.scale) and abs(layer.scale) <= 1e30):
        raise bad("layer.scale", layer.scale, "a number from -1e30 to 1e30, or None")
    for name in ("q_scale", "k_scale", "v_scale", "out_scale"):
        check_scale(f"layer.{name}", getattr(layer, name))
    for name in ("sinks", "alibi_slopes"):
        _check_per_head(name, getattr(layer, name), shape.num_q_heads, q.device)
    score = shape.head_dim**-0.5 if layer.scale is None else layer.scale
    q_factor = k_factor = value_factor = None
    if q.dtype in FP8_DTYPES:
        number, q_factor = _split(layer.q_scale, on_device)
        score *= number
    value = 1.0
    if fmt.uses_layer_scales:
        number, k_factor = _split(layer.k_scale, on_device)
        score *= number
        value, value_factor = _split(layer.v_scale, on_device)
    return LayerParams(
        score_scale=score,
        value_scale=value,
        query_scale=None if q.dtype in FP8_DTYPES else layer.q_scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        alibi_slopes=layer.alibi_slopes,
        out_format=layer.out_format,
        out_scale=_out_scale(layer, on_device),
        score_factors=(q_factor, k_factor),
        value_factor=value_factor,
    )


def _split(scale: Scalar, on_device: bool) -> tuple[float, torch.Tensor | None]:
    """A scale as a number, or as one that kernels read because the host cannot without waiting."""
    if on_device and isinstance(scale, torch.Tensor) and not scale.is_cpu:
        one = scale.reshape(1)
        return 1.0, one if one.dtype in LOADED else one.float()
    return float(scale), None


def _out_scale(layer: Layer, on_device: bool) -> Scalar:
    if layer.out_format == "model":
        return 1.0
    number, factor = _split(layer.out_scale, on_device)
    return number if factor is None else factor


def _check_per_head(
    name: str, x: torch.Tensor | None, num_q_heads: int, device: torch.device
) -> None:
    if x is None:
        return
    check_tensor(f"layer.{name}", x, (torch.float32,), dims=1, device=device)
    if x.shape[0] != num_q_heads:
        raise bad(f"layer.{name}", list(x.shape), f"[{num_q_heads}], one a query head")
