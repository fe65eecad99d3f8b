"""The whole policy as text: every device x phase x format x question, refusals included.

``python -m pageant.select.golden > tests/golden/kernels.txt`` accepts a change of policy; what
changed is then a readable diff. Nothing in it depends on what is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from pageant.select.answer import Explanation
from pageant.select.built import missing_anywhere, never_missing
from pageant.select.choose import Choice
from pageant.select.explain import explain
from pageant.select.questions import (
    FLASHINFER_OPTIONS,
    FLASHINFER_QUESTIONS,
    QUESTIONS,
    configuration,
)
from pageant.select.refusal import Refusal
from pageant.select.row import PHASES, Phase

Line = tuple[str, ...]  # a question, formats that share an answer, and the answer


def render() -> str:
    """The tables: a line for each group of questions and of formats that share an answer.

    "triton.decode:dtype+lse" says that triton.decode was refused because of dtype and lse. Refusals
    of one reason stand at the end in full; those of several join the words of each. Devices that
    agree share a table. FlashInfer's own choices have tables with what follows for a host.
    """
    sentences: dict[str, None] = {}  # in order, each once
    parts: dict[tuple[str, str], list[str]] = {}
    for phase in PHASES:
        for family, device in FAMILIES.items():
            text = _table(list(_kernels(device, phase, sentences)))
            parts.setdefault((phase, text), []).append(family)
    for family, device in FAMILIES.items():
        text = _table(list(_flashinfer(device, sentences)))
        parts.setdefault(("flashinfer", text), []).append(family)
    tables = [f"{title}: {' '.join(families)}\n{text}" for (title, text), families in parts.items()]
    return "\n\n".join((*tables, "\n".join(sorted(sentences)))) + "\n"


def _table(lines: list[Line]) -> str:
    """The lines below the questions they answer, as columns."""
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[1:-1]]
    text, questions = [], ""
    for line in lines:
        if line[0] != questions:
            questions = line[0]
            text.append(questions)
        cells = [f"{cell:<{width}}" for cell, width in zip(line[1:-1], widths, strict=True)]
        text.append("  ".join(("", *cells, line[-1])).rstrip())
    return "\n".join(text)


def _kernels(device: Device, phase: Phase, sentences: dict[str, None]) -> Iterator[Line]:
    """The kernel each question gets in one phase, and the refusals before it."""
    elsewhere: dict[str, None] = {}

    def answer(changes: dict[str, Any], fmt: str) -> Line:
        choice = _ask(device, fmt, changes).choices[PHASES.index(phase)]
        elsewhere.update({r.kernel: None for r in choice.refused if r.kind == "elsewhere"})
        return choice.row.name if choice.row else "-", _codes(choice, sentences)

    yield from _answers(QUESTIONS, answer)
    yield "for other places", "", "", " ".join(elsewhere)


def _flashinfer(device: Device, sentences: dict[str, None]) -> Iterator[Line]:
    """What vLLM's FlashInfer backend resolves to, and what it reports to its host."""

    def answer(changes: dict[str, Any], fmt: str) -> Line:
        said = _ask(device, fmt, changes, **FLASHINFER_OPTIONS)
        refusals = " ".join(_codes(choice, sentences) for choice in said.choices)
        return _reports(said) if said.support.ok else ("-", "-", "-", "-", refusals)

    yield from _answers(FLASHINFER_QUESTIONS, answer)


def _answers(
    questions: dict[str, dict[str, Any]], answer: Callable[[dict[str, Any], str], Line]
) -> Iterator[Line]:
    """Lines of questions, formats and their answer; questions with the same answers share them."""
    shared: dict[tuple[Line, ...], list[str]] = {}
    for question, changes in questions.items():
        groups: dict[Line, list[str]] = {}
        for fmt in FORMATS:
            groups.setdefault(answer(changes, fmt), []).append(fmt)
        lines = tuple(
            ("all" if len(formats) == len(FORMATS) else " ".join(formats), *said)
            for said, formats in groups.items()
        )
        shared.setdefault(lines, []).append(question)
    for lines, names in shared.items():
        yield from ((" | ".join(names), *line) for line in lines)


def _reports(answer: Explanation) -> Line:
    """Kernels with the types of their queries, and everything a host is told."""
    queries, rows = answer.query_dtypes, answer.rows
    kernels = [f"{rows[p].name.removeprefix('flashinfer.')}:{queries[p]}" for p in PHASES]
    pages = "any" if answer.page_sizes is None else f"{answer.page_sizes[-1]}"
    said = {
        f"varlen-{answer.varlen_graph_max_q}": answer.varlen_graph_max_q is not None,
        "mismatch": answer.lens_mismatch,
        "reuse": answer.draft_reuse,
        "fp8-query": answer.takes_fp8_query,
        "sinks": answer.serves_sinks,
        "non-causal": answer.serves_non_causal,
        "head-major": answer.layouts is not None,
        **{f"{name}-out": True for name in answer.fused_out_formats},
    }
    graph = f"{answer.cuda_graph}:{answer.decode_threshold}"
    return *kernels, graph, f"pages<={pages}", " ".join(n for n, is_so in said.items() if is_so)


def _ask(device: Device, fmt: str, changes: dict[str, Any], **defaults: Any) -> Explanation:
    cubins = changes.get("cubins", True)
    shape, cache, features, options = configuration(fmt, changes, **defaults)
    missing = never_missing if options.kernels == "flashinfer" else missing_anywhere
    return explain(shape, cache, features, options, device, cubins=cubins, missing=missing)


def _codes(choice: Choice, sentences: dict[str, None]) -> str:
    """Each refusal in short, but of rows for other places. Sentences of one reason are noted."""
    codes = []
    for refusal in choice.refused:
        code = f"{refusal.kernel}:{_reasons(refusal)}"
        if refusal.kind != "elsewhere":
            codes.append(code)
        if len(refusal.arguments) == 1:
            sentences[f"{code}  {refusal.why}"] = None
    return " ".join(codes)


def _reasons(refusal: Refusal) -> str:
    return "not-built" if refusal.kind == "missing" else "+".join(refusal.arguments)


if __name__ == "__main__":
    sys.stdout.write(render())
