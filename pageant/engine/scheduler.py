"""Which requests compute how many tokens in the next step.

First come, first served. A request past its prompt computes one token each step; prompts share the
step's prefill budget in chunks. When pages run out, the latest request loses its own and returns to
the front of the queue with its tokens kept, to be computed again. The earliest request can always
go on, since no request is longer than the pool: there is no deadlock.

A request's next token may bring drafts of those after it. They take only pages that nobody needs in
the step and return what they took unless they are accepted, so they never cost anyone its pages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pageant.engine.drafts import look_up
from pageant.engine.pages import PagePool
from pageant.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Upper bounds of one step.

    Attributes:
        max_requests: requests computed together.
        prefill_budget: prompt tokens of all requests together.
        chunk_size: prompt tokens of one request; None computes every prompt in one piece.
        speculative_tokens: drafts of one request.
    """

    max_requests: int
    prefill_budget: int
    chunk_size: int | None
    speculative_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of a step: its prompts', and each request's next one with drafts."""
        return self.prefill_budget + self.max_requests * (1 + self.speculative_tokens)


@dataclass(frozen=True)
class Work:
    """One request's part of a step: its tokens start .. start + num_tokens - 1 are computed.

    Where that is its last token alone, guesses at the next, its drafts, are computed with it.
    """

    request: Request
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """What the model computes: int64 [num_tokens + drafts]."""
        tokens = self.request.tokens[self.start : self.start + self.num_tokens]
        return np.append(tokens, np.array(self.drafts, np.int64))

    @property
    def samples(self) -> bool:
        """Whether the last of the request's tokens is computed, which yields the next."""
        return self.start + self.num_tokens == self.request.num_tokens

    @property
    def rank(self) -> int:
        """Place in the batch: decode 0, short extend 1, long extend 2, prefill 3."""
        if self.num_tokens > 1 or self.start == 0:
            return 3 if self.start == 0 else 2
        return 0 if self.start >= self.request.num_prompt_tokens else 1


class Scheduler:
    """The queue, the running requests, and the pages they own.

    Args:
        pool: pages of the cache.
        page_size: tokens a page.
        limits: bounds of a step.
        prefix_cache: look for known prefixes, and publish full pages.
    """

    def __init__(
        self, pool: PagePool, page_size: int, limits: StepLimits, *, prefix_cache: bool
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self.num_reused_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request whose length limit fits the pool."""
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """The next step, in batch order; pages for all of its tokens are allocated."""
        works: list[Work] = []
        budget = self.limits.prefill_budget
        preemptions_before = self.num_preemptions
        index = 0
        while index < len(self.running):  # preemption shortens the list, never before `index`
            request = self.running[index]
            index += 1
            is_decode = request.num_pending == 1
            count = 1 if is_decode else self._chunk(request.num_pending, budget)
            if count and self._grow(request, request.num_computed + count):
                budget -= 0 if is_decode else count
                works.append(self._work(request, count))
        if self.num_preemptions == preemptions_before:
            works += self._admit(budget)
        if self.limits.speculative_tokens:
            works = [self._with_drafts(work) for work in works]
        return sorted(works, key=lambda work: work.rank)

    def accept(self, request: Request, num_drafts: int) -> None:
        """Count the leading drafts of its last work as computed, now that they are its tokens.

        The pages of the others go back: until they hold a token that stays, nobody owns them.
        """
        self._advance(request, request.num_computed + num_drafts)
        needed = -(-request.num_computed // self.page_size)
        self.pool.release(request.pages[needed : request.num_pages].tolist())
        request.num_pages = needed

    def finish(self, request: Request) -> None:
        """Let a finished request's pages go."""
        self.running.remove(request)
        self._release(request)

    def _work(self, request: Request, num_tokens: int) -> Work:
        """Count the tokens as computed.

        Others may reuse a page they fill in the same step: each layer writes all keys before it
        reads.
        """
        start = request.num_computed
        self._advance(request, start + num_tokens)
        return Work(request, start, num_tokens)

    def _advance(self, request: Request, num_computed: int) -> None:
        """Move on to so many computed tokens, and publish the pages filled since."""
        if self.prefix_cache:
            first, last = request.num_computed // self.page_size, num_computed // self.page_size
            keys = request.keys_of(last, self.page_size)
            for index in range(first, last):
                self.pool.publish(int(request.pages[index]), keys[index])
        request.num_computed = num_computed

    def _with_drafts(self, work: Work) -> Work:
        """Add drafts to a request's last token, as many as its length and spare pages allow."""
        request = work.request
        if not work.samples or work.num_tokens > 1:
            return work
        room = (request.num_pages + self.pool.num_available) * self.page_size - request.num_tokens
        count = min(self.limits.speculative_tokens, room, request.num_missing - 1)
        drafts = look_up(request.tokens[: request.num_tokens], count)
        self._grow(request, request.num_tokens + len(drafts))
        return replace(work, drafts=tuple(drafts))

    def _chunk(self, num_pending: int, budget: int) -> int:
        """Prompt tokens to compute now; without chunks all or none."""
        if self.limits.chunk_size is None:
            return num_pending if num_pending <= budget else 0
        return min(num_pending, self.limits.chunk_size, budget)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for a running request's first `num_tokens`; False if it was preempted."""
        need = -(-num_tokens // self.page_size) - request.num_pages
        while (pages := self.pool.allocate(max(need, 0))) is None:
            victim = self.running.pop()
            self._release(victim)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        self._own(request, pages)
        return True

    def _admit(self, budget: int) -> list[Work]:
        """Start queued requests while places, budget and pages for all their tokens last."""
        works: list[Work] = []
        while self.waiting and budget and len(self.running) < self.limits.max_requests:
            request = self.waiting[0]
            self._own(request, self._known_prefix(request))
            reused = request.num_pages * self.page_size
            count = self._chunk(request.num_tokens - reused, budget)
            missing = -(-request.num_tokens // self.page_size) - request.num_pages
            if not count or missing > self.pool.num_available:
                self._release(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            request.num_computed = reused
            self.num_reused_tokens += reused if request.num_preemptions == 0 else 0
            self._grow(request, reused + count)
            budget -= count
            works.append(self._work(request, count))
        return works

    def _known_prefix(self, request: Request) -> list[int]:
        """Cached pages of the request's tokens; its last token is always left to compute."""
        if not self.prefix_cache:
            return []
        full_pages = (request.num_tokens - 1) // self.page_size
        return self.pool.reuse(request.keys_of(full_pages, self.page_size))

    def _own(self, request: Request, pages: list[int]) -> None:
        request.pages[request.num_pages : request.num_pages + len(pages)] = pages
        request.num_pages += len(pages)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages[: request.num_pages].tolist())
        request.num_pages = 0
        request.num_computed = 0
