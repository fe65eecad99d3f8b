"""The command line: `pageant explain | layout | generate | doctor`. Needs the extra `engine`.

A user's mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from pageant import __version__
from pageant.cache.formats import Format, resolve
from pageant.cache.layout import CacheLayout
from pageant.cache.pages import layout_for
from pageant.engine.generate import generate
from pageant.select.doctor import doctor
from pageant.select.explain_command import explain
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Shape

app = typer.Typer(
    help="Attention over a paged KV cache.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# What typer raises for options it cannot read; it has no public name in every version of typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=arguments or ["--help"], prog_name="pageant", standalone_mode=False)
    except UsageError as error:
        return _mistake(getattr(error, "format_message", lambda: "")() or str(error))
    except ArgumentError as error:
        return _mistake(str(error))
    except typer.Abort:
        return _mistake("interrupted")
    return code if isinstance(code, int) else 0


def _mistake(words: str) -> int:
    print(f"error: {' '.join(words.splitlines())}", file=sys.stderr)
    return 2


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pageant {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Attention over a paged KV cache."""


app.command()(explain)
app.command()(doctor)


@app.command()
def layout(  # budget: one parameter for each option of the command
    cache_format: Annotated[str, typer.Argument(metavar="FORMAT", help="Such as bf16 or fp8.")],
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Head size of keys.")] = 128,
    v_head_dim: Annotated[int | None, typer.Option(help="Of values. Default: head-dim.")] = None,
    order: Annotated[
        str, typer.Option("--layout", help="Order of the axes: layer, block, head, token, content.")
    ] = "LBHNC",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 1,
    pages: Annotated[int, typer.Option(min=1, help="Pages of each layer.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show where each byte of a page lies. "auto" is bf16 here."""
    shape = Shape(
        num_q_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
    )
    spec = CacheSpec(format=cache_format, page_size=page_size, layout=order)
    valid = check_config(shape, spec)
    if not valid.ok:
        raise ArgumentError(valid.reason or "", valid.argument or "")
    fmt, byte_map = resolve(cache_format, shape.dtype), layout_for(shape, spec, layers, pages)
    print(json.dumps(_layout_dict(byte_map, fmt)) if as_json else _layout_text(byte_map, fmt))


app.command()(generate)


def _parts(layout: CacheLayout) -> dict[str, dict[str, int]]:
    """Where the key and the value of a row begin, and the bytes each takes."""
    sizes = {"key": (0, layout.key_bytes), "value": (layout.key_bytes, layout.value_bytes)}
    return {
        name: {
            "first_byte": first,
            "row_bytes": size,
            "token_bytes": size * layout.num_kv_heads,
            "page_bytes": size * layout.num_kv_heads * layout.page_size,
        }
        for name, (first, size) in sizes.items()
    }


def _layout_dict(layout: CacheLayout, fmt: Format) -> dict[str, Any]:
    row_bytes = layout.key_bytes + layout.value_bytes
    return {
        "format": fmt.name,
        "element_bits": fmt.bits,
        "layout": layout.order,
        "sizes": layout.sizes,
        "strides_bytes": layout.strides,
        **_parts(layout),
        "row_bytes": row_bytes,
        "token_bytes": row_bytes * layout.num_kv_heads,
        "page_bytes": layout.page_bytes,
        "cache_bytes": layout.num_bytes,
    }


AXES = {"L": "layer", "B": "page", "H": "head", "N": "token"}


def _layout_text(layout: CacheLayout, fmt: Format) -> str:
    said, step = _layout_dict(layout, fmt), fmt.bits // 8
    strides = [(AXES[axis], layout.strides[axis]) for axis in layout.order if axis != "C"]
    where = " + ".join(f"{axis} * {stride}" for axis, stride in (*strides, ("i", step)))
    offsets = {"key": where, "value": f"{where} + {layout.key_bytes}"}
    table = [["", "row", "token", "page", "element i begins at byte"]]
    for name, part in [*((name, said[name]) for name in offsets), ("both", said)]:
        sizes = (str(part[f"{column}_bytes"]) for column in table[0][1:4])
        table.append([name, *sizes, offsets.get(name, "")])
    lines = [
        f"{fmt.name}: {step} byte{'s' * (step > 1)} an element. Layout {layout.order}, outermost "
        f"axis first: {', '.join(axis for axis, _ in strides)}, content.",
        "",
        f"A page holds {layout.page_size} tokens of {layout.num_kv_heads} heads. "
        "A row is one token of one head: its key, then its value.",
        "Bytes of one layer, and where each element lies:",
        "",
        *_columns(table),
        "",
        *_columns(
            [
                ["axis", *(axis for axis, _ in strides), "element"],
                ["stride in bytes", *(str(stride) for _, stride in strides), str(step)],
            ]
        ),
        "",
        f"The first rows in memory, and the last of {layout.num_bytes} bytes:",
        "",
        *_columns([["bytes", *AXES.values(), ""], *_first_rows(layout)]),
    ]
    return "\n".join(lines)


def _first_rows(layout: CacheLayout) -> Iterator[list[str]]:
    """The first rows in memory and the last, each as its key and its value."""
    row_bytes = layout.key_bytes + layout.value_bytes
    num_rows = layout.num_bytes // row_bytes
    for index in dict.fromkeys([*range(min(4, num_rows)), num_rows - 1]):
        at = layout.position(index * row_bytes)
        for name, part in _parts(layout).items():
            first = index * row_bytes + part["first_byte"]
            span = f"{first}..{first + part['row_bytes'] - 1}"
            yield [span, *(str(at[axis]) for axis in AXES), name]


def _columns(table: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()
