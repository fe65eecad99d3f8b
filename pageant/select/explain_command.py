"""The command `pageant explain`: its options, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pageant.select.answer import refused_dict
from pageant.select.arguments import (
    AsJson,
    CacheFormat,
    Dtype,
    HeadDim,
    Kernels,
    KVHeads,
    PageSize,
    QHeads,
    VHeadDim,
)
from pageant.select.cases import DEFAULTS, answer_file, explain_case
from pageant.types import ArgumentError, Support


def explain(  # budget: one parameter for each option of the command
    sm: Annotated[
        str | None, typer.Option(help="cpu, or 75 to 121. Default: this machine's.")
    ] = None,
    q_heads: QHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    v_head_dim: VHeadDim = None,
    page_size: PageSize = 16,
    dtype: Dtype = "bfloat16",
    cache: CacheFormat = "auto",
    layout: Annotated[str, typer.Option(help="Order of the cache's axes.")] = "LBHNC",
    dcp: Annotated[int, typer.Option(help="Ranks that share every sequence.")] = 1,
    sinks: Annotated[bool, typer.Option("--sinks", help="Attention sinks.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Keys a row sees, itself included; 0: all.")
    ] = None,
    soft_cap: Annotated[float, typer.Option(help="Cap of scores; 0: none.")] = 0.0,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes.")] = False,
    spec: Annotated[int, typer.Option(help="Draft tokens of a decode.")] = 0,
    non_causal_drafts: Annotated[
        bool, typer.Option("--non-causal-drafts", help="A drafter that is not causal.")
    ] = False,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Only the device knows the lengths.")
    ] = False,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="A request's bits do not depend on its batch.")
    ] = False,
    no_q_quant: Annotated[
        bool, typer.Option("--no-q-quant", help="Never quantise queries.")
    ] = False,
    table_kernels: Annotated[
        str, typer.Option(help="FlashInfer's kernels that read page tables: auto, on or off.")
    ] = "auto",
    no_cubins: Annotated[
        bool, typer.Option("--no-cubins", help="FlashInfer's prebuilt kernels cannot be had.")
    ] = False,
    kernels: Kernels = "auto",
    as_json: AsJson = False,
    cases: Annotated[
        Path | None,
        typer.Option(
            help="Answer a file of JSON cases, a line each; other options: what cases leave out."
        ),
    ] = None,
) -> None:
    """Say which kernels a configuration gets on a device, and why not others."""
    given = {**locals(), "q_quant": not no_q_quant, "cubins": not no_cubins}
    asked = {key: given[key] for key in DEFAULTS}
    if cases is not None:
        for said in answer_file(cases, asked):
            typer.echo(json.dumps(said))
        return
    try:
        explanation = explain_case(asked)
    except ArgumentError as error:
        if as_json:
            typer.echo(json.dumps(refused_dict(Support(False, str(error), error.argument))))
        raise
    typer.echo(json.dumps(explanation.to_dict()) if as_json else str(explanation))
