"""The values a caller declares: shapes, cache, limits, features, options, layers.

One word per idea, everywhere in the package:

=======  ============================================================
R        requests of a batch; ``m`` new tokens and ``n`` keys in all each
T        tokens of a batch, all requests' new tokens one after another
Hq, Hkv  query heads, key/value heads; G = Hq / Hkv query heads a group
D, Dv    head size of queries and keys; head size of values and outputs
P, N     pages of the pool; tokens a page (``page_size``)
W        width of the page table (pages), or a window (tokens)
slot     page * N + row: where a token lies in the pool
tile     a rectangle of work inside a kernel; never a page
=======  ============================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pageant.ranks import ContextParallel

Scalar = float | torch.Tensor
OutFormat = Literal["model", "fp8_e4m3", "nvfp4"]


class ArgumentError(ValueError):
    """A mistake of the caller's: names the argument, its value and what is allowed.

    >>> raise bad("page_size", 0, "a whole number from 1 up")
    Traceback (most recent call last):
    pageant.types.ArgumentError: page_size is 0; allowed: a whole number from 1 up
    """

    def __init__(self, message: str, argument: str) -> None:
        super().__init__(message)
        self.argument = argument


def bad(argument: str, value: object, allowed: str) -> ArgumentError:
    """The error for a value that is not allowed, in the one form all such errors have."""
    return ArgumentError(f"{argument} is {value!r}; allowed: {allowed}", argument)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and element type of one attention layer's queries, keys and values.

    Attributes:
        num_q_heads, num_kv_heads: Hq and Hkv; the first is a multiple of the second.
        head_dim, v_head_dim: D and Dv, multiples of 8 from 16 to 512; v_head_dim None means D.
        dtype: model type of queries and outputs: float32, float16 or bfloat16.

    >>> Shape(num_q_heads=32, num_kv_heads=8, head_dim=192, v_head_dim=128).value_dim
    128
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def value_dim(self) -> int:
        """Dv: head size of values and outputs."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def group_size(self) -> int:
        """G: query heads that share one key/value head."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """How keys and values are stored.

    Attributes:
        format: a name from ``pageant.cache.formats``; "auto" stores the model's own dtype.
        page_size: tokens a page, from 1 up.
        layout: memory order of the axes: one of ``pageant.cache.layout.LAYOUTS``.
        v_scale_order: of nvfp4's stored V scales, "linear" or "swizzled" (for SM10x kernels).
    """

    format: str = "auto"
    page_size: int = 16
    layout: str = "LBHNC"
    v_scale_order: Literal["linear", "swizzled"] = "linear"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds of every batch; buffers and the workspace are sized by them once.

    Attributes:
        max_requests: requests a batch.
        max_tokens: new tokens a batch, padding included.
        max_seq_len: keys a request.
        max_cached_tokens: keys of all requests of a batch together; None means no bound of its own.
    """

    max_requests: int = 256
    max_tokens: int = 8192
    max_seq_len: int = 131072
    max_cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What may differ from layer to layer within one plan. Everything is optional.

    Attributes:
        scale: factor on q·k; None means D ** -0.5.
        window: W keys a row sees at most, itself included; None means all.
        soft_cap: c in ``c * tanh(s / c)``; None means no cap.
        sinks: float32 [Hq] on the device: exp(sink) joins each head's denominator once.
        alibi_slopes: float32 [Hq] on the device: adds ``slope * (key - query position)``.
        q_scale: multiplies scores if the query given to ``run`` is quantised.
        k_scale, v_scale: read factors of a quantised cache, 1 for others.
        out_scale: of a quantised output: fp8 is divided by it, nvfp4 multiplied.
        out_format: "model", "fp8_e4m3" or "nvfp4".
        shares_cache: this layer reads another layer's cache and never writes.

    Scales are floats or one-element tensors (CPU or device), read each time the layer runs.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    q_scale: Scalar = 1.0
    k_scale: Scalar = 1.0
    v_scale: Scalar = 1.0
    out_scale: Scalar = 1.0
    out_format: OutFormat = "model"
    shares_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class Features:
    """What layers and batches may ask for. Kernels are chosen by it, once; the rest is refused.

    Attributes:
        windows: every window that occurs; None stands for layers without one.
        soft_cap, sinks, alibi: whether any layer has one.
        draft_masks: batches may carry a draft mask or draft parents.
        non_causal: batches may be non-causal.
        lse: ``run(return_lse=True)`` is allowed.
        out_formats: every output format that occurs.

    >>> features = Features.of([Layer(window=128, soft_cap=30.0), Layer()], lse=True)
    >>> features == Features(windows=(128, None), soft_cap=True, lse=True)
    True
    """

    windows: tuple[int | None, ...] = (None,)
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    draft_masks: bool = False
    non_causal: bool = False
    lse: bool = False
    out_formats: tuple[str, ...] = ("model",)

    @classmethod
    def of(cls, layers: Iterable[Layer], **others: Any) -> Features:
        """The features these layers need; name those of batches (lse=…, non_causal=…) yourself."""
        layers = list(layers if isinstance(layers, Iterable) else [layers]) or [Layer()]
        for other in (layer for layer in layers if not isinstance(layer, Layer)):
            raise bad("layers", other, "pageant.Layer values, in a list")
        return cls(
            windows=tuple(dict.fromkeys(layer.window for layer in layers)),
            soft_cap=any(layer.soft_cap is not None for layer in layers),
            sinks=any(layer.sinks is not None for layer in layers),
            alibi=any(layer.alibi_slopes is not None for layer in layers),
            out_formats=tuple(dict.fromkeys(layer.out_format for layer in layers)),
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """How Pageant should work, as opposed to what it computes.

    Attributes:
        kernels: "auto", "pageant", "flashinfer", "reference", or one row's name (runs or raises).
        invariant: a request's bits do not depend on its batch, chunks or pages; nothing is shared.
        speculative_tokens: draft tokens a decode may carry besides its own.
        context_parallel: this rank's shard, or None.
        quantize_query: allow kernels to quantise the query for a quantised cache.
        table_kernels: FlashInfer's kernels that read page tables: None by its own rule, or forced.
        adaptive: lengths on the device may differ from the host's.
        non_causal_drafts: a drafter runs non-causally over its draft tokens.
        validate: check device values too (synchronises on a GPU).
        plan_slots: plans that may be alive at once.
        cascade: compute keys that decodes share once, where it pays; ``Plan.shared`` says which.
            Never with invariant, nor with ALiBi on several ranks. On a GPU for batches that bring
            ``shared_prefix_lens``, on one rank.
        debug_splits: force this many key splits a request; for tests.
    """

    kernels: str = "auto"
    invariant: bool = False
    speculative_tokens: int = 0
    context_parallel: ContextParallel | None = None
    quantize_query: bool = True
    table_kernels: bool | None = None
    adaptive: bool = False
    non_causal_drafts: bool = False
    validate: bool = False
    plan_slots: int = 1
    cascade: bool = True
    debug_splits: int | None = None

    @property
    def world(self) -> int:
        """Ranks that share every sequence."""
        return 1 if self.context_parallel is None else self.context_parallel.world


@dataclass(frozen=True)
class Support:
    """Whether a configuration works, and if not, which argument stands in the way and why."""

    ok: bool
    reason: str | None = None
    argument: str | None = None

    def __bool__(self) -> bool:
        return self.ok
