from pathlib import Path

import pytest

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES
from pageant.select import built
from pageant.select.golden import render
from pageant.select.questions import FLASHINFER_QUESTIONS, QUESTIONS
from pageant.select.rows import NAMES, ROWS
from pageant.select.words import FEATURES

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels.txt"


@pytest.fixture(scope="module")
def text() -> str:
    return render()


def test_policy_is_the_one_agreed_on(text: str) -> None:
    again = "python -m pageant.select.golden > tests/golden/kernels.txt"
    assert text == GOLDEN.read_text(encoding="utf-8"), f"if this is meant: {again}"


@pytest.mark.parametrize("title", ["prefill", "decode", "flashinfer"])
def test_tables_cover_the_grid(text: str, title: str) -> None:
    """Every device x question x format has its line."""
    expected = FLASHINFER_QUESTIONS if title == "flashinfer" else QUESTIONS
    tables = [part for part in text.split("\n\n") if part.startswith(f"{title}: ")]
    families = [family for table in tables for family in table.splitlines()[0].split()[1:]]
    assert sorted(families) == sorted(FAMILIES)
    for table in tables:
        asked: list[str] = []
        answered: dict[str, list[str]] = {}
        for line in table.splitlines()[1:]:
            if line.startswith("  "):
                formats = line[2:].split("  ")[0].split()
                for question in asked:
                    answered[question] += FORMATS if formats == ["all"] else formats
            else:
                asked = line.split(" | ")
                answered.update({question: [] for question in asked})
        answered.pop("for other places", None)
        assert set(answered) == set(expected)
        assert all(sorted(formats) == sorted(FORMATS) for formats in answered.values())


def test_every_feature_is_asked() -> None:
    """By a question that one of its names appears in, or by a pair of them that is refused."""
    asked = {word for changes in QUESTIONS.values() for part in changes.values() for word in part}
    options = {
        "window": "windows",
        "mixed_windows": "windows",
        "unquantized_query": "quantize_query",
        "forced_splits": "debug_splits",
        "fp32_over_quantized": "dtype",
    }
    alone = list(FEATURES)[: list(FEATURES).index("table_kernels_off")]
    assert {options.get(feature, feature) for feature in alone} <= asked


@pytest.mark.parametrize("feature", FEATURES)
def test_every_refusal_of_a_feature_is_shown_in_words(text: str, feature: str) -> None:
    is_refused = any(feature not in row.features for row in ROWS)
    lacking = FEATURES[feature].lacking
    assert (f"no {lacking};" in text or f"no {lacking} and" in text) == is_refused


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_shown(text: str, name: str) -> None:
    assert name.removeprefix("flashinfer.") in text


def test_nothing_depends_on_what_is_installed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def unknown(package: str) -> bool:
        raise AssertionError(package)

    monkeypatch.setattr(built, "is_installed", unknown)
    assert render() == text
