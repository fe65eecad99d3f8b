"""Which requests compute how many tokens in the next step.

First come, first served. A request past its prompt computes one token each step; prompts share the
step's prefill budget in chunks. When pages run out, the latest request loses its own and returns to
the front of the queue with its tokens kept, to be computed again. The earliest request can always
go on, since no request is longer than the pool: there is no deadlock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pageant.engine.pages import PagePool
from pageant.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Upper bounds of one step.

    Attributes:
        max_requests: requests computed together.
        prefill_budget: prompt tokens of all requests together.
        chunk_size: prompt tokens of one request; None computes every prompt in one piece.
    """

    max_requests: int
    prefill_budget: int
    chunk_size: int | None


@dataclass(frozen=True)
class Work:
    """One request's part of a step: its tokens start .. start + num_tokens - 1 are computed."""

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last row of this work yields the request's next token."""
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
        return sorted(works, key=lambda work: work.rank)

    def finish(self, request: Request) -> None:
        """Let a finished request's pages go."""
        self.running.remove(request)
        self._release(request)

    def _work(self, request: Request, num_tokens: int) -> Work:
        """Count the tokens as computed, and publish the pages they fill.

        Others may reuse such a page in the same step: each layer writes all keys before it reads.
        """
        start, end = request.num_computed, request.num_computed + num_tokens
        if self.prefix_cache:
            first, last = start // self.page_size, end // self.page_size
            keys = request.keys_of(last, self.page_size)
            for index in range(first, last):
                self.pool.publish(int(request.pages[index]), keys[index])
        request.num_computed = end
        return Work(request, start, num_tokens)

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
