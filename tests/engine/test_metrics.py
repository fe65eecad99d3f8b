"""Figures of a run with a clock that is set by hand."""

import pytest

from pageant.engine import metrics
from pageant.engine.metrics import Metrics


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    record = Metrics()
    record.arrived(0, prompt_tokens=7)
    now = 1.0
    record.arrived(1, prompt_tokens=5)
    for now, request in ((2.0, 0), (3.0, 1), (5.0, 0), (10.0, 1)):
        record.sampled(request, is_first=now < 4, is_last=now > 4)
    record.stepped(seconds=1.5, pages=3, shared_pages=2)
    record.stepped(seconds=0.5, pages=2)
    record.verified(drafted=5, accepted=1)
    record.verified(drafted=3, accepted=3)

    report = record.report(num_pages=9, prefix_hit_tokens=4, preemptions=1)
    assert (report.prompt_tokens, report.generated_tokens) == (12, 4)
    assert (report.seconds, report.tokens_per_second) == (2.0, 2.0)
    assert (report.first_token_p50_s, report.first_token_p95_s) == (2.0, 2.0)
    assert (report.inter_token_p50_s, report.inter_token_p95_s) == (5.0, pytest.approx(6.8))
    assert (report.peak_pages, report.num_pages) == (3, 9)
    assert report.peak_shared_pages == 2
    assert (report.prefix_hit_tokens, report.preemptions) == (4, 1)
    assert (report.drafted_tokens, report.accepted_tokens) == (8, 4)
    assert report.acceptance_rate == 0.5


def test_nothing_measured() -> None:
    report = Metrics().report(num_pages=1, prefix_hit_tokens=0, preemptions=0)
    assert report.tokens_per_second == 0
    assert report.first_token_p50_s is None
    assert report.acceptance_rate is None
