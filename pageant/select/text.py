"""An explanation as text, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pageant.cache.formats import resolve
from pageant.select.needs import dtype_name, one_of

if TYPE_CHECKING:
    from pageant.select.answer import Explanation
    from pageant.select.refusal import Refusal

GRAPHS = {
    "NEVER": "",
    "UNIFORM_SINGLE_TOKEN_DECODE": ", of decodes with one new token each",
    "UNIFORM_BATCH": ", of decodes that all bring the same number of tokens",
    "ALWAYS": ", of any batch",
}


def lines_of(answer: Explanation) -> Iterator[str]:
    """The lines of an explanation: what was asked, what runs, what follows, what was refused."""
    if answer.device is None or not answer.choices:
        yield f"refused: {answer.support.reason}"
        return
    yield from _asked(answer)
    yield ""
    if answer.rows:
        yield from _chosen(answer)
        yield ""
    if answer.support.ok:
        yield from _follows(answer)
    else:
        yield f"refused: {answer.support.reason}"
    refused = _worth_saying(answer)
    if refused:
        yield ""
        table = [(r.phase, r.kernel, r.why) for r in refused]
        yield from columns([("phase", "not chosen", "why"), *table])


def _worth_saying(answer: Explanation) -> list[Refusal]:
    """The refusals to show: rows of other devices only where nothing runs, and they would."""
    if answer.support.ok:
        return [refusal for refusal in answer.refused if refusal.kind != "elsewhere"]
    return [r for r in answer.refused if r.kind != "elsewhere" or r.arguments == ("sm",)]


def _asked(answer: Explanation) -> Iterator[str]:
    shape, cache, device = answer.shape, answer.cache, answer.device
    assert device is not None
    dims = f"{shape.head_dim}" + (f"/{shape.value_dim}" * (shape.value_dim != shape.head_dim))
    yield f"device  {device.family} ({device.name})"
    yield (
        f"model   {shape.num_q_heads} query heads, {shape.num_kv_heads} kv heads, "
        f"head size {dims}, {dtype_name(shape.dtype)}"
    )
    stored = resolve(cache.format, shape.dtype).name
    yield f"cache   {stored}, {cache.page_size} tokens a page, layout {cache.layout}"


def _chosen(answer: Explanation) -> Iterator[str]:
    """The kernels; with the types of their queries where one is not the model's."""
    rows, model = answer.rows, dtype_name(answer.shape.dtype)
    queries = answer.query_dtypes if answer.support.ok else {}
    if all(dtype == model for dtype in queries.values()):
        chosen = [(phase, row.name, row.because) for phase, row in rows.items()]
        yield from columns([("phase", "kernel", "because"), *chosen])
        return
    table = [(p, rows[p].name, queries[p], rows[p].because) for p in queries]
    yield from columns([("phase", "kernel", "queries", "because"), *table])


def _follows(answer: Explanation) -> Iterator[str]:
    tokens, longest = answer.decode_threshold, answer.varlen_graph_max_q
    yield f"Requests of up to {tokens} new token{'s' * (tokens > 1)} are decodes."
    yield f"CUDA graphs: {answer.cuda_graph}{GRAPHS[answer.cuda_graph]}."
    if longest is not None and answer.cuda_graph != "ALWAYS":
        yield f"A graph also replays decodes of different lengths, up to {longest} tokens."
    if answer.options.cascade and answer.unshared is not None:
        yield f"Prefixes are not shared: {answer.unshared}."
    elif answer.shares_prefixes and answer.rows["decode"].is_planned_on_device:
        yield "Prefixes are shared in batches that bring shared_prefix_lens."
    if answer.page_sizes is not None:
        layouts = "any" if answer.layouts is None else one_of(answer.layouts)
        yield f"Tokens a page: {one_of(answer.page_sizes)}. Layouts: {layouts}."


def columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; the last column is not padded."""
    widths = [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]
    for line in table:
        padded = [f"{cell:<{width}}" for cell, width in zip(line[:-1], widths, strict=True)]
        yield "  ".join((*padded, line[-1]))
