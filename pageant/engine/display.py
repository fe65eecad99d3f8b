"""What `pageant generate` shows: text as it comes, then a table of figures."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pageant.engine.metrics import Report
from pageant.engine.request import OnText

PROMPT_WIDTH = 40


class LiveTexts:
    """A table of all completions under way, redrawn a few times a second; a context manager.

    Args:
        console: a terminal.
        prompts: shown, shortened, beside their completions.
    """

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveTexts:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def callbacks(self) -> list[OnText]:
        """One function for each prompt that takes its next piece of text."""

        def appender(index: int) -> OnText:
            def append(piece: str) -> None:
                self._texts[index] += piece

            return append

        return [appender(index) for index in range(len(self._prompts))]

    def _render(self) -> Table:
        room = max(20, self._live.console.width - PROMPT_WIDTH - 7)
        table = Table("prompt", "text so far")
        for prompt, text in zip(self._prompts, self._texts, strict=True):
            table.add_row(Text(shorten(prompt)), Text(" ".join(text.split())[-room:]))
        return table


def shorten(prompt: str) -> str:
    """One line of at most PROMPT_WIDTH characters.

    >>> shorten("one    two")
    'one two'
    """
    line = " ".join(prompt.split())
    return line if len(line) <= PROMPT_WIDTH else line[: PROMPT_WIDTH - 1] + "…"


def figures(report: Report) -> Table:
    """The closing table."""
    table = Table("measure", "value", title="metrics")
    table.columns[1].justify = "right"
    first, inter = report.first_token_p50_s, report.inter_token_p50_s
    rows = {
        "prompt tokens": f"{report.prompt_tokens}",
        "generated tokens": f"{report.generated_tokens}",
        "time in steps": f"{report.seconds:.2f} s",
        "tokens/s": f"{report.tokens_per_second:.1f}",
        "time to first token, p50 / p95": _milliseconds(first, report.first_token_p95_s),
        "inter-token latency, p50 / p95": _milliseconds(inter, report.inter_token_p95_s),
        "pages used at peak": f"{report.peak_pages} of {report.num_pages}",
        "pages computed once for several": f"{report.peak_shared_pages} at peak",
        "prefix-cache hits": f"{report.prefix_hit_tokens} tokens",
        "preemptions": f"{report.preemptions}",
        "drafts accepted": _acceptance(report),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _acceptance(report: Report) -> str:
    if report.acceptance_rate is None:
        return "-"
    counts = f"{report.accepted_tokens} of {report.drafted_tokens}"
    return f"{counts} ({report.acceptance_rate:.1%})"


def _milliseconds(p50: float | None, p95: float | None) -> str:
    if p50 is None or p95 is None:
        return "-"
    return f"{1e3 * p50:.1f} / {1e3 * p95:.1f} ms"
