"""Every kernel equals the float64 reference on random cases that combine features."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from tests.inputs import BOUNDS, Case, build, cases


def prove(strategy: SearchStrategy[Case], kernels: str) -> None:
    """Compare on every drawn case, and see that at least half combine three or more features."""
    combined = []

    @settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(strategy)
    def equal(case: Case) -> None:
        problem = build(case, kernels)
        problem.check()
        combined.append(case.count_features() >= 3)

    equal()
    assert sum(combined) >= len(combined) / 2


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_cpu(dtype: torch.dtype) -> None:
    prove(cases(dtype), "auto")


@pytest.fixture
def _three_workers() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_three_workers")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_cpu_over_several_tiles_and_shares(dtype: torch.dtype) -> None:
    prove(cases(dtype, max_len=1300), "auto")


def test_reference_row() -> None:
    prove(cases(torch.float32), "reference")
