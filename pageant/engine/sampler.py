"""Which tokens come next, by transformers' own logits processors.

Each request has a generator of its own, so its tokens do not depend on what else is in the batch.

Drafts change nothing about the tokens, only how many come from one step. At each place a token is
drawn from the target distribution p as if there were no draft, and the draft x is accepted if it is
that token. This is rejection sampling for a certain draft: x is accepted with probability p(x), and
what is drawn in its stead follows p without x. One draw a token also means that a seed gives the
same tokens however many drafts there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
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

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor) -> int:
        """The next token of logits [V], after tokens int64 [N] on the same device."""
        scores = self._processors(tokens[None], logits.float()[None])
        probabilities = torch.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


@dataclass(frozen=True)
class Turn:
    """A request that gets its next tokens.

    Attributes:
        sampler: None takes the likeliest tokens.
        tokens: int64 [N], its tokens so far.
        drafts: guesses at the next.
    """

    sampler: Sampler | None
    tokens: npt.NDArray[np.int64]
    drafts: Sequence[int] = ()


def choose_tokens(logits: torch.Tensor, turns: Sequence[Turn]) -> list[list[int]]:
    """Each request's next tokens: the drafts that are right, and one more.

    Args:
        logits: [S, V]; of each request, in order, those after its tokens and after each draft.
        turns: one a request.

    The second draft is wrong:

    >>> logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    >>> choose_tokens(logits, [Turn(None, np.array([2]), drafts=[1, 2])])
    [[1, 0]]
    """
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    chosen, end = [], 0
    for turn in turns:
        start, end = end, end + 1 + len(turn.drafts)
        if turn.sampler is None:
            tokens: Iterable[int] = likeliest[start:end]
        else:
            tokens = _draws(turn.sampler, logits[start:end], turn)
        chosen.append(_up_to_first_miss(tokens, turn.drafts))
    return chosen


def _draws(sampler: Sampler, logits: torch.Tensor, turn: Turn) -> Iterable[int]:
    """Draw a token at each place when asked for it, all drafts before it being right."""
    host = np.append(turn.tokens, np.array(turn.drafts, np.int64))
    tokens = torch.from_numpy(host).to(logits.device)
    for place, row in enumerate(logits):
        yield sampler.draw(row, tokens[: len(turn.tokens) + place])


def _up_to_first_miss(tokens: Iterable[int], drafts: Sequence[int]) -> list[int]:
    """Tokens up to the first that is not the draft of its place; none after it is asked for."""
    taken = []
    for token, draft in zip(tokens, [*drafts, None], strict=False):
        taken.append(token)
        if token != draft:
            break
    return taken
