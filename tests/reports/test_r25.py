"""R25: ranks took a sequence's global length for that of their own pages, and each added the sink.

Two ranks hold a sequence of five tokens in turns, as one process simulates them.
"""

from __future__ import annotations

import pytest
import torch

import pageant
from pageant import ContextParallel
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import each_kernel

TOKENS, PAGE = 5, 2


def rank(number: int, kernels: str, dtype: torch.dtype, new: int) -> tuple:
    """What one rank plans and answers: key j is 0 and value j the number j."""
    ranks = ContextParallel(rank=number, world=2)
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=dtype),
        pageant.CacheSpec(page_size=PAGE),
        features=pageant.Features(sinks=True, lse=True),
        options=pageant.Options(context_parallel=ranks, kernels=kernels),
    )
    held = [token for token in range(TOKENS) if token % 2 == number]
    lens = torch.tensor([TOKENS], dtype=torch.int32)
    batch = pageant.Batch(
        query_start_loc=torch.tensor([0, new], dtype=torch.int32),
        seq_lens=lens,
        page_table=torch.tensor([[3, 1, 10**6]], dtype=torch.int32),
        num_requests=1,
        num_tokens=new,
        max_query_len=new,
        max_seq_len=TOKENS,
    )
    cache = attn.new_cache(num_layers=1, num_pages=4)[0]
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    for local, token in enumerate(held):
        slot = (3, 1)[local // PAGE], local % PAGE
        cache.k[slot], cache.v[slot] = 0, token
    plan = attn.plan(batch)
    layer = pageant.Layer(sinks=torch.tensor([0.0, 1.0]))
    out, lse = attn.run(plan, torch.ones(new, 2, 16, dtype=dtype), cache, layer, return_lse=True)
    assert lens.tolist() == [TOKENS]
    work = plan.buffers.work["decode" if new == 1 else "prefill", None]
    return out, lse, int(work.items[: work.counts[0], 4].max())


@each_kernel
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("new", [1, 2, 5])
def test_two_ranks(kernels: str, dtype: torch.dtype, new: int) -> None:
    parts = [rank(number, kernels, dtype, new) for number in range(2)]
    assert [keys for _, _, keys in parts] == [3, 2]
    sinks = torch.tensor([0.0, 1.0])
    out, lse = pageant.ops.merge_states([p[0] for p in parts], [p[1] for p in parts], sinks)
    seen = torch.arange(TOKENS - new + 1, TOKENS + 1, dtype=torch.float64)[:, None]
    total = seen * (seen - 1) / 2  # 0 + 1 + … of the keys each row sees
    want = total / (seen + sinks.double().exp())
    assert_close(out, want[..., None].expand(-1, -1, 16), BOUNDS[dtype])
    assert_close(lse, seen.log().expand(-1, 2), 1e-5)


def test_a_rank_without_keys() -> None:
    """(0, -inf) and nothing else."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        options=pageant.Options(context_parallel=ContextParallel(rank=3, world=4)),
    )
    cache = attn.new_cache(num_layers=1, num_pages=1)[0]
    cache.v.fill_(torch.nan)
    plan = attn.plan(pageant.Batch.from_lengths([1], [2], [[0]], page_size=16))
    out, lse = attn.run(plan, torch.ones(1, 1, 16), cache, return_lse=True)
    assert out.abs().sum() == 0
    assert lse.tolist() == [[-torch.inf]]
