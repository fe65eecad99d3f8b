"""What was run on the GPU, counted at the end; with ``--record FILE`` also written down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write what was run on the GPU to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Processes side by side share the processor's cores; torch would give all to each."""
    processes = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if processes is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(processes)))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = [
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            **dict(report.user_properties),
        }
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if "tests/gpu/" in report.nodeid and getattr(report, "when", None) == "call"
    ]
    count = sum(one.get("configurations", 0) for one in results)
    if count:
        terminalreporter.write_line(f"{count} random configurations on the GPU")
    path = config.getoption("--record")
    if path is not None and results:
        from pageant.bench.record import record, save

        save(path, record("gpu tests", torch.device("cuda"), configurations=count, results=results))
