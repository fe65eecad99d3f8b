"""The default model, loaded once for all tests of the engine."""

import pytest
import torch

from pageant.engine.model import LoadedModel, load


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load("smollm2", torch.float32)
