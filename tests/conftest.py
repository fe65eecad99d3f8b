"""How the tests run: hypothesis without deadlines, GPU tests only where there is a GPU.

Without one, Triton kernels are interpreted. Triton asks for that when it is first imported.
"""

import os

import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The first example compiles kernels, so a deadline would lie. A failure prints what repeats it.
settings.register_profile("ci", deadline=None, max_examples=200, print_blob=True)
# The same examples every time, so that a seeded fault once caught stays caught; none is shrunk.
settings.register_profile(
    "mutants",
    deadline=None,
    max_examples=400,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needs_gpu:
        return
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in needs_gpu:
            item.add_marker(skip)
