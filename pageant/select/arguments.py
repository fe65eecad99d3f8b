"""Options that several commands take, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

QHeads = Annotated[int, typer.Option(help="Query heads.")]
KVHeads = Annotated[int, typer.Option(help="Key/value heads.")]
HeadDim = Annotated[int, typer.Option(help="Head size of queries and keys.")]
VHeadDim = Annotated[int | None, typer.Option(help="Of values. Default: head-dim.")]
PageSize = Annotated[int, typer.Option(help="Tokens a page.")]
Dtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]
CacheFormat = Annotated[str, typer.Option(help="Cache format; auto stores the dtype.")]
Kernels = Annotated[
    str, typer.Option(help="auto, pageant, flashinfer, reference, or one kernel's name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
