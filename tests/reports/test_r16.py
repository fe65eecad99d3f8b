"""R16: pages of 1, 128, 256 or 528 tokens were refused or wrong; models need odd sizes too.

Any page size gives the same answer for the same tokens, wherever the last key lies in its page.
"""

import pytest
import torch

from tests.inputs import Case, assert_close, build
from tests.reports.scene import assert_means, each_kernel, each_phase, scene

SIZES = (1, 3, 16, 48, 64, 128, 256, 528)


def around_page_ends(size):
    """Lengths one less than whole pages, whole pages, and one more."""
    return sorted({max(1, size * pages + more) for pages in (1, 2) for more in (-1, 0, 1)})


@each_kernel
@each_phase
@pytest.mark.parametrize("size", SIZES)
def test_around_page_ends(kernels, phase, size):
    lens = around_page_ends(size)
    step = scene(kernels, phase, [1] * len(lens), lens, cache={"page_size": size})
    assert not torch.equal(step.batch.page_table.sort().values, step.batch.page_table)
    assert_means(step.means(), [(n - 1) / 2 for n in lens])


@each_kernel
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", ["fp32", "fp8_e4m3"])
@pytest.mark.parametrize("memory", ["LBHNC", "strided"])
def test_against_the_reference(kernels, size, format, memory):
    near = min(size, 48)
    lengths = ((1, near), (1, near + 1), (3, max(1, near - 1)), (2, near + 3))
    case = Case(
        seed=size,
        format=format,
        page_size=size,
        memory=memory,
        lengths=lengths,
        window=20,
        splits=2,
    )
    build(case, kernels).check()


@each_kernel
@each_phase
def test_all_sizes_agree(kernels, phase):
    """The same 300 keys and the same query under every page size."""
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(7))
    answers = [
        scene(kernels, phase, [1, 2], [300, 129], cache={"page_size": size}).run(q)
        for size in SIZES
    ]
    for out, lse in answers[1:]:
        assert_close(out, answers[0][0], 1e-5)
        assert_close(lse, answers[0][1], 1e-5)
