"""Results of GPU benchmarks as Markdown: from the objects of a result file, without rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pageant.bench.tables import markdown

Object = dict[str, Any]


def ceilings(found: Object) -> str:
    """One line."""
    read, multiply = found["read_gbs"], found["bf16_tflops"]
    return f"Ceilings here: {read:,.0f} GB/s read, {multiply:,.0f} TFLOP/s bf16.\n"


def rate(case: Object, median_ms: float) -> float:
    """GB/s of keys and values read by decodes; TFLOP/s of prefills."""
    if case["name"].startswith("dec"):
        return float(case["kv_bytes"] / median_ms / 1e6)
    return float(case["flops"] / median_ms / 1e9)


def share(case: Object, median_ms: float, found: Object) -> float:
    """Of the ceiling that a case has."""
    name = "read_gbs" if case["name"].startswith("dec") else "bf16_tflops"
    return float(rate(case, median_ms) / found[name])


def case(about: Object, results: Sequence[Object], found: Object) -> str:
    """A case's contenders; below them those that cannot run, and the best of an earlier day."""
    unit = "GB/s" if about["name"].startswith("dec") else "TFLOP/s"
    columns = [about["name"], "µs", "±", "with plan", unit, "of ceiling", "error"]
    rows, others = [], []
    for each in results:
        median = each["median_ms"]
        if median is None:
            others.append(f"- {each['contender']}: {each['why']}")
            continue
        row = [f"{1e3 * each[name]:,.2f}" for name in ("median_ms", "spread_ms", "planned_ms")]
        row += [f"{rate(about, median):,.1f}", f"{100 * share(about, median, found):.0f} %"]
        rows.append([each["contender"], *row, f"{each['error']:.1e}"])
    before = about["measured_before"]
    if before is not None:
        others.append(
            f"- measured before ({before['date']}): {before['contender']} "
            f"{1e3 * before['median_ms']:,.2f} µs"
        )
    return "\n".join([markdown(columns, rows), "", *others, ""])


def claims(found: Sequence[Object]) -> str:
    """Ratios of times, against whom, and whether they are small enough."""
    words = {True: "yes", False: "NO", None: "not measured"}
    rows = [
        [
            each["case"],
            f"{each['ours']} / {each['other']}",
            each["against"] or "-",
            "-" if each["ratio"] is None else f"{each['ratio']:.3f}",
            f"{each['most']:.3f}",
            words[each["holds"]],
        ]
        for each in found
    ]
    return markdown(["claim", "times", "against", "ratio", "at most", "holds"], rows) + "\n"


def job(name: str, results: Sequence[Object]) -> str:
    """Contenders of `write` or `merge`."""
    rows, refused = [], []
    for each in results:
        if each["median_ms"] is None:
            refused.append(f"- {each['contender']}: {each['why']}")
            continue
        times = [f"{1e3 * each[key]:,.2f}" for key in ("median_ms", "spread_ms")]
        rows.append(
            [each["contender"], *times, f"{each['num_bytes'] / each['median_ms'] / 1e6:,.0f}"]
        )
    return "\n".join([markdown([name, "µs", "±", "GB/s"], rows), "", *refused, ""])


def plans(results: Sequence[Object]) -> str:
    """What planning costs the host."""
    rows, refused = [], []
    for each in results:
        who = f"{each['contender']}, {each['requests']} requests"
        if each["why"] is not None:
            refused.append(f"- {who}: {each['why']}")
            continue
        names = ("plan_us", "plan_spread_us", "run_us", "run_spread_us", "device_us")
        rows.append([who, *("-" if each[name] is None else f"{each[name]:.1f}" for name in names)])
    columns = ["host", "plan µs", "±", "run µs", "±", "plan on the GPU µs"]
    return "\n".join([markdown(columns, rows), "", *refused, ""])
