"""The sizes of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageant.engine.errors import EngineError
from pageant.select.bounds import is_whole, whole
from pageant.types import CacheSpec, Options

DEFAULT_POOL_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built with.

    Attributes:
        cache: format, page size and layout of the cache.
        num_pages: pages of the pool (of each rank's); None makes it large enough for 8192 tokens.
        max_requests: requests computed together.
        chunk_size: tokens of one prompt a step; None computes every prompt in one piece.
        prefill_budget: tokens of all prompts a step (at least one whole prompt if chunk_size is
            None).
        prefix_cache: use pages of earlier prompts again.
        speculative_tokens: draft tokens verified beside each new one, at most; 0 drafts none.
        graphs: on a GPU, replay steps of decodes as CUDA graphs; a context_parallel's ranks do not.
        options: how the attention works; the engine fills in its speculative_tokens. With a
            context_parallel every rank of its group runs an engine, and gives it the same requests.

    >>> EngineConfig(cache=CacheSpec(page_size=48)).pool_pages
    171
    """

    cache: CacheSpec = field(default_factory=CacheSpec)
    num_pages: int | None = None
    max_requests: int = 64
    chunk_size: int | None = 256
    prefill_budget: int = 512
    prefix_cache: bool = True
    speculative_tokens: int = 0
    graphs: bool = True
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        for name, kind in (("cache", CacheSpec), ("options", Options)):
            if not isinstance(getattr(self, name), kind):
                raise EngineError(f"{name} is {getattr(self, name)!r}; allowed: {kind.__name__}")
        if not isinstance(self.graphs, bool):
            raise EngineError(f"graphs is {self.graphs!r}; allowed: True or False")
        sizes = (  # name, value, its least value, and whose bound it has
            ("page_size", self.cache.page_size, 1, "page_size"),
            ("num_pages", self.num_pages, 1, "num_pages"),
            ("max_requests", self.max_requests, 1, "max_requests"),
            ("chunk_size", self.chunk_size, 1, "max_tokens"),
            ("prefill_budget", self.prefill_budget, 1, "max_tokens"),
            ("speculative_tokens", self.speculative_tokens, 0, "speculative_tokens"),
        )
        for name, value, least, bound in sizes:
            optional = value is None and name in ("num_pages", "chunk_size")
            if not optional and not is_whole(value, least, bound):
                raise EngineError(f"{name} is {value!r}; allowed: {whole(least, bound)}")
        if self.options.speculative_tokens not in (0, self.speculative_tokens):
            raise EngineError(
                f"options.speculative_tokens is {self.options.speculative_tokens!r}; allowed: 0, "
                f"or the engine's own, speculative_tokens={self.speculative_tokens}"
            )

        ranks = self.options.context_parallel
        if ranks is not None and ranks.group is None:
            raise EngineError("options.context_parallel.group is None; allowed: a process group")
        if ranks is not None and self.cache.page_size % ranks.interleave:
            raise EngineError(
                f"options.context_parallel.interleave is {ranks.interleave}; allowed: a divisor of "
                f"page_size, {self.cache.page_size}"
            )

    @property
    def page_tokens(self) -> int:
        """Tokens of a request that one page holds, on all ranks together."""
        return self.cache.page_size * self.options.world

    @property
    def pool_pages(self) -> int:
        """Pages of the pool."""
        return self.num_pages or -(-DEFAULT_POOL_TOKENS // self.page_tokens)
