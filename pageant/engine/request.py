"""One request: its tokens, the pages they lie in, and how far it has come."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from pageant.engine.errors import EngineError
from pageant.select.bounds import is_whole

# An end-of-text token; max_new_tokens or the model's last position; no page left in the pool.
FinishReason = Literal["stop", "length", "cache_full"]
OnText = Callable[[str], None]

KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen, and how many.

    Attributes:
        max_new_tokens: tokens to generate at most, from 1 up.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens that holds this much probability, 0 < top_p <= 1.
        seed: of this request's own generator, 64 bits; None draws a fresh one.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.max_new_tokens, 1):
            raise EngineError(f"max_new_tokens is {self.max_new_tokens}; allowed: from 1 up")
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise EngineError(f"temperature is {self.temperature}; allowed: from 0 up")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise EngineError(f"top_p is {self.top_p}; allowed: above 0, up to 1")
        if self.seed is not None and not (is_whole(self.seed, -(2**63)) and self.seed < 2**64):
            raise EngineError(f"seed is {self.seed}; allowed: a whole number of 64 bits")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt on its way to a completion. The scheduler and the engine change it; nobody else.

    Attributes:
        id: its number in order of arrival.
        tokens: int64 [length limit], prompt then generated tokens; the first num_tokens are valid.
        num_prompt_tokens, num_tokens: tokens of the prompt, and in all so far.
        num_computed: leading tokens in the cache once the step under way is done.
        pages: int32 [pages of the length limit], page ids; the first num_pages are valid.
        page_keys: prefix-cache keys of the leading full pages, as far as asked for.
        num_preemptions: times it lost its pages.
        last_reason: why it ends where its tokens have no more room, "length" or "cache_full".
        finish_reason: "stop" (end-of-text token), last_reason, or None while under way.
    """

    id: int
    sampling: Sampling
    tokens: npt.NDArray[np.int64]
    num_prompt_tokens: int
    num_tokens: int
    pages: npt.NDArray[np.int32]
    num_pages: int = 0
    num_computed: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    num_preemptions: int = 0
    last_reason: FinishReason = "length"
    finish_reason: FinishReason | None = None

    @classmethod
    def of(
        cls,
        request_id: int,
        prompt: list[int],
        sampling: Sampling,
        page_size: int,
        max_len: int,
        at_max_len: FinishReason = "length",
    ) -> Request:
        """A request for `prompt` that ends at max_new_tokens, or max_len tokens in all.

        `at_max_len` says what max_len means: the model's positions, or the pool's pages.
        """
        wanted = len(prompt) + sampling.max_new_tokens
        length = min(wanted, max_len)
        tokens = np.empty(length, np.int64)
        tokens[: len(prompt)] = prompt
        return cls(
            id=request_id,
            sampling=sampling,
            tokens=tokens,
            num_prompt_tokens=len(prompt),
            num_tokens=len(prompt),
            pages=np.zeros(-(-length // page_size), np.int32),
            last_reason=at_max_len if wanted > max_len else "length",
        )

    @property
    def generated(self) -> list[int]:
        """Tokens generated so far, the end-of-text token included."""
        tokens: list[int] = self.tokens[self.num_prompt_tokens : self.num_tokens].tolist()
        return tokens

    @property
    def num_pending(self) -> int:
        """Tokens not yet computed; exactly 1 once the prompt is through."""
        return self.num_tokens - self.num_computed

    @property
    def num_missing(self) -> int:
        """Tokens until it ends, unless an end-of-text token comes first."""
        return len(self.tokens) - self.num_tokens

    def append(self, token: int, stop_tokens: frozenset[int]) -> None:
        """Take a sampled token, and finish if it is the last."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if token in stop_tokens:
            self.finish_reason = "stop"
        elif self.num_missing == 0:
            self.finish_reason = self.last_reason

    def keys_of(self, num_pages: int, page_size: int) -> list[bytes]:
        """Keys of the first `num_pages` full pages: each hashes its tokens and the key before."""
        while (have := len(self.page_keys)) < num_pages:
            parent = self.page_keys[-1] if have else b""
            page = self.tokens[have * page_size : (have + 1) * page_size].tobytes()
            key = hashlib.blake2b(parent + page, digest_size=KEY_BYTES).digest()
            self.page_keys.append(key)
        return self.page_keys[:num_pages]
