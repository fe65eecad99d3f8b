"""Which k_scale and v_scale fit the keys and values that a layer writes.

A scale maps the largest magnitude that shall not saturate to the largest the format stores:

    fp8     scale = bound / 448 (e4m3) or / 57344 (e5m2)
    nvfp4   scale = bound / (6 * 448): the block that holds the bound then has 448, the largest
            e4m3 number, as its stored scale
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from pageant.cache.formats import Format, resolve
from pageant.types import Layer, bad

Sample = tuple[torch.Tensor, torch.Tensor]
WHOLE = 100.0


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The factors of one layer, for one cache format. Made by ``calibrate``.

    Attributes:
        k_scale, v_scale: what reading multiplies by; for nvfp4 the global factors. 1.0 for formats
            that need none: 16 and 32 bits, or one stored scale a row.
    """

    k_scale: float = 1.0
    v_scale: float = 1.0

    def apply(self, layer: Layer | None = None) -> Layer:
        """The layer (None: a plain one) with these scales.

        >>> Scales(k_scale=0.5, v_scale=2.0).apply(Layer(window=128)).k_scale
        0.5
        """
        return replace(layer or Layer(), k_scale=self.k_scale, v_scale=self.v_scale)


def calibrate(
    samples: Iterable[Sample], format: str = "fp8_e4m3", percentile: float = WHOLE
) -> Scales:
    """Per-tensor scales of one layer, from keys and values that it wrote.

    Args:
        samples: pairs of k [T, Hkv, D] and v [T, Hkv, Dv], floating point, on any device; T may
            differ from pair to pair.
        format: a cache format's name.
        percentile: per cent of all elements whose magnitude shall not saturate, above 0; 100 takes
            the largest. Less gives small values finer steps, and clips the rest.

    Returns:
        The layer's scales. A tensor that is zero everywhere gets 1.0.

    Raises:
        ArgumentError: no element at all, one that is not finite, or a value not allowed.

    One call a layer; for a model: ``[calibrate(pairs, format) for pairs in seen]``.

    >>> k, v = torch.tensor([[[1.0, -896.0]]]), torch.tensor([[[2688.0, 3.0]]])
    >>> calibrate([(k, v)])
    Scales(k_scale=2.0, v_scale=6.0)
    """
    wrong = isinstance(percentile, bool) or not isinstance(percentile, int | float)
    if wrong or not 0 < percentile <= WHOLE:
        raise bad("percentile", percentile, "a number above 0, up to 100")
    if not isinstance(samples, Iterable) or isinstance(samples, torch.Tensor):
        raise bad("samples", type(samples).__name__, "pairs of tensors, k and v")
    pairs = [_checked(index, pair) for index, pair in enumerate(samples)]
    bounds = {}
    for name, tensors in zip("kv", zip(*pairs, strict=True) if pairs else ((), ()), strict=True):
        if not any(x.numel() for x in tensors):
            raise bad("samples", f"without an element of {name}", "at least one token")
        bounds[name] = _bound(f"samples' {name}", tensors, percentile)
    fmt = resolve(format, pairs[0][0].dtype)
    if not fmt.uses_layer_scales:
        return Scales()
    return Scales(k_scale=_scale(bounds["k"], fmt), v_scale=_scale(bounds["v"], fmt))


def _checked(index: int, pair: object) -> Sample:
    name = f"samples[{index}]"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise bad(name, type(pair).__name__, "a pair of tensors, k and v")
    for part, x in zip("kv", pair, strict=True):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            what = x.dtype if isinstance(x, torch.Tensor) else x
            raise bad(f"{name}.{part}", what, "a tensor of floating-point numbers")
        if x.dim() != 3:
            raise bad(f"{name}.{part}", list(x.shape), "[tokens, kv heads, head size]")
    k, v = pair
    if k.shape[:2] != v.shape[:2]:
        raise bad(f"{name}.v", list(v.shape), f"tokens and heads as of k, {list(k.shape)}")
    return k, v


def _bound(name: str, tensors: Iterable[torch.Tensor], percentile: float) -> float:
    """The magnitude that `percentile` per cent of the elements do not exceed."""
    sizes = [x.detach().float().abs().flatten() for x in tensors if x.numel()]
    if not all(bool(x.isfinite().all()) for x in sizes):
        raise bad(name, "not finite everywhere", "numbers without NaN and infinity")
    if percentile == WHOLE:
        return max(float(x.max()) for x in sizes)
    flat = torch.cat(sizes)
    # Rounded first: 99.9 % of 1000 is 999, though not in floating point.
    rank = math.ceil(round(percentile / WHOLE * flat.numel(), 6))
    return float(flat.kthvalue(max(rank, 1)).values)


def _scale(bound: float, fmt: Format) -> float:
    """What reading multiplies by, so that `bound` is the largest value stored exactly.

    A bound so small that float32 would lose the scale gets the smallest normal one.
    """
    if bound == 0.0:
        return 1.0
    largest = fmt.max_value
    if fmt.scale_dtype is not None:
        largest *= torch.finfo(fmt.scale_dtype).max
    return max(bound / largest, torch.finfo(torch.float32).tiny)
