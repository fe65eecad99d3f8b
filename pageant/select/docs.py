"""Documents made from the rows: ``docs/kernels.md``, and the support table of the README.

``python -m pageant.select.docs`` writes both; a test fails while either is stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES
from pageant.select.built import is_built
from pageant.select.cases import explain_case
from pageant.select.needs import SEVERAL_RANKS, one_of
from pageant.select.row import Row
from pageant.select.rows import OWNERS, ROWS
from pageant.select.words import FEATURES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kernels.md"
README = ROOT / "README.md"
BEGIN = "<!-- kernels: made by `python -m pageant.select.docs`, do not edit -->"
END = "<!-- end of kernels -->"

INTRODUCTION = """\
# Kernels

*Made from `pageant/select/rows.py` by `python -m pageant.select.docs`; do not edit.*

Which kernel runs is decided once, when an `Attention` is built, by a table of rows. Each row names
a kernel and lists everything it serves: devices, types, cache formats, sizes, features. The first
row of a phase that serves everything asked for wins; what a row does not list, it refuses, and says
so. Ask on any machine, for any device:

    pageant explain --sm 90 --cache fp8 --sinks --spec 3

*Prefill* is a request that brings many new tokens, *decode* one that brings a few. A *page* holds
the keys and values of a few tokens. *Drafts* are tokens that a smaller model proposed and a decode
verifies. *Sinks* are learnt scores, one a head, that take part in the softmax without a value.

Rows marked "not built yet" say what a kernel will serve. Until it exists they refuse, and the next
row is asked.
"""

FLASHINFER = """\
## What FlashInfer's backend would do

`--kernels flashinfer` answers what vLLM's FlashInfer backend (0.31) resolves to; FlashInfer need
not be installed. *Table kernels* (XQA, trtllm-gen) read the page table on the device; *native* ones
are planned on the host. Where that backend silently drops something, the answer differs from it:

- A soft cap or ALiBi goes to native kernels, for the table kernels would ignore it. Everything a
  host is told (how many tokens make a decode, graphs, drafts) then follows the native kernel.
- A soft cap or ALiBi together with sinks, an nvfp4 cache or pages of 128 tokens and more is
  refused: no kernel is left.
- Sinks are refused where sequences are shared among ranks, and for heads of 512 on sm90 and sm12x.

The same question for four devices: an fp8 cache, sinks, and three draft tokens.
"""
CAPTIONS = {
    "80": "Ampere has native kernels only, and those take no sinks:",
    "90": "Hopper prefills in fp8, with the native kernel that takes sinks; XQA decodes, all four "
    "tokens of a request at once, with 16-bit queries:",
    "100": "Datacentre Blackwell has one table kernel for both phases, also for large pages:",
    "120": "Consumer Blackwell is like Hopper, but its prefill keeps 16-bit queries:",
}
QUESTION = "--cache fp8 --sinks --spec 3 --kernels flashinfer"


def page() -> str:
    """The whole of docs/kernels.md."""
    parts = [INTRODUCTION]
    for owner, title in (("pageant", "Own kernels"), ("reference", "The reference")):
        parts += [f"## {title}\n", *(_row_text(row) for row in ROWS if row.owner == owner)]
    parts.append(FLASHINFER)
    for sm, caption in CAPTIONS.items():
        case = {"sm": sm, "cache": "fp8", "sinks": True, "spec": 3, "kernels": "flashinfer"}
        parts.append(f"{caption}\n")
        parts.append(
            f"```console\n$ pageant explain --sm {sm} {QUESTION}\n{explain_case(case)}\n```\n"
        )
    parts.append("## FlashInfer's kernels\n")
    parts += [_row_text(row) for row in ROWS if row.owner == "flashinfer"]
    return "\n".join(parts)


def _row_text(row: Row) -> str:
    """One row: its reason, then what it serves, field by field."""
    state = "" if is_built(row) or row.owner == "flashinfer" else " Not built yet."
    lines = [f"### `{row.name}`: {one_of(row.phases)}, {_devices(row.families)}\n"]
    lines.append(f"{row.because}{state}\n")
    heads = one_of(row.head_dims) if isinstance(row.head_dims, tuple) else row.head_dims
    lines += [
        f"- model types: {one_of(row.dtypes)}",
        f"- cache formats: {_formats(row)}",
        f"- head sizes: {heads}",
        f"- tokens a page: {'any' if row.page_sizes is None else one_of(row.page_sizes)}",
        f"- layouts: {'any' if row.layouts is None else one_of(row.layouts)}",
        f"- sequences on {one_of(row.ranks)}",
        f"- outputs: {one_of(row.out_formats)}",
        f"- not served: {_not_served(row) or 'nothing else is refused'}",
    ]
    if "decode" in row.phases:
        drafts = "decodes may bring drafts" if row.reports.takes_drafts else "one token a decode"
        lines.append(f"- CUDA graphs: {row.reports.graph}; {drafts}")
    return "\n".join(lines) + "\n"


def _devices(families: Iterable[str]) -> str:
    """Families in words.

    >>> _devices(FAMILIES), _devices(name for name in FAMILIES if name != "cpu"), _devices(["sm90"])
    ('all devices', 'all GPUs', 'sm90')
    """
    given = set(families)
    if given >= set(FAMILIES) - {"cpu"}:
        return "all devices" if "cpu" in given else "all GPUs"
    return one_of(tuple(family for family in FAMILIES if family in given))


def _formats(row: Row) -> str:
    return "all" if set(row.formats) == set(FORMATS) else one_of(row.formats)


def _not_served(row: Row) -> str:
    return "; ".join(words.lacking for name, words in FEATURES.items() if name not in row.features)


def table() -> str:
    """The README's table: each kernel of ours, what it serves and what it does not."""
    lines = [
        "| Kernel | Phase | Devices | Models | Cache formats | Not served | State |",
        "|---|---|---|---|---|---|---|",
    ]
    names = dict.fromkeys(row.name for row in ROWS if row.owner in OWNERS["auto"])
    for rows in ([row for row in ROWS if row.name == name] for name in names):
        first, *others = rows
        models = [one_of(first.dtypes)]
        models += [f"on {one_of(row.families)} {one_of(row.dtypes)}" for row in others]
        cells = [
            f"`{first.name}`",
            one_of(first.phases),
            _devices(family for row in rows for family in row.families),
            "; ".join(models),
            _formats(first),
            _missing(first) or "–",
            "works" if is_built(first) else "not built yet",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _missing(row: Row) -> str:
    """Features, ranks and outputs the row does not serve, in short."""
    ranks = "" if SEVERAL_RANKS in row.ranks else "sequences on several ranks"
    outputs = "quantised output" if row.out_formats == ("model",) else ""
    return "; ".join(filter(None, (_not_served(row), ranks, outputs)))


def readme(text: str) -> str:
    """The README's text with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
