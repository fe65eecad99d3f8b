"""R24: shared-prefix attention hung, wanted one prefix for all, or read another request's pages.

Groups come from the page tables themselves, several in a batch; the answer is that of the plain
path; a hint that contradicts the tables is refused, and one that says nothing costs nothing.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Batch
from tests.inputs import assert_close

PAGE = 2048
TABLE = [[7, 8, 1], [7, 8, 2], [5, 3]]
LENS = [2 * PAGE + 100, 3 * PAGE, 2 * PAGE]


def attention(**options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=8, max_tokens=8, max_seq_len=4 * PAGE),
        pageant.Features(lse=True),
        pageant.Options(**options),
    )


def filled(attn):
    cache = attn.new_cache(num_layers=1, num_pages=9)[0]
    rng = torch.Generator().manual_seed(24)
    for view in (cache.k, cache.v):
        view.copy_(torch.randn(view.shape, generator=rng))
    return cache


def batch(lens=LENS, table=TABLE, **fields):
    fields = {"slot_mapping": None, **fields}
    return Batch.from_lengths([1] * len(lens), lens, table, PAGE, **fields)


def members(plan):
    return [(group.requests, group.pages) for group in plan.shared[None]]


def hint(*lens):
    return torch.tensor(lens, dtype=torch.int32)


def test_groups_found_from_the_tables():
    assert members(attention().plan(batch())) == [((0, 1), (7, 8))]


def test_as_on_the_plain_path():
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
    answers = []
    for options in ({}, {"cascade": False}, {"kernels": "reference"}):
        attn = attention(**options)
        plan = attn.plan(batch())
        assert members(plan) == ([] if options else [((0, 1), (7, 8))])
        answers.append(attn.run(plan, q, filled(attn), return_lse=True))
    for out, lse in answers[1:]:
        assert_close(answers[0][0], out, 1e-5)
        assert_close(answers[0][1], lse, 1e-5)


def test_several_groups_and_a_group_within_a_group():
    table = [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 7], [4, 5, 8], [0, 1, 3, 8]]
    lens = [3 * PAGE + 1, 2 * PAGE + 5, 3 * PAGE + 9, 3 * PAGE, 4 * PAGE]
    attn, plain = attention(), attention(cascade=False)
    plan = attn.plan(batch(lens, table))
    assert members(plan) == [((0, 2, 4), (0, 1)), ((1, 3), (4, 5)), ((0, 2), (2,))]
    q = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(1))
    cache = filled(attn)
    assert_close(
        attn.run(plan, q, cache), plain.run(plain.plan(batch(lens, table)), q, cache), 1e-5
    )


@pytest.mark.parametrize("options", [{}, {"cascade": False}, {"kernels": "reference"}])
@pytest.mark.parametrize(
    ("lens", "request_"),
    [
        ((3 * PAGE, 2 * PAGE, 0), 0),
        ((2 * PAGE, 2 * PAGE, 2 * PAGE), 2),
        ((0, 0, PAGE), 2),
        ((-1, 0, 0), 0),
    ],
)
def test_a_wrong_hint_is_detected(options, lens, request_):
    with pytest.raises(pageant.ArgumentError) as caught:
        attention(**options).plan(batch(shared_prefix_lens=hint(*lens)))
    assert caught.value.argument == f"batch.shared_prefix_lens[{request_}]"


@pytest.mark.parametrize("lens", [(0, 0, 0), (PAGE, 2 * PAGE, 0), (2 * PAGE, 2 * PAGE, 0)])
def test_a_hint_changes_nothing(lens):
    plan = attention().plan(batch(shared_prefix_lens=hint(*lens)))
    assert members(plan) == [((0, 1), (7, 8))]


def test_a_hint_that_was_right_is_checked_again():
    attn = attention()
    hinted = batch(shared_prefix_lens=hint(2 * PAGE, 2 * PAGE, 0))
    plan = attn.plan(hinted)
    hinted.page_table[1, 0] = 6
    for again in (plan.check, lambda: attn.update(plan)):
        with pytest.raises(pageant.ArgumentError, match=r"shared_prefix_lens\[0\] is 4096"):
            again()
    attn.update(attn.plan(replace(hinted, shared_prefix_lens=None)))
