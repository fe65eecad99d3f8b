"""Results as words: rows of tables, and the sentences beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pageant.bench.tables import markdown, terminal

if TYPE_CHECKING:
    from pageant.bench.perplexity import Row
    from pageant.bench.results import Result, Verdict


def cpu_case(case: str, results: Sequence[Result]) -> Group:
    """A case's contenders; below them those that cannot run, with their reasons."""
    rows, refused = [], [Text()]
    for each in results:
        if each.median_ms is None or each.fastest_ms is None or each.error is None:
            refused.insert(-1, Text(f"{each.contender}: {each.why}"))
        else:
            times = (f"{each.median_ms:.2f}", f"{each.fastest_ms:.2f}")
            rows.append([each.contender, *times, f"{each.error:.1e}"])
    columns = ("contender", "median ms", "fastest ms", "error")
    return Group(terminal(case, columns, rows), *refused)


def cpu_claims(verdicts: Sequence[Verdict]) -> Table:
    """Ratios of times, and whether they are small enough."""
    words = {True: "yes", False: "NO", None: "not measured"}
    columns = ("times", "case", "ratio", "at most", "holds")
    rows = [
        [
            f"{each.claim.ours} / {each.claim.other}",
            each.claim.case,
            "-" if each.ratio is None else f"{each.ratio:.2f}",
            f"{each.claim.most:.2f}",
            words[each.holds],
        ]
        for each in verdicts
    ]
    return terminal("claims", columns, rows)


def perplexity_table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    return terminal("perplexity", *_perplexity(rows))


def perplexity_section(rows: Sequence[Row], answer: dict[str, Any]) -> str:
    """For a document: what was measured, then the table."""
    text, versions = answer["text"], answer["versions"]
    scales = "all scales 1"
    if text["calibrate"]:
        scales = (
            f"scales fitted to the {text['calibrate']:,} tokens after them "
            f"(percentile {text['percentile']:g})"
        )
    said = (
        f"{answer['model']}, weights in {answer['dtype']}, over the first {text['tokens']:,} "
        f"tokens of the documentation topics of Python {versions['python']}, in windows of "
        f"{text['window']:,}; {scales}. ± is one standard error. Errors of K and V are squared "
        f"and relative, of those that the scales were fitted to. {answer['device']['name']}, "
        f"torch {versions['torch']}, {answer['date'][:10]}, "
        f"commit {answer['commit'] or 'unknown'}."
    )
    return f"{said}\n\n{markdown(*_perplexity(rows))}"


def _perplexity(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = ["format", "bytes\na token", "perplexity", "above\nfp32, %", "±"]
    columns += ["error\nof K", "error\nof V"]
    checked = any(row.difference is not None for row in rows)
    if checked:
        columns.append("reference\napart, %")
    table = []
    for row in rows:
        cells = [row.format, f"{row.bytes_per_token:,}", f"{row.perplexity:.3f}"]
        cells += [
            f"{row.change:+.2f}",
            f"{row.change_error:.2f}",
            f"{row.k_error:.1e}",
            f"{row.v_error:.1e}",
        ]
        if checked:
            cells.append(f"{row.difference:.4f}")
        table.append(cells)
    return columns, table
