"""The one error of the engine that is the user's to mend."""

from __future__ import annotations


class EngineError(ValueError):
    """A model, prompt or setting that cannot work; the message is one line and says what would."""
