"""The pytest plugin of the acceptance run: stand-in, sampling, and a count by file at the end."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import on_cpu
import rules
import stand_in

ON_CPU = os.environ.get("PAGEANT_PEER_DEVICE", "cpu") == "cpu"
AT_MOST = int(os.environ.get("PAGEANT_PEER_AT_MOST", "0"))  # cases of a test function; 0: all
WORK_CPU = 2**28  # scores of a case; more would take minutes

stand_in.install()
if ON_CPU:
    on_cpu.enter()
else:
    assert torch.cuda.is_available()

OUTCOMES: dict[str, Counter[str]] = defaultdict(Counter)
REASONS: dict[str, Counter[str]] = defaultdict(Counter)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def _params(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return {} if call is None else dict(call.params)


def _scores(params: dict[str, Any]) -> int:
    lens = [params.get(name, 1) for name in ("batch_size", "kv_len", "qo_len", "num_qo_heads")]
    size = 1
    for value in lens:
        size *= value if isinstance(value, int) else 1
    return size


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the rules of each file, then keep an even sample of every test function."""
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    out = []
    for item in items:
        name, params = _file(item.nodeid), _params(item)
        if not rules.FILES[name](params):
            out.append(item)
            OUTCOMES[name]["left out by rule"] += 1
        elif ON_CPU and _scores(params) > WORK_CPU:
            out.append(item)
            OUTCOMES[name]["too large for a CPU"] += 1
        else:
            by_test[item.nodeid.partition("[")[0]].append(item)
    kept = []
    for cases in by_test.values():
        step = max(1, -(-len(cases) // AT_MOST)) if AT_MOST else 1
        kept += cases[::step]
        OUTCOMES[_file(cases[0].nodeid)]["not sampled"] += len(cases) - len(cases[::step])
    for item in kept:
        reason = rules.DIFFERS.get(item.name.partition("[")[0])
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    taken = set(kept)
    config.hook.pytest_deselected(items=[*out, *(item for item in items if item not in taken)])
    items[:] = [item for item in items if item in taken]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a case once: its call, or what kept it from one."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        name = _file(report.nodeid)
        OUTCOMES[name][report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            REASONS[name][f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"] += 1
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(crash.message if crash else report.longrepr).splitlines()[0]
            REASONS[name][f"failed: {text[:150]}"] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a file, then its reasons."""
    for name, counts in OUTCOMES.items():
        line = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if count)
        terminalreporter.write_line(f"{name}: {line}")
        for reason, count in REASONS[name].most_common():
            terminalreporter.write_line(f"    {count} {reason}")
