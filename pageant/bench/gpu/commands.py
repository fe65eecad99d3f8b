"""The commands `pageant bench NAME` of CUDA devices; `main` does the work."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pageant.types import bad

Cases = Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")]
Rounds = Annotated[int, typer.Option(help="Counted replays of each contender.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON object to this file.")]
Picture = Annotated[Path | None, typer.Option(help="Draw the roofline; needs matplotlib.")]
Where = Annotated[str, typer.Option(help="A CUDA device; cpu shows that all runs.")]


def decode(
    case: Cases = None,
    only: Only = None,
    rounds: Rounds = 20,
    as_json: Json = False,
    out: Out = None,
    plot: Picture = None,
    device: Where = "cuda",
) -> None:
    """Decode on a GPU, against the libraries that are installed."""
    _run("decode", as_json, out, device, rounds, case=case or (), only=only or (), plot=plot)


def prefill(
    case: Cases = None,
    only: Only = None,
    rounds: Rounds = 20,
    as_json: Json = False,
    out: Out = None,
    plot: Picture = None,
    device: Where = "cuda",
) -> None:
    """Prefill on a GPU, against the libraries that are installed."""
    _run("prefill", as_json, out, device, rounds, case=case or (), only=only or (), plot=plot)


def write(
    rounds: Rounds = 20, as_json: Json = False, out: Out = None, device: Where = "cuda"
) -> None:
    """Write new keys and values into pages on a GPU, in each cache format."""
    _run("write", as_json, out, device, rounds)


def merge(
    rounds: Rounds = 20, as_json: Json = False, out: Out = None, device: Where = "cuda"
) -> None:
    """Join partial results on a GPU."""
    _run("merge", as_json, out, device, rounds)


def plan(as_json: Json = False, out: Out = None, device: Where = "cuda") -> None:
    """Host microseconds of planning and running a step on a GPU."""
    _run("plan", as_json, out, device)


def plot(
    result: Annotated[Path, typer.Argument(help="A file that decode or prefill wrote.")],
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")],
) -> None:
    """Draw a result of decode or prefill; needs matplotlib."""
    from pageant.bench.gpu.plot import draw
    from pageant.bench.record import check_writable

    check_writable("out", out)
    try:
        answer = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise bad("result", str(result), f"a result file ({error})") from None
    draw(answer, out)


COMMANDS = (decode, prefill, write, merge, plan, plot)


def _run(
    bench: str, as_json: bool, out: Path | None, device: str, rounds: int = 20, **others: Any
) -> None:
    from pageant.bench.gpu.main import main

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        answer = main(bench, out, rounds=rounds, device=device, **others)
    if as_json:
        typer.echo(json.dumps(answer))
