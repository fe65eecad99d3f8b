"""Where the kernels run: on a GPU if there is one, else interpreted on the CPU."""

import numpy as np
import pytest
import torch


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def quiet_interpreter():
    """Numpy, which interprets, warns of what is meant: overflow to infinity, 0 / 0."""
    with np.errstate(all="ignore"):
        yield
