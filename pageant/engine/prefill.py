"""Run whole texts through a model and its paged cache, one text a step, every logit kept.

The engine samples one token a request; measuring a model, or watching its layers, needs all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pageant.api import Attention
from pageant.cache.calibrate import Sample
from pageant.cache.pages import PagedCache
from pageant.integrations.transformers import LayerCall, Step, layers_of
from pageant.plan.batch import Batch
from pageant.types import CacheSpec, Features, Layer, Limits, Options, Shape

ON_DEVICE = ("query_start_loc", "seq_lens", "page_table", "slot_mapping")


class Prefill:
    """A model with a cache that holds one text at a time.

    Args:
        model: a transformers model prepared by ``integrations.transformers.layers_of``.
        shape, layers: what that returned; the layers may carry scales.
        max_tokens: tokens of the longest text.
        cache: format, page size and layout.
        options: how the attention works.
        shared: the cache of another one like this, just used for the same text: it is read, and
            nothing is written. None makes a cache.
    """

    def __init__(
        self,
        model: Any,
        shape: Shape,
        layers: Sequence[Layer],
        *,
        max_tokens: int,
        cache: CacheSpec | None = None,
        options: Options | None = None,
        shared: PagedCache | None = None,
    ) -> None:
        self.model, self.layers = model, layers
        if shared is not None:
            self.layers = [replace(layer, shares_cache=True) for layer in layers]
        self.attention = Attention(
            shape,
            cache,
            Limits(max_requests=1, max_tokens=max_tokens, max_seq_len=max_tokens),
            Features.of(layers),
            options,
            model.device,
        )
        self.page_size = self.attention.cache.page_size
        num_pages = -(-max_tokens // self.page_size)
        self.cache = shared or self.attention.new_cache(num_layers=len(layers), num_pages=num_pages)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], seen: list[list[Sample]] | None = None) -> torch.Tensor:
        """Compute one text from its start.

        Args:
            tokens: 1 to max_tokens token ids.
            seen: one list a layer; each gets the layer's new keys and values.

        Returns:
            Logits [T, V] in the model's dtype.
        """
        plan = self.attention.plan(self._batch(len(tokens)))
        step: LayerCall = Step(self.attention, plan, self.cache, self.layers)
        if seen is not None:
            step = _Watched(step, seen)
        device = self.model.device
        output = self.model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.arange(len(tokens), device=device)[None],
            use_cache=False,
            pageant_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _batch(self, num_tokens: int) -> Batch:
        pages = list(range(-(-num_tokens // self.page_size)))
        batch = Batch.from_lengths([num_tokens], [num_tokens], [pages], self.page_size)
        moved = {name: getattr(batch, name).to(self.model.device) for name in ON_DEVICE}
        return replace(batch, **moved)


@dataclass(frozen=True)
class _Watched:
    """Notes each layer's keys and values, then answers as the step does."""

    step: LayerCall
    seen: list[list[Sample]]

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **features: Any,
    ) -> torch.Tensor:
        self.seen[layer_index].append((key, value))
        return self.step(layer_index, query, key, value, **features)


def observe(model: Any, texts: Sequence[Sequence[int]]) -> list[list[Sample]]:
    """The keys and values that each layer writes for these texts, through an unquantised cache.

    Args:
        model: a transformers model for causal language modelling; switched to Pageant's attention.
        texts: token ids of each, none empty.

    Returns:
        For each layer what ``pageant.calibrate`` takes: one pair of k [T, Hkv, D] and
        v [T, Hkv, Dv] a text.
    """
    shape, layers = layers_of(model)
    prefill = Prefill(model, shape, layers, max_tokens=max(map(len, texts)))
    seen: list[list[Sample]] = [[] for _ in layers]
    for text in texts:
        prefill.run(text, seen)
    return seen


def first_tokens(texts: Sequence[Sequence[int]], count: int, longest: int) -> list[list[int]]:
    """The first `count` tokens of all texts together, at most `longest` of each.

    >>> first_tokens([[1, 2, 3], [], [4, 5, 6]], 5, 10)
    [[1, 2, 3], [4, 5]]
    """
    taken: list[list[int]] = []
    for text in texts:
        room = min(longest, count - sum(map(len, taken)))
        if piece := list(text[: max(room, 0)]):
            taken.append(piece)
    return taken
