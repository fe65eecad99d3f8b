"""A prompt as token ids, and how long a request may become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pageant.engine.config import EngineConfig
from pageant.engine.errors import EngineError
from pageant.engine.request import FinishReason

DEMO_PROMPTS = (
    "Why is the sky blue?",
    "Name three uses of a paper clip.",
    "What is the capital of France?",
    "Explain in two sentences what a cache is.",
    "Write a short poem about rain.",
    "How do I boil an egg?",
    "What does a librarian do?",
    "Tell me a fact about the moon.",
)


@dataclass(frozen=True)
class LengthLimit:
    """Tokens a request may have in all.

    Attributes:
        max_len: how many.
        bound: what sets the limit, in words.
        reason: why a request ends that reaches it.
    """

    max_len: int
    bound: str
    reason: FinishReason

    @classmethod
    def of(cls, model_config: Any, config: EngineConfig) -> LengthLimit:
        """The smaller of the model's positions and the pool; model_config is transformers'."""
        positions: int = model_config.get_text_config(decoder=True).max_position_embeddings
        page_tokens = config.page_tokens
        pool_tokens = config.pool_pages * page_tokens
        if positions <= pool_tokens:
            return cls(positions, f"the model's {positions} positions", "length")
        bound = f"the pool's {config.pool_pages} pages of {page_tokens}"
        return cls(pool_tokens, bound, "cache_full")


def check_text(prompt: str) -> None:
    """Raise for a prompt that no tokenizer makes anything of."""
    if not prompt:
        raise EngineError("the prompt is empty; allowed: at least one token")


def tokens_of(prompt: str | Sequence[int], tokenizer: Any, limit: LengthLimit) -> list[int]:
    """Token ids of a prompt that leaves room for a new token.

    Raises:
        EngineError: the prompt is empty, or too long.
    """
    tokens = tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
    if not tokens:
        raise EngineError("the prompt is empty; allowed: at least one token")
    if len(tokens) >= limit.max_len:
        raise EngineError(
            f"the prompt has {len(tokens)} tokens; allowed: up to {limit.max_len - 1}, so that "
            f"a new one fits {limit.bound}"
        )
    return tokens
