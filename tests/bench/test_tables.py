"""A section between markers changes; whatever else stands in the document does not."""

from pathlib import Path

import pytest

from pageant.bench.tables import replace_section

MARKED = "<!-- t: generated, do not edit -->\n{}\n<!-- end of t -->"


def test_replaces_its_own_section_only(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    other = "<!-- u: generated, do not edit -->\nkeep\n<!-- end of u -->"
    frame = f"# Title\n\ntext \n{{}}  \n\n{other}\nlast line without end"
    path.write_text(frame.format(MARKED.format("old\n\n| a |")))
    for text in ("new", "new", "newer\nstill"):
        replace_section(path, "t", f"\n{text}\n\n")
        assert path.read_text() == frame.format(MARKED.format(text))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"{MARKED}\n"),
        ("", f"{MARKED}\n"),
        ("# Title\n", f"# Title\n\n{MARKED}\n"),
        ("# Title\n\n\n", f"# Title\n\n{MARKED}\n"),
    ],
)
def test_adds_a_section_at_the_end(tmp_path: Path, before: str | None, after: str) -> None:
    path = tmp_path / "doc.md"
    if before is not None:
        path.write_text(before)
    replace_section(path, "t", "row")
    assert path.read_text() == after.format("row")
