"""Lengths on the device hold; the host's copies and bounds may say something else."""

from dataclasses import replace

import pytest
import torch

from tests.inputs import Case, build
from tests.reports.scene import each_kernel


@each_kernel
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("speculative", [0, 4])
@pytest.mark.parametrize("drafts", [None, "mask", "parents"])
def test_host_copies_that_differ(kernels, adaptive, speculative, drafts):
    """The host shares ten tokens out evenly, the device otherwise."""
    case = Case(
        seed=4,
        format="fp8_e4m3",
        lengths=((4, 20), (1, 9), (3, 13), (0, 30), (2, 33)),
        window=15,
        drafts=drafts,
        speculative=speculative,
    )
    problem = build(case, kernels)
    attn = problem.attn
    options = replace(attn.options, adaptive=adaptive)
    attn = type(attn)(attn.shape, attn.cache, attn.limits, attn.features, options)
    assert attn.explain().lens_mismatch
    told = replace(
        problem.batch,
        query_start_loc_cpu=torch.arange(0, 12, 2, dtype=torch.int32),
        seq_lens_cpu=torch.full((5,), 33, dtype=torch.int32),
        max_seq_len=100,
    )
    replace(problem, attn=attn, batch=told).check()
