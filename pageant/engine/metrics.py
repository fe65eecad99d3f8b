"""What a run took: rates, latencies, pages.

Times are seconds of a monotonic clock, noted when a token is known on the host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of a run; latencies are None where nothing was measured.

    Attributes:
        prompt_tokens, generated_tokens: of all finished and unfinished requests.
        seconds: spent in steps.
        tokens_per_second: generated tokens by seconds.
        first_token_p50_s, first_token_p95_s: from a request's arrival to its first token.
        inter_token_p50_s, inter_token_p95_s: from each token to the next of the same request;
            accepted drafts come all at once.
        peak_pages, num_pages: pages owned at the most, and in the pool.
        peak_shared_pages: pages at the most whose keys a step computed once for several requests.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
        preemptions: times a request lost its pages.
        drafted_tokens, accepted_tokens: drafts verified, and those that became part of a text.
        acceptance_rate: accepted by drafted tokens; None without drafts.
    """

    prompt_tokens: int
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    peak_pages: int
    num_pages: int
    peak_shared_pages: int
    prefix_hit_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None


@dataclass
class Metrics:
    """Collects what happens while an engine runs."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    peak_pages: int = 0
    peak_shared_pages: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    _last_token_at: dict[int, float] = field(default_factory=dict)

    def arrived(self, request_id: int, prompt_tokens: int) -> None:
        """A request was queued."""
        self.prompt_tokens += prompt_tokens
        self._last_token_at[request_id] = time.perf_counter()

    def stepped(self, seconds: float, pages: int, shared_pages: int = 0) -> None:
        """A step took `seconds` while requests owned `pages`, and shared the work of some."""
        self.seconds += seconds
        self.peak_pages = max(self.peak_pages, pages)
        self.peak_shared_pages = max(self.peak_shared_pages, shared_pages)

    def sampled(self, request_id: int, *, is_first: bool, is_last: bool) -> None:
        """A token of a request became known."""
        now = time.perf_counter()
        waits = self.first_token_s if is_first else self.inter_token_s
        waits.append(now - self._last_token_at[request_id])
        self._last_token_at[request_id] = now
        self.generated_tokens += 1
        if is_last:
            del self._last_token_at[request_id]

    def verified(self, *, drafted: int, accepted: int) -> None:
        """Of the drafts of a request's step, so many became part of its text."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted

    def report(self, *, num_pages: int, prefix_hit_tokens: int, preemptions: int) -> Report:
        """The figures so far, with those only the pool and the scheduler know."""
        first_p50, first_p95 = _percentiles(self.first_token_s)
        inter_p50, inter_p95 = _percentiles(self.inter_token_s)
        return Report(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            seconds=self.seconds,
            tokens_per_second=self.generated_tokens / self.seconds if self.seconds else 0.0,
            first_token_p50_s=first_p50,
            first_token_p95_s=first_p95,
            inter_token_p50_s=inter_p50,
            inter_token_p95_s=inter_p95,
            peak_pages=self.peak_pages,
            num_pages=num_pages,
            peak_shared_pages=self.peak_shared_pages,
            prefix_hit_tokens=prefix_hit_tokens,
            preemptions=preemptions,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            acceptance_rate=(
                self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None
            ),
        )


def _percentiles(seconds: list[float]) -> tuple[float | None, float | None]:
    """The 50th and 95th percentile.

    >>> _percentiles([1.0, 2.0, 3.0])
    (2.0, 2.9)
    >>> _percentiles([])
    (None, None)
    """
    if not seconds:
        return None, None
    p50, p95 = np.percentile(seconds, [50, 95])
    return float(p50), float(p95)
