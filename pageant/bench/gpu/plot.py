"""A result of decode or prefill as a picture: how near its ceilings each case came."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageant.bench.gpu.report import share
from pageant.types import bad

OURS, PEER = "pageant", "best peer"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One contender on one case.

    Attributes:
        case, contender: their names.
        is_ours: whether it is Pageant.
        intensity: multiplications and additions for each byte that must move.
        tflops: reached.
        share: of the case's ceiling: bytes for decode, multiplications for prefill.
    """

    case: str
    contender: str
    is_ours: bool
    intensity: float
    tflops: float
    share: float


def points(answer: dict[str, Any]) -> list[Point]:
    """Of each case Pageant's result, and the best peer's where one ran."""
    found = []
    for case in answer["cases"]:
        ran = [each for each in answer["results"] if each["case"] == case["name"]]
        ran = sorted((each for each in ran if each["median_ms"]), key=lambda x: x["median_ms"])
        for is_ours in (True, False):
            best = [each for each in ran if each["contender"].startswith("pageant") == is_ours][:1]
            found += [
                Point(
                    case=case["name"],
                    contender=each["contender"],
                    is_ours=is_ours,
                    intensity=case["flops"] / case["num_bytes"],
                    tflops=case["flops"] / each["median_ms"] / 1e9,
                    share=share(case, each["median_ms"], answer["ceilings"]),
                )
                for each in best
            ]
    return found


def roof(intensity: float, ceilings: dict[str, float]) -> float:
    """TFLOP/s that memory and arithmetic leave possible.

    >>> roof(2.0, {"read_gbs": 4000.0, "bf16_tflops": 700.0})
    8.0
    """
    return min(intensity * ceilings["read_gbs"] / 1e3, ceilings["bf16_tflops"])


def draw(answer: dict[str, Any], path: Path) -> None:
    """Write a picture: the roofline, and each case's share of its ceiling.

    Raises:
        ArgumentError: where matplotlib is missing, or the result is of another benchmark.
    """
    if "cases" not in answer or "ceilings" not in answer:
        raise bad("result", answer.get("bench"), "one of decode or prefill")
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise bad("plot", str(path), "nothing: it needs matplotlib") from None
    found, ceilings = points(answer), answer["ceilings"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    reach = [1.0, 1e3 * ceilings["bf16_tflops"] / ceilings["read_gbs"], 1e5]
    left.loglog(reach, [roof(x, ceilings) for x in reach], color="black", linewidth=1)
    names = list(dict.fromkeys(point.case for point in found))
    for is_ours, label, color, shift in ((True, OURS, "C0", -0.2), (False, PEER, "C1", 0.2)):
        ours = [point for point in found if point.is_ours == is_ours]
        xs, ys = [point.intensity for point in ours], [point.tflops for point in ours]
        left.scatter(xs, ys, color=color, label=label, s=18)
        places = [names.index(point.case) + shift for point in ours]
        right.barh(places, [100 * point.share for point in ours], 0.4, color=color, label=label)
    left.set(xlabel="FLOP / byte", ylabel="TFLOP/s", title="roofline")
    right.set(xlabel="% of the ceiling", title=f"{answer['bench']}, {answer['device']['name']}")
    right.set_yticks(range(len(names)), names)
    right.invert_yaxis()
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
