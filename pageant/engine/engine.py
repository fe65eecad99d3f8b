"""Continuous batching over a transformers model: requests in, tokens out.

engine = Engine(*load("smollm2"))
for completion in engine.generate(["The capital of France is"], Sampling(max_new_tokens=8)):
    print(completion.text)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pageant.api import Attention
from pageant.cache.calibrate import Scales
from pageant.engine.config import EngineConfig
from pageant.engine.detokenize import Detokenizer
from pageant.engine.metrics import Metrics, Report
from pageant.engine.pages import PagePool
from pageant.engine.prompts import LengthLimit, tokens_of
from pageant.engine.request import FinishReason, OnText, Request, Sampling
from pageant.engine.runner import Runner
from pageant.engine.sampler import Sampler, Turn, choose_tokens
from pageant.engine.scheduler import Scheduler, StepLimits, Work
from pageant.integrations.transformers import layers_of
from pageant.parallel.combine import of_first_rank
from pageant.types import Features, Limits


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a prompt.

    Attributes:
        text: the generated text, special tokens left out.
        tokens: generated tokens, the end-of-text token included.
        num_prompt_tokens: tokens of the prompt.
        finish_reason: "stop" (an end-of-text token), "length" (max_new_tokens, or the model's last
            position) or "cache_full" (the request alone fills the pool's pages).
    """

    text: str
    tokens: list[int]
    num_prompt_tokens: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class _Outlet:
    """What the engine keeps for a request besides the scheduler's state."""

    sampler: Sampler | None
    detokenizer: Detokenizer
    on_text: OnText | None


class Engine:
    """Serves requests with one model on one device; used by one thread.

    Args:
        model: a transformers model for causal language modelling; switched to Pageant's attention.
        tokenizer: its tokenizer.
        config: sizes.
        scales: of each layer's cache, from ``pageant.calibrate``; None leaves them at 1.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self._stop_tokens = _stop_tokens(model)
        self._device: torch.device = model.device
        self._outlets: dict[int, _Outlet] = {}
        self._num_requests = 0

        shape, layers = layers_of(model)
        if scales is not None:
            layers = [each.apply(layer) for each, layer in zip(scales, layers, strict=True)]
        self.limit = LengthLimit.of(model.config, config)
        limits = StepLimits(
            max_requests=config.max_requests,
            prefill_budget=max(
                config.prefill_budget, 0 if config.chunk_size else self.limit.max_len
            ),
            chunk_size=config.chunk_size,
            speculative_tokens=config.speculative_tokens,
        )
        attention = Attention(
            shape=shape,
            cache=config.cache,
            limits=Limits(
                max_requests=limits.max_requests,
                max_tokens=limits.max_tokens,
                max_seq_len=self.limit.max_len,
            ),
            features=Features.of(layers),
            options=replace(config.options, speculative_tokens=config.speculative_tokens),
            device=self._device,
        )
        cache = attention.new_cache(num_layers=len(layers), num_pages=config.pool_pages)
        pool = PagePool(config.pool_pages)
        self._ranks = config.options.context_parallel
        graphs = config.graphs and self._device.type == "cuda" and self._ranks is None
        self._runner = Runner(model, attention, cache, layers, graphs=graphs)
        self.scheduler = Scheduler(
            pool, config.page_tokens, limits, prefix_cache=config.prefix_cache
        )

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self.scheduler.has_work

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        on_text: OnText | None = None,
    ) -> Request:
        """Queue a prompt (text or token ids); `on_text` gets its text piece by piece.

        Raises:
            EngineError: the prompt is empty, or too long for the model or the pool.
        """
        sampling = sampling or Sampling()
        tokens = tokens_of(prompt, self.tokenizer, self.limit)
        request = Request.of(
            self._num_requests,
            tokens,
            sampling,
            self.scheduler.page_size,
            self.limit.max_len,
            self.limit.reason,
        )
        self._num_requests += 1
        self._outlets[request.id] = _Outlet(
            Sampler(sampling, self._device) if sampling.temperature > 0 else None,
            Detokenizer(self.tokenizer),
            on_text,
        )
        self.metrics.arrived(request.id, len(tokens))
        self.scheduler.add(request)
        return request

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute one step; returns the requests that finished in it."""
        started = time.perf_counter()
        works = self.scheduler.schedule()
        pages = self.scheduler.pool.num_owned
        logits = self._runner.run(works)
        sampling = [work for work in works if work.samples]
        chosen = choose_tokens(logits, [self._turn(w) for w in sampling])
        finished = self._take(sampling, of_first_rank(chosen, self._ranks))
        self.metrics.stepped(time.perf_counter() - started, pages, self._runner.shared_pages)
        return finished

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | None = None,
        on_text: Sequence[OnText] | None = None,
    ) -> list[Completion]:
        """Complete all prompts together; `on_text` holds one callback for each."""
        callbacks: Sequence[OnText | None] = on_text or [None] * len(prompts)
        token_lists = [  # all are right, or none is queued
            tokens_of(prompt, self.tokenizer, self.limit) for prompt in prompts
        ]
        requests = [
            self.add_request(tokens, sampling, callback)
            for tokens, callback in zip(token_lists, callbacks, strict=True)
        ]
        while self.has_work:
            self.step()
        return [self.completion(request) for request in requests]

    def completion(self, request: Request) -> Completion:
        """What a request has generated."""
        tokens = request.generated
        return Completion(
            text=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            finish_reason=request.finish_reason,
        )

    def report(self) -> Report:
        """Figures of everything this engine has done."""
        return self.metrics.report(
            num_pages=self.scheduler.pool.num_pages,
            prefix_hit_tokens=self.scheduler.num_reused_tokens,
            preemptions=self.scheduler.num_preemptions,
        )

    def _turn(self, work: Work) -> Turn:
        request = work.request
        sampler = self._outlets[request.id].sampler
        return Turn(sampler, request.tokens[: request.num_tokens], work.drafts)

    def _take(self, works: list[Work], chosen: list[list[int]]) -> list[Request]:
        """Give each request its tokens, and let finished requests go."""
        finished = []
        for work, tokens in zip(works, chosen, strict=True):
            request = work.request
            num_taken = self._append(request, tokens)
            if work.drafts:
                num_accepted = min(num_taken, len(tokens) - 1)  # the last was no draft
                self.scheduler.accept(request, num_accepted)
                self.metrics.verified(drafted=len(work.drafts), accepted=num_accepted)
            if request.finish_reason is not None:
                self.scheduler.finish(request)
                del self._outlets[request.id]
                finished.append(request)
        return finished

    def _append(self, request: Request, tokens: list[int]) -> int:
        """Append tokens until one is the request's last; pass their text on; how many they were."""
        outlet = self._outlets[request.id]
        for count, token in enumerate(tokens, 1):
            is_first = request.num_tokens == request.num_prompt_tokens
            request.append(token, self._stop_tokens)
            is_last = request.finish_reason is not None
            self.metrics.sampled(request.id, is_first=is_first, is_last=is_last)
            if outlet.on_text and (text := outlet.detokenizer.push(token, is_last=is_last)):
                outlet.on_text(text)
            if is_last:
                return count
        return len(tokens)


def _stop_tokens(model: Any) -> frozenset[int]:
    """End-of-text tokens, from where transformers' ``generate`` takes them."""
    stop = model.generation_config.eos_token_id
    return frozenset(() if stop is None else [stop] if isinstance(stop, int) else stop)
