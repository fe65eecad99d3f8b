"""Code compiled for one batch serves others of any size, whichever came first."""

from __future__ import annotations

import pytest
import torch

import pageant

SIZES = ([(1, 1)], [(1, 70), (3, 33), (1, 16), (40, 90)], [(16, 16)], [(1, 4), (1, 1)])


def batch(sizes: list[tuple[int, int]], drafts: bool) -> pageant.Batch:
    pages, first = [], 0
    for _, n in sizes:
        pages.append(list(range(first, first + -(-n // 4))))
        first += len(pages[-1])
    query_lens, key_lens = ([pair[i] for pair in sizes] for i in (0, 1))
    others = {}
    if drafts:
        others["draft_mask"] = torch.ones(sum(query_lens), max(query_lens), dtype=torch.bool).tril()
    host = pageant.Batch.from_lengths(query_lens, key_lens, pages, page_size=4, **others)
    fields = {
        name: value.cuda()
        if isinstance(value, torch.Tensor) and not name.endswith("_cpu")
        else value
        for name, value in vars(host).items()
    }
    return pageant.Batch(**fields)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("first", range(len(SIZES)))
def test_every_order_of_sizes(first: int, drafts: bool) -> None:
    torch.manual_seed(first)
    shape = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    given = (
        shape,
        pageant.CacheSpec(page_size=4),
        pageant.Limits(max_requests=4, max_tokens=64, max_seq_len=128),
        pageant.Features(draft_masks=True),
    )
    ours = pageant.Attention(*given, device="cuda")
    reference = pageant.Attention(*given, pageant.Options(kernels="reference"), "cuda")
    kv = ours.new_cache(num_layers=1, num_pages=64)
    for view in (kv[0].k, kv[0].v):
        view.copy_(torch.randn(view.shape, device="cuda"))
    for sizes in (SIZES[first], *SIZES):
        one = batch(sizes, drafts)
        q = torch.randn(one.num_tokens, 4, 64, device="cuda", dtype=torch.float16)
        k = torch.randn(one.num_tokens, 2, 64, device="cuda", dtype=torch.float16)
        plan = ours.plan(one)
        ours.write(plan, kv[0], k, k)
        got = ours.run(plan, q, kv[0]).float()
        want = reference.run(reference.plan(one), q, kv[0]).float()
        assert (got - want).norm() <= 1e-3 * want.norm()
