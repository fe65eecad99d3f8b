"""The seeded faults can be seeded: each changes just one place."""

import pytest

from tools.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_one_place_each(mutant):
    assert (ROOT / "pageant" / mutant.file).read_text().count(mutant.right) == 1
    assert mutant.wrong != mutant.right
