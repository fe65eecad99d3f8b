"""R14: only some numbers of query heads a key/value head worked; one engine found 6 plainly wrong.

Any multiple works, and each query head reads its own group's keys.
"""

import pytest
import torch

import pageant
from tests.inputs import Case, build
from tests.reports.scene import each_kernel

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 64)


@each_kernel
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("kv_heads", "dtype"), [(1, torch.float32), (3, torch.float16)])
def test_every_group(kernels, group, kv_heads, dtype):
    for lengths, speculative in (((1, 21), (3, 9)), 0), (((1, 21), (3, 9)), 2):
        case = Case(
            seed=group,
            dtype=dtype,
            kv_heads=kv_heads,
            group=group,
            head_dim=24,
            v_head_dim=16,
            format="fp16",
            page_size=5,
            memory="BHLNC",
            lengths=lengths,
            alibi=True,
            sinks=True,
            speculative=speculative,
            padding=1,
        )
        build(case, kernels).check()


@each_kernel
def test_a_group_of_six_reads_its_own_head(kernels):
    """Values of key/value head h are the number h: query heads 0 to 5 get 0, 6 to 11 get 1."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=12, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        options=pageant.Options(kernels=kernels),
    )
    kv = attn.new_cache(num_layers=1, num_pages=1)
    v = torch.arange(2.0)[None, :, None].expand(3, 2, 16)
    for query_lens in ([3], [1]):
        plan = attn.plan(pageant.Batch.from_lengths(query_lens, [3], [[0]], page_size=16))
        if query_lens == [3]:
            attn.write(plan, kv[0], torch.ones(3, 2, 16), v)
        out = attn.run(plan, torch.ones(query_lens[0], 12, 16), kv[0])
        assert torch.equal(out[-1, :, 0], torch.tensor([0.0] * 6 + [1.0] * 6))


@pytest.mark.parametrize("heads", [(5, 2), (7, 8), (0, 2), (-4, 2), (4, 0), (4.0, 2)])
def test_other_counts_are_refused(heads):
    with pytest.raises(pageant.ArgumentError) as caught:
        pageant.Attention(pageant.Shape(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=64))
    assert caught.value.argument == "q_heads"
