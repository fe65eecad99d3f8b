"""Which token comes next, by transformers' own logits processors.

Each request has a generator of its own, so its tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from pageant.engine.request import Sampling


class Sampler:
    """Draws one request's tokens.

    Args:
        sampling: temperature above 0, top_p and seed.
        device: where the logits lie.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._processors = LogitsProcessorList(
            [TemperatureLogitsWarper(float(sampling.temperature))]
        )
        if sampling.top_p < 1:
            self._processors.append(TopPLogitsWarper(float(sampling.top_p)))
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._no_ids = torch.empty(1, 0, dtype=torch.int64, device=device)

    def draw(self, logits: torch.Tensor) -> int:
        """The next token of logits [V]."""
        scores = self._processors(self._no_ids, logits.float()[None])
        probabilities = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def choose_tokens(logits: torch.Tensor, samplers: list[Sampler | None]) -> list[int]:
    """The next token of each row of logits [S, V]; rows without a sampler take the likeliest.

    >>> choose_tokens(torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]]), [None, None])
    [1, 0]
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return [
        token if sampler is None else sampler.draw(row)
        for token, sampler, row in zip(tokens, samplers, logits, strict=True)
    ]
