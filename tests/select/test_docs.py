"""Generated documents are current."""

import re

from pageant.select.docs import BEGIN, CAPTIONS, END, PAGE, README, page, readme, table
from pageant.select.rows import NAMES, OWNERS, ROWS

AGAIN = "python -m pageant.select.docs"


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), AGAIN


def test_table_of_the_readme_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert readme(text) == text, AGAIN


def test_readme_is_left_alone_around_the_table() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert readme(text) == f"before\n{BEGIN}\n\n{table()}\n\n{END}\nafter\n"
    assert readme(readme(text)) == readme(text)


def test_every_kernel_has_a_place() -> None:
    assert all(f"### `{name}`: " in page() for name in NAMES)
    own = {row.name for row in ROWS if row.owner in OWNERS["auto"]}
    assert set(re.findall(r"^\| `([\w.]+)`", table(), re.MULTILINE)) == own


def test_page_shows_what_explain_prints() -> None:
    """For four devices; the kernels are named in tests of FlashInfer's choices."""
    shown = re.findall(r"\$ pageant explain --sm (\d+) .*\ndevice  sm(\d+) ", page())
    assert shown == [(sm, sm) for sm in CAPTIONS]


def test_numbers_of_this_machine_are_not_in_it() -> None:
    assert "x86_64" not in page()
