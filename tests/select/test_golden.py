from pathlib import Path

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES
from pageant.select.golden import QUESTIONS, render
from pageant.select.needs import FEATURES

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels.txt"


def test_policy_is_the_one_agreed_on() -> None:
    again = "python -m pageant.select.golden > tests/golden/kernels.txt"
    assert render() == GOLDEN.read_text(encoding="utf-8"), f"if this is meant: {again}"


def test_table_covers_the_grid() -> None:
    parts = render().split("\n\n")[:-1]
    for phase in ("prefill", "decode"):
        families = [
            family
            for part in parts
            if part.startswith(f"{phase}: ")
            for family in part.splitlines()[0].split()[1:]
        ]
        assert sorted(families) == sorted(FAMILIES)
    for part in parts:
        lines = part.splitlines()[2:]
        for question in QUESTIONS:
            formats = [line[15:].split() for line in lines if line[:15].rstrip() == question]
            assert formats
            assert all(cells[0] == "all" or cells[0] in FORMATS for cells in formats)


def test_every_feature_is_asked() -> None:
    asked = {word for changes in QUESTIONS.values() for part in changes.values() for word in part}
    options = {
        "window": "windows",
        "unquantized_query": "quantize_query",
        "forced_splits": "debug_splits",
        "fp32_over_quantized": "dtype",
    }
    assert {options.get(feature, feature) for feature in FEATURES} <= asked
