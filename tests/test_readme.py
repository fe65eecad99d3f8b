"""The README's example runs as it stands there, and its table is what `explain` prints."""

import re
from pathlib import Path

from pageant.select.cases import explain_case

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found
    return found[1]


def test_example_runs() -> None:
    names: dict[str, object] = {}
    exec(compile(block("python"), "README.md", "exec"), names)
    assert names["out"].shape == (4, 8, 64)  # type: ignore[attr-defined]
    assert names["out"].isfinite().all()  # type: ignore[attr-defined]


def test_explanation_is_current() -> None:
    case = {"sm": "cpu", "cache": "fp8", "sinks": True, "window": 128, "head_dim": 64}
    _, _, *shown = block("console").splitlines()  # the command, and this machine's processor
    assert str(explain_case(case)).splitlines()[1:] == shown
