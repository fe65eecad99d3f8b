"""Text of a growing list of tokens, piece by piece."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer prints for the first bytes of a character


class Detokenizer:
    """Turns one request's tokens into text as they come.

    A piece is held back while it ends inside a character. Only the tokens since the last piece and
    one piece before (its last token decides whether a space belongs between) are decoded again.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int, *, is_last: bool = False) -> str:
        """The text that `token` completes; empty while there is none."""
        self._pending.append(token)
        before = self._decode(self._before)
        text = self._decode(self._before + self._pending)
        if text.endswith(UNFINISHED) and not is_last:
            return ""
        self._before, self._pending = self._pending, []
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
