"""The command line: explain, layout, generate, bench and doctor. Needs the extra `engine`.

A user's mistake is one line on stderr and exit code 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from pageant import __version__
from pageant.bench.commands import bench
from pageant.cache.describe import ByteMap
from pageant.cache.formats import resolve
from pageant.cache.pages import layout_for
from pageant.engine.generate import generate
from pageant.select.arguments import (
    AsJson,
    HeadDim,
    KVHeads,
    PageSize,
    VHeadDim,
)
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
    page_size: PageSize = 16,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    v_head_dim: VHeadDim = None,
    order: Annotated[
        str, typer.Option("--layout", help="Order of the axes: layer, block, head, token, content.")
    ] = "LBHNC",
    v_scale_order: Annotated[
        str, typer.Option(help="nvfp4's value scales: linear or swizzled.")
    ] = "linear",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 1,
    pages: Annotated[int, typer.Option(min=1, help="Pages of each layer.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Show where each byte of a page lies. "auto" is bf16 here."""
    shape = Shape(
        num_q_heads=kv_heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim
    )
    spec = CacheSpec(
        format=cache_format,
        page_size=page_size,
        layout=order,
        v_scale_order=cast(Any, v_scale_order),  # checked next, like the others
    )
    valid = check_config(shape, spec)
    if not valid.ok:
        raise ArgumentError(valid.reason or "", valid.argument or "")
    fmt = resolve(cache_format, shape.dtype)
    byte_map = ByteMap(layout_for(shape, spec, layers, pages), fmt, v_scale_order)
    print(json.dumps(byte_map.to_dict()) if as_json else byte_map)


app.command()(generate)
app.add_typer(bench)
