"""Encoder-only layers: a token sees all tokens of its request, and nothing is cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pageant.integrations.ragged import Ragged, Rows
from pageant.types import Layer, bad

ATTEND = Ragged()  # Attentions and plans, kept from step to step


@dataclass(eq=False)
class EncoderMetadata:
    """One step of encoder-only layers.

    Attributes:
        query_start_loc: int32 [R + 1].
        max_query_len: bound on a request's tokens.
        num_actual_tokens: tokens, padding included.
        num_real_tokens: tokens without padding.
    """

    query_start_loc: torch.Tensor
    max_query_len: int
    num_actual_tokens: int
    num_real_tokens: int

    @classmethod
    def of(cls, common: Any) -> EncoderMetadata:
        """From vLLM's CommonAttentionMetadata."""
        real = int(common.query_start_loc_cpu[-1])
        bounds = common.max_query_len, common.num_actual_tokens
        return cls(common.query_start_loc, *bounds, real)

    def rows(self) -> Rows:
        """Each request's keys are its own tokens."""
        starts, longest = self.query_start_loc, self.max_query_len
        return Rows.between(starts, starts, longest, longest)


def check(layer: Layer) -> None:
    """Raise for what would mean something else where tokens see what follows them."""
    for name, value in (("sliding_window", layer.window), ("alibi_slopes", layer.alibi_slopes)):
        if value is not None:
            raise bad(name, "given", "None for encoder_only attention, which looks both ways")


def attend(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: Layer,
    metadata: EncoderMetadata,
    output: torch.Tensor,
) -> None:
    """Attend; rows past the real tokens are left alone.

    Args:
        states: q [>= T, Hq, D], k and v [>= T, Hkv, D].
        layer: what the layer needs.
        metadata: the step's.
        output: [>= T, Hq, D], written in place.
    """
    real = metadata.num_real_tokens
    q, k, v = (x[:real] for x in states)
    output[:real] = ATTEND((q, k, v), layer, (metadata,), metadata.rows, causal=False)
