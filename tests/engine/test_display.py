"""The closing table."""

import io

import pytest
from rich.console import Console

from pageant.engine.display import figures
from pageant.engine.metrics import Metrics


@pytest.mark.parametrize(
    ("drafted", "accepted", "shown"), [(0, 0, "-"), (40, 13, "13 of 40 (32.5%)")]
)
def test_acceptance_of_drafts_is_shown(drafted: int, accepted: int, shown: str) -> None:
    metrics = Metrics()
    metrics.verified(drafted=drafted, accepted=accepted)
    text = io.StringIO()
    report = metrics.report(num_pages=1, prefix_hit_tokens=0, preemptions=0)
    Console(width=100, file=text).print(figures(report))
    (row,) = (line for line in text.getvalue().splitlines() if "drafts accepted" in line)
    assert row.split("│")[2].strip() == shown
