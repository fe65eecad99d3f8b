"""R23: layers that read another layer's cache, and cross attention, bring no keys; that crashed.

`run` never writes: without k and v it reads what is there, again and again.
"""

import pytest
import torch

import pageant
from pageant import Layer
from tests.inputs import Case, build
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene


@each_kernel
@each_phase
@each_dtype
def test_run_changes_no_byte_of_the_cache(kernels, phase, dtype):
    step = scene(kernels, phase, [2, 1], [9, 6], dtype=dtype)
    storage = step.cache.k.untyped_storage()
    before = bytes(storage)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    first = step.run(q)
    again = step.run(q)
    assert bytes(storage) == before
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@each_kernel
@each_phase
def test_a_sharing_layer_equals_the_owner(kernels, phase):
    owner, sharing = Layer(), Layer(shares_cache=True)
    step = scene(kernels, phase, [2, 1], [9, 6])
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    want = step.run(q, owner)
    before = bytes(step.cache.k.untyped_storage())
    rows = torch.full((step.batch.num_tokens, 1, 16), 5.0)
    step.attn.write(step.plan(), step.cache, rows, rows, sharing)
    assert bytes(step.cache.k.untyped_storage()) == before
    got = step.run(q, sharing)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    step.attn.write(step.plan(), step.cache, rows, rows, owner)
    assert bytes(step.cache.k.untyped_storage()) != before


@each_kernel
@each_phase
@each_dtype
@pytest.mark.parametrize("keys", [1, 7, 40])
def test_cross_attention_sees_every_encoder_key(kernels, phase, dtype, keys):
    step = scene(kernels, phase, [3], [keys], dtype=dtype, encoder_seq_lens=True)
    for _ in range(2):
        assert_means(step.means(), [(keys - 1) / 2] * 3)


@each_kernel
@each_dtype
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("speculative", [0, 2])
def test_cross_attention_with_everything_else(kernels, dtype, format, speculative):
    case = Case(
        seed=9,
        dtype=dtype,
        v_head_dim=24,
        format=format,
        page_size=3,
        lengths=((3, 7), (1, 30), (2, 0), (9, 4)),
        cross=True,
        sinks=True,
        soft_cap=2.0,
        scales=True,
        speculative=speculative,
        padding=2,
    )
    build(case, kernels).check()


@each_kernel
def test_the_decoders_own_length_does_not_matter(kernels):
    """Second step of cross attention: the decoder has grown, the encoder's keys are the same."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=4),
        options=pageant.Options(kernels=kernels),
    )
    kv = attn.new_cache(num_layers=1, num_pages=3)
    encoder = torch.tensor([7], dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2])
    v = torch.arange(7.0)[:, None, None].expand(7, 1, 16)
    for step, (m, n) in enumerate([(3, 3), (1, 4), (1, 5), (1, 100)]):
        batch = pageant.Batch(
            query_start_loc=torch.tensor([0, m], dtype=torch.int32),
            seq_lens=torch.tensor([n], dtype=torch.int32),
            page_table=torch.tensor([[2, 0]], dtype=torch.int32),
            slot_mapping=slots if step == 0 else None,
            num_requests=1,
            num_tokens=m,
            max_query_len=m,
            max_seq_len=n,
            encoder_seq_lens=encoder,
        )
        plan = attn.plan(batch)
        if step == 0:
            attn.write(plan, kv[0], torch.ones(7, 1, 16), v)
        assert_means(attn.run(plan, torch.zeros(m, 2, 16), kv[0])[:, 0, 0], [3.0] * m)
