"""A question to `explain` as plain data: one line of a case file, or the options of the command.

>>> answer_case({"sm": "cpu", "head_dim": 64, "spec": 3})["decode_threshold"]
4
>>> answer_case({"sm": "cpu", "head_dim": 20})["argument"]
'head_dim'
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pageant.device import Device
from pageant.ranks import ContextParallel
from pageant.select.answer import Explanation, refused_dict
from pageant.select.explain import explain, missing_in
from pageant.types import (
    ArgumentError,
    CacheSpec,
    Features,
    Options,
    Shape,
    Support,
    bad,
)

# Every key a case may have, and what it is when absent. sm None: this machine's device.
DEFAULTS: dict[str, Any] = {
    "sm": None,
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "v_head_dim": None,
    "page_size": 16,
    "dtype": "bfloat16",
    "cache": "auto",
    "layout": "LBHNC",
    "dcp": 1,
    "sinks": False,
    "window": None,
    "soft_cap": 0,
    "alibi": False,
    "spec": 0,
    "non_causal_drafts": False,
    "adaptive": False,
    "invariant": False,
    "q_quant": True,
    "table_kernels": "auto",
    "cubins": True,
    "kernels": "auto",
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TABLE_KERNELS = {"auto": None, "on": True, "off": False}


def answer_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one case as JSON data, whether it can run or not."""
    try:
        return explain_case(case).to_dict()
    except ArgumentError as error:
        return refused_dict(Support(False, str(error), error.argument))


def answer_file(path: Path, absent: Mapping[str, Any] = DEFAULTS) -> Iterator[dict[str, Any]]:
    """The answers to a file of cases, one JSON object a line, as it is read; blank lines are none.

    Args:
        path: the file.
        absent: the values of keys that a case leaves out.

    Raises:
        ArgumentError: a line that is no case, after the answers before it; or no such file.
    """
    for number, line in enumerate(_lines_of(path), start=1):
        if line.strip():
            yield answer_case({**absent, **_case(f"{path} line {number}", line)})


def _lines_of(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeError) as error:
        raise ArgumentError(f"cases {str(path)!r} cannot be read: {error}", "cases") from error


def _case(where: str, line: str) -> dict[str, Any]:
    try:
        case = json.loads(line)
    except (ValueError, RecursionError) as error:  # also too long a number, too deep a list
        raise ArgumentError(f"{where}: not JSON: {error}", "cases") from None
    if not isinstance(case, dict):
        raise ArgumentError(f"{where}: not a JSON object", "cases")
    unknown = [key for key in case if key not in DEFAULTS]
    if unknown:
        allowed = ", ".join(DEFAULTS)
        raise ArgumentError(f"{where}: unknown key {unknown[0]!r}; allowed: {allowed}", "cases")
    return case


def explain_case(case: Mapping[str, Any]) -> Explanation:
    """The kernels one case gets. Absent keys have their default; other keys are not looked at.

    Raises:
        ArgumentError: a value that makes no sense on any device.
    """
    case = {**DEFAULTS, **case}
    window = None if type(case["window"]) is int and case["window"] == 0 else case["window"]
    # Only FlashInfer has kernels that come as prebuilt binaries.
    if not isinstance(case["cubins"], bool):
        raise bad("cubins", case["cubins"], "True or False")
    options = _options(case)
    explanation = explain(
        Shape(
            num_q_heads=case["q_heads"],
            num_kv_heads=case["kv_heads"],
            head_dim=case["head_dim"],
            v_head_dim=case["v_head_dim"],
            dtype=named("dtype", case["dtype"], DTYPES),
        ),
        CacheSpec(format=case["cache"], page_size=case["page_size"], layout=case["layout"]),
        Features(
            windows=(window,),
            soft_cap=_has_cap(case["soft_cap"]),
            sinks=case["sinks"],
            alibi=case["alibi"],
        ),
        options,
        _device(case["sm"]),
        cubins=case["cubins"],
        missing=missing_in(options.kernels),
    )
    if not explanation.choices:
        support = explanation.support
        raise ArgumentError(support.reason or "", support.argument or "")
    return explanation


def _options(case: dict[str, Any]) -> Options:
    return Options(
        kernels=case["kernels"],
        invariant=case["invariant"],
        speculative_tokens=case["spec"],
        context_parallel=ContextParallel(rank=0, world=case["dcp"]),
        quantize_query=case["q_quant"],
        table_kernels=named("table_kernels", case["table_kernels"], TABLE_KERNELS),
        adaptive=case["adaptive"],
        non_causal_drafts=case["non_causal_drafts"],
    )


def named(argument: str, name: Any, values: dict[str, Any]) -> Any:
    """The value a name stands for.

    Raises:
        ArgumentError: a name that stands for none.
    """
    if not isinstance(name, str) or name not in values:
        raise bad(argument, name, ", ".join(values))
    return values[name]


def _has_cap(cap: Any) -> bool:
    if (
        isinstance(cap, bool)
        or not isinstance(cap, int | float | None)
        or not 0 <= (cap or 0) < math.inf
    ):
        raise bad("soft_cap", cap, "a number from 0 up; 0 means none")
    return bool(cap)


def _device(sm: Any) -> Device:
    return _this_machine() if sm is None else Device.of(str(sm))


@cache
def _this_machine() -> Device:
    try:
        return Device.detect("cuda")
    except ArgumentError:
        return Device.detect("cpu")
