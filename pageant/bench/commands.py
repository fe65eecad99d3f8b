"""The commands `pageant bench NAME`. What takes long to import is imported when one runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from pageant.bench.cases import CPU_CASES, CPU_CLAIMS, Case
from pageant.bench.gpu.commands import COMMANDS
from pageant.cache.formats import FORMATS, resolve
from pageant.device import Device
from pageant.engine.errors import EngineError
from pageant.engine.model import DEFAULT_MODEL, load
from pageant.types import bad

if TYPE_CHECKING:  # brings in transformers, which takes seconds that `--help` should not
    from pageant.bench.perplexity import Measurement

bench = typer.Typer(
    name="bench",
    help="Time kernels against others; measure what cache formats cost.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in COMMANDS:
    bench.command()(command)
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON object to this file.")]


@bench.command()
def cpu(
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this contender; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Counted calls of each contender.")] = 15,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Decode and prefill on this processor, against torch's attention."""
    from pageant.bench.cpu import measure
    from pageant.bench.record import check_writable, record
    from pageant.bench.results import judge
    from pageant.bench.show import cpu_case, cpu_claims

    _at_least("rounds", rounds, 1)
    cases = _cases(case or [], only or [])
    if out is not None:
        check_writable("out", out)
    console, results = Console(stderr=as_json), []
    for each in cases:
        with console.status(each.name):
            found = measure(each, rounds, only or [])
        console.print(cpu_case(each.name, found))
        results += found
    verdicts = judge(results, CPU_CLAIMS)
    if verdicts:
        console.print(cpu_claims(verdicts))
    answer = record(
        "cpu",
        torch.device("cpu"),
        rounds=rounds,
        cases=[{**asdict(each), "dtype": _name(each.dtype)} for each in cases],
        results=[asdict(each) for each in results],
        claims=[{**asdict(one.claim), "ratio": one.ratio, "holds": one.holds} for one in verdicts],
    )
    _finish(answer, as_json, out)


def _cases(names: list[str], only: list[str]) -> list[Case]:
    """The cases asked for; none means all."""
    from pageant.bench.cpu import contenders

    known = {each.name: each for each in CPU_CASES}
    for name in names:
        if name not in known:
            raise bad("case", name, ", ".join(known))
    cases = [each for each in CPU_CASES if not names or each.name in names]
    runners = dict.fromkeys(name for each in cases for name in contenders(each))
    for name in only:
        if name not in runners:
            raise bad("only", name, ", ".join(runners))
    return cases


@bench.command()
def perplexity(  # budget: one parameter for each option of the command
    format: Annotated[
        list[str] | None, typer.Option(help="Only this cache format; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to predict.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens prefilled together.")] = 512,
    calibrate: Annotated[
        int, typer.Option(help="Further tokens that scales are fitted to; 0: scales 1.")
    ] = 1024,
    percentile: Annotated[
        float, typer.Option(help="Per cent of K and V that scales must not clip.")
    ] = 100.0,
    kernels: Annotated[
        str, typer.Option(help="auto, pageant, reference, or one kernel's name.")
    ] = "auto",
    check: Annotated[
        bool, typer.Option("--check", help="Run the reference too; exit 1 where a bound breaks.")
    ] = False,
    model: Annotated[str, typer.Option(help="smollm2, a local folder, or a hub id.")] = (
        DEFAULT_MODEL
    ),
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    as_json: Json = False,
    out: Out = None,
    write: Annotated[
        Path | None, typer.Option(help="Put the table into its section of this Markdown file.")
    ] = None,
) -> None:
    """Perplexity of a model with each cache format, over Python's documentation topics."""
    from pageant.bench.record import check_writable, record
    from pageant.bench.show import perplexity_section, perplexity_table
    from pageant.bench.tables import replace_section

    _at_least("tokens", tokens, 1)
    _at_least("window", window, 1)
    _at_least("calibrate", calibrate, 0)
    names = dict.fromkeys(resolve(each, torch.float32).name for each in format or FORMATS)
    Device.detect(device)
    for name, path in (("out", out), ("write", write)):
        if path is not None:
            check_writable(name, path)
    console, where = Console(stderr=as_json), torch.device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    with console.status(f"loading {model}"):
        measurement = _measurement(model, dtype, where, (tokens, window, calibrate), percentile)
    from pageant.bench.perplexity import broken

    rows = []
    for name in names:
        with console.status(name):
            rows.append(measurement.row(name, kernels, check=check))
    faults = broken(rows) if check else []
    console.print(perplexity_table(rows))
    for fault in faults:
        console.print(fault, style="red", soft_wrap=True)
    text = {"tokens": tokens, "window": window, "calibrate": calibrate, "percentile": percentile}
    answer = record(
        "perplexity",
        where,
        model=model,
        dtype=_name(dtype),
        kernels=kernels,
        text=text,
        results=[asdict(row) for row in rows],
    )
    if write is not None:
        replace_section(write, "perplexity", perplexity_section(rows, answer))
    _finish(answer, as_json, out)
    if faults:
        raise typer.Exit(1)


def _measurement(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    sizes: tuple[int, int, int],
    percentile: float,
) -> Measurement:
    try:
        loaded = load(model, dtype, device, quiet=True)
    except EngineError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    from pageant.bench.perplexity import Measurement, Text

    return Measurement(loaded.model, Text.of(loaded.tokenizer, *sizes), percentile)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise bad(name, value, f"a whole number from {least} up")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finish(answer: dict[str, Any], as_json: bool, out: Path | None) -> None:
    """Print and save a result, as asked."""
    from pageant.bench.record import save

    if as_json:
        typer.echo(json.dumps(answer))
    if out is not None:
        save(out, answer)
