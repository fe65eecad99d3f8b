"""A table of results on a terminal, and in a document that other hands edit too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # documents need no rich, which may be missing
    from rich.table import Table

Rows = Sequence[Sequence[str]]


def terminal(title: str, columns: Sequence[str], rows: Rows) -> Table:
    """For rich: the first column to the left, the others to the right; names may have lines."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if index else "left", no_wrap=True, vertical="bottom"
        )
    for row in rows:
        table.add_row(*row)
    return table


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """The same for a document.

    >>> print(markdown(["format", "bits"], [["bf16", "16"]]))
    | format | bits |
    |---|---:|
    | bf16 | 16 |
    """
    rule = "|".join(["---", *["---:"] * (len(columns) - 1)])
    lines = [" | ".join(columns).replace("\n", " "), *(" | ".join(row) for row in rows)]
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, f"|{rule}|", *others])


def replace_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the marker comments of a document; add them at its end if there are none.

    Everything outside the markers stays as it is.
    """
    begin, end = f"<!-- {name}: generated, do not edit -->", f"<!-- end of {name} -->"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{begin}\n{text.strip()}\n{end}"
    head, found, rest = before.partition(begin)
    _, closed, tail = rest.partition(end)
    if found and closed:
        after = head + section + tail
    else:
        after = f"{before.rstrip()}\n\n{section}\n".lstrip("\n")
    path.write_text(after, encoding="utf-8")
