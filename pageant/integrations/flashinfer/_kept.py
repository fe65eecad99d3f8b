"""What a wrapper keeps from plan to plan: Attentions, caches it has wrapped, slopes."""

from __future__ import annotations

from typing import Any

import torch

from pageant.api import Attention
from pageant.cache.pages import LayerCache
from pageant.integrations.flashinfer._inputs import alibi_slopes
from pageant.integrations.flashinfer._setting import Setting
from pageant.plan.batch import Batch
from pageant.types import Limits, Options

MOST_KEPT = 8  # configurations of one wrapper
LONGEST = 2**31 - 1


class Kept:
    """Attentions by configuration, and caches by address.

    Caches seen since the plan before the last are remembered, so a cache that was freed elsewhere
    is let go with the second plan after it, or by `forget`.

    Args:
        device: where it computes.
        is_fixed: for CUDA graphs: an Attention, once made, is never replaced by a larger one.
    """

    def __init__(self, device: torch.device, *, is_fixed: bool) -> None:
        self.device, self.is_fixed = device, is_fixed
        self._attentions: dict[Any, Attention] = {}
        self._slopes: dict[int, torch.Tensor] = {}
        self._caches: tuple[dict[Any, LayerCache], dict[Any, LayerCache]] = {}, {}

    def age(self) -> None:
        """Forget caches that nothing asked for since the last time."""
        self._caches = {}, self._caches[0]

    def forget(self) -> None:
        """Forget all caches."""
        self._caches = {}, {}

    def attention(self, setting: Setting, batch: Batch, page_size: int) -> Attention:
        """The kept Attention of a configuration, or a new one with room to grow."""
        features = setting.features(drafts=batch.draft_mask is not None)
        spec = setting.spec(page_size)
        key = (setting.shape, spec, features)
        room = [max(1, n) for n in (batch.num_requests, batch.num_tokens, batch.max_seq_len)]
        kept = self._attentions.get(key)
        if kept is not None:
            held = kept.limits
            had = [held.max_requests, held.max_tokens, held.max_seq_len]
            if all(need <= have for need, have in zip(room, had, strict=True)):
                return kept
            if self.is_fixed:
                allowed = f"{had}, as first planned for CUDA graphs"
                raise ValueError(f"requests, tokens and keys are {room}; allowed: {allowed}")
            room = [max(pair) for pair in zip(room, had, strict=True)]
        if not self.is_fixed:
            room = [min(1 << (n - 1).bit_length(), LONGEST) for n in room]
        if len(self._attentions) >= MOST_KEPT:
            self._attentions.clear()
        limits = Limits(max_requests=room[0], max_tokens=room[1], max_seq_len=room[2])
        # Not "auto": it may choose FlashInfer's own kernels, whose name we may stand in for.
        options = Options(kernels="pageant")
        made = Attention(setting.shape, spec, limits, features, options, self.device)
        self._attentions[key] = made
        return made

    def cache(
        self,
        attention: Attention,
        parts: tuple[torch.Tensor, ...],
        views: tuple[torch.Tensor, ...],
    ) -> LayerCache:
        """The layer's pages for an Attention: those remembered for `parts`, or `views` wrapped.

        Args:
            attention: whose pages they are.
            parts: keys, values and what scales they have, as given.
            views: the same memory in the Attention's pages.
        """
        seen, before = self._caches
        key = (attention, *((x.data_ptr(), x.shape, x.stride(), x.dtype) for x in parts))
        cache = seen.get(key) or before.get(key)
        if cache is None:
            cache = attention.wrap_cache(*views)
        seen[key] = cache
        return cache

    def slopes(self, setting: Setting) -> torch.Tensor | None:
        """ALiBi's, if the setting has it."""
        if not setting.alibi:
            return None
        heads = setting.num_q_heads
        if heads not in self._slopes:
            self._slopes[heads] = alibi_slopes(heads, self.device)
        return self._slopes[heads]
