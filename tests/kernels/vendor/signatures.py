"""Signatures of what we call of FlashInfer: read from its sources, or as recorded from 0.6.18.

    python -m tests.kernels.vendor.signatures FOLDER

reads them from an installed or unpacked ``flashinfer`` folder and records them again. Only facts
are kept: names of parameters, their kinds, and whether they have a default.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

RECORD = Path(__file__).with_name("signatures.json")
# `plan` of decode passes keywords on to `_plan_impl`, which stands after it.
METHODS = {"__init__": "__init__", "plan": "plan", "run": "run", "_plan_impl": "plan"}
# Where each name is defined.
PLACES = {
    "decode.py": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "prefill.py": ("BatchPrefillWithPagedKVCacheWrapper", "trtllm_batch_context_with_kv_cache"),
    "attention/_core.py": ("BatchAttentionWithAttentionSinkWrapper",),
    "utils.py": ("FP4Tensor",),
}
# What a class has from another.
BASES = {"BatchAttentionWithAttentionSinkWrapper": "BatchPrefillWithPagedKVCacheWrapper"}

Parameters = list[list[str]]  # name, kind, "default" or ""


def folder() -> Path | None:
    """Where FlashInfer's sources are: PAGEANT_FLASHINFER, or the installed package."""
    given = os.environ.get("PAGEANT_FLASHINFER")
    if given:
        path = Path(given)
        return path / "flashinfer" if (path / "flashinfer").is_dir() else path
    found = find_spec("flashinfer")
    return None if found is None or found.origin is None else Path(found.origin).parent


def read(root: Path) -> dict[str, Parameters]:
    """The parameters of each function and method, from the sources; nothing is imported."""
    found: dict[str, Parameters] = {}
    for file, names in PLACES.items():
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                for part in node.body:  # of overloads the last one counts
                    if isinstance(part, ast.FunctionDef) and part.name in METHODS:
                        name = METHODS[part.name]
                        found[f"{node.name}.{name}"] = _parameters(part.args)[1:]
            elif isinstance(node, ast.FunctionDef) and node.name in names:
                found[node.name] = _parameters(node.args)
    return found


def _parameters(args: ast.arguments) -> Parameters:
    plain = [*args.posonlyargs, *args.args]
    bare = len(plain) - len(args.defaults)
    rows = [
        [arg.arg, "POSITIONAL_OR_KEYWORD", "default" if index >= bare else ""]
        for index, arg in enumerate(plain)
    ]
    if args.vararg:
        rows.append([args.vararg.arg, "VAR_POSITIONAL", ""])
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        rows.append([arg.arg, "KEYWORD_ONLY", "" if default is None else "default"])
    if args.kwarg:
        rows.append([args.kwarg.arg, "VAR_KEYWORD", ""])
    return rows


def recorded() -> dict[str, Parameters]:
    """What was recorded."""
    found: dict[str, Parameters] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def signature(known: dict[str, Parameters], name: str) -> inspect.Signature:
    """The signature of a function, or of "Class.method" or what its class has it from."""
    owner, _, method = name.partition(".")
    rows = known.get(name) or known[f"{BASES[owner]}.{method}"]
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter,
                getattr(inspect.Parameter, kind),
                default=None if default else inspect.Parameter.empty,
            )
            for parameter, kind, default in rows
        ]
    )


if __name__ == "__main__":
    lines = [
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(read(Path(sys.argv[1])).items())
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
