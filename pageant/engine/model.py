"""Load a tokenizer, then its model: the default one, a local folder, or a hub id."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pageant.engine.errors import EngineError

DEFAULT_MODEL = "smollm2"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class LoadedModel(NamedTuple):
    """A transformers model for causal language modelling, and its tokenizer."""

    model: Any
    tokenizer: Any


class FoundModel(NamedTuple):
    """A model whose weights are not loaded yet: what checks of prompts need.

    Attributes:
        name: as the user calls it.
        source: a folder or a hub id.
        tokenizer, config: transformers' objects.
    """

    name: str
    source: str
    tokenizer: Any
    config: Any

    def load(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> LoadedModel:
        """Load the weights, as that type, to that device; errors are those of ``load``."""
        with _told(self.name):
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype)
        return LoadedModel(model.to(device).eval(), self.tokenizer)


def find(name: str = DEFAULT_MODEL, *, quiet: bool = False) -> FoundModel:
    """A model's tokenizer and config; arguments and errors are those of ``load``."""
    with _told(name):
        from transformers import AutoConfig, AutoTokenizer

        if quiet:
            _silence()
        source = _source(name)
        tokenizer = AutoTokenizer.from_pretrained(source)
        return FoundModel(name, source, tokenizer, AutoConfig.from_pretrained(source))


def load(
    name: str = DEFAULT_MODEL,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    quiet: bool = False,
) -> LoadedModel:
    """Load a model for generation.

    Args:
        name: "smollm2", a local folder in transformers' format, or a hub id.
        dtype: type of the weights and of the computation.
        device: where the weights go.
        quiet: keep transformers and the hub from printing, in this process from now on.

    Raises:
        EngineError: the model or a package it needs is missing, or it cannot be used.
    """
    return find(name, quiet=quiet).load(dtype, device)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Tell what went wrong with a model in one line."""
    try:
        yield
    except EngineError:
        raise
    except ImportError as error:
        raise EngineError(
            f"a package is missing ({_first_line(error)}); run: pip install 'pageant[engine]'"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error


def _silence() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _source(name: str) -> str:
    """What transformers loads: a folder or a hub id."""
    if name == DEFAULT_MODEL:
        from pageant.engine import smollm2

        return str(smollm2.folder())
    if Path(name).is_dir() or _HUB_ID.fullmatch(name):
        return name
    raise EngineError(
        f"model {name!r} was not found; allowed: {DEFAULT_MODEL}, a local folder, or a hub id"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
