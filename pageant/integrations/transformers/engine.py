"""How Pageant's own engine runs a transformers model: paged caches, one plan a step.

Model layers call an attention function once RoPE is applied. What it needs of the step (plan,
caches, layers) travels as the keyword ``pageant_step`` through ``model.forward`` to every layer:

    shape, layers = layers_of(model)              # once; switches the model to "pageant"
    model(input_ids=[1, T], position_ids=[1, T], use_cache=False,
          pageant_step=Step(attention, plan, cache, layers))

All requests of a batch lie one after another in one row; there is no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pageant.api import Attention
from pageant.cache.pages import PagedCache
from pageant.plan.build import Plan
from pageant.types import Layer, Shape, bad

NAME = "pageant"
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
ROPE_OF_BATCH = frozenset({"dynamic", "longrope"})  # frequencies depend on the longest request


class LayerCall(Protocol):
    """What answers a layer's call: a Step, or the probe of ``layers_of``."""

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **features: Any,
    ) -> torch.Tensor:
        """Out [T, Hq, Dv] of query [T, Hq, D], key [T, Hkv, D] and value [T, Hkv, Dv]."""


@dataclass(frozen=True)
class Step:
    """One planned step, as every layer of one forward sees it."""

    attention: Attention
    plan: Plan
    cache: PagedCache
    layers: Sequence[Layer]

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend; features were read by ``layers_of``."""
        layer, pages = self.layers[layer_index], self.cache[layer_index]
        self.attention.write(self.plan, pages, key, value, layer=layer)
        out = self.attention.run(self.plan, query, pages, layer=layer)
        assert isinstance(out, torch.Tensor)  # no lse was asked for
        return out


def layer_of(features: dict[str, Any]) -> Layer:
    """What a layer passes to its attention function, in our words."""
    sinks = features.get("s_aux")
    return Layer(
        scale=features.get("scaling"),
        window=features.get("sliding_window"),
        soft_cap=features.get("softcap"),
        sinks=None if sinks is None else sinks.detach().float(),
    )


@dataclass
class _Probe:
    """Notes what each layer passes to its attention function."""

    layers: dict[int, Layer] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **features: Any,
    ) -> torch.Tensor:
        self.layers[layer_index] = layer_of(features)
        shape = Shape(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            v_head_dim=value.shape[2],
            dtype=query.dtype,
        )
        if shape not in self.shapes:
            self.shapes.append(shape)
        return query.new_zeros(*query.shape[:2], value.shape[2])


def layers_of(model: Any) -> tuple[Shape, list[Layer]]:
    """Switch a model to "pageant", and learn what its attention layers need.

    One token is sent through the model, and each layer's call is noted: the model itself says
    which scale, window, soft cap and sinks it uses.

    Raises:
        ArgumentError: the model keeps state that pages cannot hold, or its layers differ in shape.
    """
    config = model.config.get_text_config(decoder=True)
    _check(model, config)
    model.set_attn_implementation(NAME)
    probe = _Probe()
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        model(input_ids=token, position_ids=token, use_cache=False, pageant_step=probe)
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise _refuse(model, "every layer calls its attention function once")
    if len(probe.shapes) != 1:
        raise _refuse(model, "all layers have the same heads and head sizes")
    return probe.shapes[0], [probe.layers[index] for index in range(config.num_hidden_layers)]


def _check(model: Any, config: Any) -> None:
    """Refuse what would be silently wrong without a mask or beside other requests."""
    if config.is_encoder_decoder or not getattr(model, "_supports_attention_backend", False):
        raise _refuse(model, "a decoder that takes an attention function")
    if not set(getattr(config, "layer_types", None) or ()) <= LAYER_TYPES:
        raise _refuse(model, f"layer types {', '.join(sorted(LAYER_TYPES))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _refuse(model, "every layer has keys and values of its own")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") in ROPE_OF_BATCH for kind in kinds):
        raise _refuse(model, "RoPE whose frequencies do not depend on the longest request")


def _refuse(model: Any, allowed: str) -> ValueError:
    return bad("model", type(model).__name__, allowed)
