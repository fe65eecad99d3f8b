"""The table of what is absent: shown in the docs, raised by the names, reached by the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pageant.integrations import flashinfer
from pageant.integrations.flashinfer.absent import NAMES, OPTIONS, table

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "pageant/integrations/flashinfer"


def test_the_docs_show_the_table() -> None:
    text = (ROOT / "docs/flashinfer.md").read_text()
    shown = text.split("<!-- absent: begin -->\n")[1].split("<!-- absent: end -->")[0]
    assert shown == table()


@pytest.mark.parametrize("name", NAMES)
def test_absent_names_can_be_imported_and_say_why(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(flashinfer, name)(1, x=2)


def test_names_nobody_knows_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        flashinfer.no_such_name  # noqa: B018


def test_every_option_of_the_table_is_refused_somewhere_and_nothing_else_is() -> None:
    refused = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse":
                assert isinstance(node.args[0], ast.Constant)
                refused.add(node.args[0].value)
    assert refused == set(OPTIONS)


def test_every_public_name_exists() -> None:
    for name in flashinfer.__all__:
        assert name not in NAMES
        assert getattr(flashinfer, name) is not None
