"""R21: draft trees were refused with pages or windows, or silently taken for a causal chain.

A token of a tree sees the cached keys, its ancestors and itself: with ragged drafts, any page size,
window, slopes and cache format, between plain decodes and prefills, and after changes in place.
"""

import pytest
import torch

from pageant.cache.formats import FORMATS
from tests.inputs import Case, build
from tests.reports.scene import assert_means, each_kernel, each_phase, scene

TREE = torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
MEANS = [1.0, 1.5, 1.75, 2.2]
DRAFTS = {"draft_masks": True}
each_page_size = pytest.mark.parametrize("page_size", [1, 3, 16])


@each_kernel
@each_phase
@each_page_size
def test_the_example(kernels, phase, page_size):
    config = {"cache": {"page_size": page_size}, "features": DRAFTS}
    assert_means(scene(kernels, phase, [4], [6], draft_parents=TREE, **config).means(), MEANS)
    chain = scene(kernels, phase, [4], [6], **config)
    assert_means(chain.means(), [1.0, 1.5, 2.0, 2.5])


@each_kernel
@each_page_size
def test_an_all_ones_mask_is_not_causal(kernels, page_size):
    config = {"cache": {"page_size": page_size}, "features": DRAFTS}
    ones = torch.ones(4, 4, dtype=torch.bool)
    assert_means(scene(kernels, "decode", [4], [6], draft_mask=ones, **config).means(), [2.5] * 4)


@each_kernel
def test_a_mask_changed_in_place(kernels):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    step = scene(kernels, "decode", [4], [6], features=DRAFTS, draft_mask=mask)
    plan = step.attn.plan(step.batch)
    for row, ancestors in enumerate(((0,), (0, 1), (0, 2), (0, 1, 3))):
        mask[row] = False
        mask[row, list(ancestors)] = True
    step.attn.update(plan)
    out = step.attn.run(plan, torch.zeros(4, 2, 16), step.cache)
    assert_means(out[:, 0, 0], MEANS)


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("drafts", ["mask", "parents"])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_trees_between_decodes_and_prefills(kernels, format, page_size, drafts, window):
    case = Case(
        seed=21,
        head_dim=32,
        v_head_dim=32,
        format=format,
        page_size=page_size,
        lengths=((1, 18), (4, 21), (2, 2), (0, 0), (3, 40), (9, 30), (1, 5)),
        window=window,
        drafts=drafts,
        alibi=True,
        speculative=3,
    )
    problem = build(case, kernels)
    assert problem.attn.plan(problem.batch).split.num_prefills == 2
    problem.check()
