"""On a GPU, every kernel equals the float64 reference on random cases that combine features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.inputs import BOUNDS, Case, assert_close, build, cases

EXAMPLES = 1000


@pytest.mark.gpu
@pytest.mark.parametrize("max_len", [96, 1300])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_gpu(dtype: torch.dtype, max_len: int) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(cases(dtype, max_len=max_len))
    def equal(case: Case) -> None:
        problem = build(case)
        out, lse = problem.on("cuda").run()
        assert_close(out, problem.expected_out, BOUNDS[case.dtype])
        assert_close(lse, problem.expected_lse, BOUNDS[case.dtype])

    equal()
