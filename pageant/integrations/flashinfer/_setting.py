"""What a plan fixes and what a run brings, as Pageant's shapes, features and layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.integrations.flashinfer._inputs import (
    FP8,
    LN_2,
    LOG2_E,
    format_of,
    product,
    to_number,
)
from pageant.integrations.flashinfer.absent import refuse
from pageant.types import CacheSpec, Features, Layer, OutFormat, Scalar, Shape


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan fixes for its runs.

    Attributes:
        num_q_heads, num_kv_heads, head_dim, v_head_dim: Hq, Hkv, D and Dv.
        q_dtype, kv_dtype, out_dtype: of what is given and returned; uint8 keys are nvfp4.
        scale: factor on q·k.
        window, soft_cap, alibi, causal: as in Pageant.
        out_format: "model", "fp8_e4m3" or "nvfp4".
        swizzled: whether nvfp4's V scales are.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    out_dtype: torch.dtype
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    causal: bool = True
    out_format: OutFormat = "model"
    swizzled: bool = False

    @property
    def shape(self) -> Shape:
        """Of Pageant's layer: the query's type, or where that is fp8 the output's."""
        model = self.q_dtype
        if model in FP8:
            model = torch.bfloat16 if self.out_format != "model" else self.out_dtype
        if model.itemsize == 1:
            raise ValueError(f"o_data_type is {model}; allowed for fp8 queries: 16 or 32 bits")
        return Shape(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=model,
        )

    def spec(self, page_size: int) -> CacheSpec:
        """Of pages of that size."""
        order = "swizzled" if self.swizzled else "linear"
        return CacheSpec(
            format=format_of(self.kv_dtype),
            page_size=page_size,
            v_scale_order="swizzled" if order == "swizzled" else "linear",
        )

    def features(self, *, drafts: bool) -> Features:
        """What its layers may ask for; whether there are sinks is known only when one runs."""
        return Features(
            windows=(self.window,),
            soft_cap=self.soft_cap is not None,
            sinks=True,
            alibi=self.alibi,
            draft_masks=drafts,
            non_causal=not self.causal,
            lse=True,
            out_formats=(self.out_format,),
        )

    @property
    def has_scales(self) -> bool:
        """Whether Pageant multiplies keys and values of this cache by scales of the layer."""
        return self.kv_dtype.itemsize == 1

    @property
    def out_width(self) -> int:
        """Elements of `out` for one head."""
        return self.v_head_dim // 2 if self.out_format == "nvfp4" else self.v_head_dim


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What one layer's run brings.

    Attributes:
        q_scale, k_scale, v_scale: per tensor, on scores (two) and output.
        q_heads, k_heads, v_heads: float32 [Hq], [Hkv] and [Hkv]: the same for each head.
        sinks: float32 [Hq].
        scale: in place of the planned factor on q·k.
        out_scale: fp8 output is divided by it, nvfp4 multiplied.
    """

    q_scale: Scalar | None = None
    k_scale: Scalar | None = None
    v_scale: Scalar | None = None
    q_heads: torch.Tensor | None = None
    k_heads: torch.Tensor | None = None
    v_heads: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    scale: float | None = None
    out_scale: Scalar = 1.0


@dataclass(frozen=True)
class Rest:
    """What a Layer cannot say: `query` multiplies q before, `value` the output after."""

    query: Scalar | None = None
    value: Scalar | None = None


def layer_of(setting: Setting, given: Factors, slopes: torch.Tensor | None) -> tuple[Layer, Rest]:
    """The layer of a run, and the factors that a layer has no place for.

    A scale on a GPU is never read here: over quantised caches kernels load it; over others it
    multiplies the query, or the output.
    """
    score = to_number(product(given.q_scale, given.k_scale))
    value = 1.0 if given.v_scale is None else to_number(given.v_scale)
    scale = setting.scale if given.scale is None else given.scale
    k_scale: Scalar = 1.0
    query: Scalar | None = None
    if not isinstance(score, torch.Tensor):
        scale *= score
    elif setting.has_scales:
        k_scale = score
    else:
        query = score
    v_scale: Scalar = 1.0
    after: Scalar | None = None
    is_usable = isinstance(value, torch.Tensor) or value > 0
    if setting.has_scales and is_usable:
        v_scale = value
    elif isinstance(value, torch.Tensor) or value != 1.0:
        after = value
    out_scale = given.out_scale
    if after is not None and setting.out_format == "fp8_e4m3":
        out_scale, after = out_scale / after, None
    if after is not None and setting.out_format == "nvfp4":
        out_scale, after = out_scale * after, None
    group = setting.num_q_heads // setting.num_kv_heads
    query = _by_head(query, given.q_heads, 1)
    query = _by_head(query, given.k_heads, group)
    after = _by_head(after, given.v_heads, group)
    if after is not None and setting.out_format != "model":
        refuse("v_scale per head with quantised output")
    sinks = given.sinks
    layer = Layer(
        scale=scale,
        window=setting.window,
        soft_cap=setting.soft_cap,
        sinks=sinks if sinks is None or sinks.dtype == torch.float32 else sinks.float(),
        alibi_slopes=slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        out_format=setting.out_format,
        out_scale=out_scale,
    )
    return layer, Rest(query, after)


def _by_head(factor: Scalar | None, heads: torch.Tensor | None, repeat: int) -> Scalar | None:
    """A factor times one for each head, as [Hq, 1]."""
    if heads is None:
        return factor
    column = heads.float().reshape(-1, 1).repeat_interleave(repeat, 0)
    return column if factor is None else column * factor


def scaled_query(q: torch.Tensor, shape: Shape, factor: Scalar | None) -> torch.Tensor:
    """The query with what a layer cannot say multiplied in, rounded to the model's type."""
    return q if factor is None else (q.float() * factor).to(shape.dtype)


def to_base_2(natural: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """FlashInfer's lse of Pageant's: base 2, sinks included."""
    whole = natural if sinks is None else torch.logaddexp(natural, sinks.expand_as(natural))
    return whole * LOG2_E


def to_natural(lse: torch.Tensor) -> torch.Tensor:
    """Pageant's lse of FlashInfer's, without sinks."""
    return lse.float() * LN_2
