"""R10: 4-bit caches worked on one family of GPUs; elsewhere they were refused, or garbled.

Writing and reading share one documented layout everywhere: what lies on the e2m1 grid comes back
exactly, attention over the cache is attention over its dequantised values, and the swizzled order
of value scales is a variant that reads the same.
"""

import math

import pytest
import torch

import pageant
from pageant import Layer
from pageant.cache.layout import LAYOUTS
from pageant.cache.quantize import dequantize
from pageant.kernels import reference
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, poison, scene

FORMATS = ("nvfp4", "nvfp4_4over6")
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
each_format = pytest.mark.parametrize("format", FORMATS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
TABLE = [[4, 0, 5, 1, 3, 2]]


def attention(kernels, dtype=torch.float32, dims=(24, 40), heads=(4, 2), **spec):
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            v_head_dim=dims[1],
            dtype=dtype,
        ),
        pageant.CacheSpec(page_size=4, **spec),
        pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=256),
        pageant.Features(
            windows=(None, 5),
            soft_cap=True,
            sinks=True,
            alibi=True,
            lse=True,
            draft_masks=True,
            non_causal=True,
        ),
        pageant.Options(kernels=kernels, speculative_tokens=4),
    )


def filled(attn, layer=None, length=21):
    """A cache of `length` random tokens, all other slots poisoned."""
    cache = attn.new_cache(num_layers=2, num_pages=6)[1]
    poison(cache)
    rng = torch.Generator().manual_seed(length)
    shape, heads = attn.shape, attn.shape.num_kv_heads
    k = torch.randn(length, heads, shape.head_dim, generator=rng).to(shape.dtype)
    v = torch.randn(length, heads, shape.value_dim, generator=rng).to(shape.dtype)
    batch = pageant.Batch.from_lengths([length], [length], TABLE, 4)
    attn.write(attn.plan(batch), cache, k, v, layer)
    return cache


def dequantised(cache, layer=None, length=21):
    """float32 keys and values of the tokens as stored, linear value scales."""
    at = torch.arange(length)
    slots = torch.tensor(TABLE[0])[at // 4], at % 4
    layer = layer or Layer()
    return [
        dequantize(side.elements[slots], side.scales[slots], cache.format.name, scale)
        for side, scale in zip(cache.sides, (layer.k_scale, layer.v_scale), strict=True)
    ]


@each_kernel
@each_phase
@each_format
@pytest.mark.parametrize("step", [2.0**-6, 1.0, 28.0])
def test_the_grid_comes_back_exactly(kernels, phase, format, step):
    """All e2m1 values times s, both signs; a lone key hands its value out unchanged."""
    attn = attention(kernels, dims=(16, 16), heads=(2, 1), format=format)
    cache = attn.new_cache(num_layers=1, num_pages=6)[0]
    m = 1 if phase == "decode" else 6
    plan = attn.plan(pageant.Batch.from_lengths([m], [m], TABLE, 4))
    v = torch.tensor([*GRID, *(-x for x in GRID)]).mul(step).expand(m, 1, 16).contiguous()
    attn.write(plan, cache, v, v)
    got = dequantised(cache, length=m)
    assert torch.equal(got[0], v)
    assert torch.equal(got[1], v)
    out = attn.run(plan, torch.zeros(m, 2, 16), cache)
    for head in range(2):
        torch.testing.assert_close(out[:, head], v[:, 0], rtol=1e-6, atol=0)


@each_kernel
@each_phase
@each_dtype
@each_format
@pytest.mark.parametrize("scaled", [False, True])
def test_attention_is_attention_over_the_dequantised_cache(kernels, phase, dtype, format, scaled):
    layers = [Layer(), Layer(window=5, soft_cap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
    if scaled:
        slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
        layers = [Layer(k_scale=0.01, v_scale=torch.tensor([3.0]), alibi_slopes=slopes)]
    attn = attention(kernels, dtype, format=format)
    cache = filled(attn, layers[0])
    k, v = dequantised(cache, layers[0])
    assert k.abs().max() > 1
    m = 1 if phase == "decode" else 9
    q = torch.randn(m, 4, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    plan = attn.plan(pageant.Batch.from_lengths([m], [21], TABLE, 4))
    for layer in layers:
        out, lse = attn.run(plan, q, cache, layer, return_lse=True)
        want, want_lse = pageant.ops.paged_attention(
            q.float(),
            k[None],
            v[None],
            torch.tensor([0, m], dtype=torch.int32),
            torch.tensor([21], dtype=torch.int32),
            torch.tensor([[0]], dtype=torch.int32),
            layer=layer,  # its cache scales do not apply to a float32 cache
            kernels="reference",
            return_lse=True,
        )
        assert_close(out, want, BOUNDS[dtype])
        assert_close(lse, want_lse, BOUNDS[dtype])


@each_kernel
@each_format
def test_several_drafts_at_once(kernels, format):
    """A tree of four drafts after 17 keys: rows see the prefix, their ancestors and themselves."""
    attn = attention(kernels, dims=(32, 32), format=format)
    cache = filled(attn)
    k, v = dequantised(cache)
    parents = torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
    batch = pageant.Batch.from_lengths([4], [21], TABLE, 4, draft_parents=parents)
    q = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(2))
    out, lse = attn.run(attn.plan(batch), q, cache, return_lse=True)
    seen = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    for row in range(4):
        keys = torch.cat([torch.ones(17, dtype=torch.bool), seen[row]])
        heads = range(4)
        scores = torch.stack([k[keys, head // 2] @ q[row, head] for head in heads]) * 32**-0.5
        want = torch.stack([scores[head].softmax(0) @ v[keys, head // 2] for head in heads])
        torch.testing.assert_close(out[row], want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[row], scores.logsumexp(1), rtol=1e-5, atol=1e-5)


@each_kernel
@each_phase
@each_format
@each_layout
def test_every_layout_answers_the_same(kernels, phase, format, layout):
    answers = []
    m = 1 if phase == "decode" else 9
    q = torch.randn(m, 4, 24, generator=torch.Generator().manual_seed(3))
    for order in ("LBHNC", layout):
        attn = attention(kernels, format=format, layout=order)
        cache = filled(attn)
        plan = attn.plan(pageant.Batch.from_lengths([m], [21], TABLE, 4))
        answers.append(attn.run(plan, q, cache, return_lse=True))
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


@each_kernel
@each_phase
@each_format
@each_layout
def test_swizzled_value_scales_read_the_same(kernels, phase, format, layout):
    answers, caches = [], []
    m = 1 if phase == "decode" else 9
    q = torch.randn(m, 4, 64, generator=torch.Generator().manual_seed(3))
    for order in ("linear", "swizzled"):
        attn = attention(kernels, dims=(64, 128), format=format, layout=layout, v_scale_order=order)
        caches.append(filled(attn, length=20))
        plan = attn.plan(pageant.Batch.from_lengths([m], [20], TABLE, 4))
        answers.append(attn.run(plan, q, caches[-1], return_lse=True))
    linear, swizzled = (cache.v_scales.view(torch.uint8) for cache in caches)
    assert not torch.equal(linear, swizzled)
    plane = linear[4, :, 1].reshape(1, 4, 4, 2).permute(0, 2, 3, 1).reshape(4, 8)
    assert torch.equal(swizzled[4, :, 1], plane)
    assert_close(answers[1][0], answers[0][0], 1e-6)
    assert_close(answers[1][1], answers[0][1], 1e-6)


def sixes(count):
    """What a whole block of equal elements keeps exactly: scale 1, element 6."""
    return torch.full((count,), 6.0)


@each_kernel
@each_phase
@each_dtype
@each_format
@pytest.mark.parametrize("causal", [True, False])
def test_equal_values_average_to_exactly_themselves(kernels, phase, dtype, format, causal):
    config = {"cache": {"format": format, "page_size": 16}, "dtype": dtype, "values": sixes}
    if not causal:
        config |= {"features": {"non_causal": True}, "causal": False}
    out, lse = scene(kernels, phase, [4], [21], dims=(40, 24), **config).run()
    torch.testing.assert_close(out, torch.full_like(out, 6.0), rtol=1e-6, atol=0)
    keys = [21] * 4 if not causal else [18, 19, 20, 21]
    want = torch.tensor([math.log(count) for count in keys])[:, None].expand(4, 2)
    assert_close(lse, want, BOUNDS[dtype])


@each_kernel
@each_phase
@each_format
@pytest.mark.parametrize("size", [1, 3, 16, 48])
def test_means_over_any_page_size(kernels, phase, format, size):
    """Values 0, 6, 12, 18 and 0 again: 6 times a scale, so exact."""
    step = scene(
        kernels,
        phase,
        [2, 1],
        [8, 60],
        dims=(16, 40),
        heads=(3, 3),
        cache={"format": format, "page_size": size},
        values=lambda n: torch.arange(n) % 4 * 6,
    )
    assert_means(step.means(), [6 * 9 / 7, 9.0, 9.0])


@each_format
def test_bytes_of_a_token(format):
    """Half a byte an element and one for each 16; the last block may be shorter."""
    attn = attention("auto", format=format, dims=(128, 40))
    kv = attn.new_cache(num_layers=1, num_pages=5)
    assert kv.num_bytes == 5 * 4 * 2 * (64 + 8 + 20 + 3)


@each_kernel
@each_phase
@each_format
def test_poisoned_slots_and_padding_never_reach_the_output(kernels, phase, format):
    """Slots past the 21st hold NaN, then zeros: both answers are the same finite bits."""
    attn = attention(kernels, format=format)
    cache = filled(attn)
    assert cache.v_scales[2, 1:].float().isnan().all()
    m = 1 if phase == "decode" else 9
    q = torch.randn(m, 4, 24, generator=torch.Generator().manual_seed(1))
    plan = attn.plan(pageant.Batch.from_lengths([m], [21], TABLE, 4))
    want, _ = attn.run(plan, q, cache, return_lse=True)
    assert want.isfinite().all()
    for side in cache.sides:
        side.scales[2, 1:] = torch.zeros(()).to(side.scales.dtype)
    got, _ = attn.run(plan, q, cache, return_lse=True)
    assert torch.equal(got, want)


def test_the_plain_writer_and_ours_agree():
    """Whole pages, byte for byte."""
    attn = attention("auto", format="nvfp4")
    cache, other = filled(attn), attn.new_cache(num_layers=2, num_pages=6)[1]
    poison(other)
    rng = torch.Generator().manual_seed(21)
    k, v = (torch.randn(21, 2, dim, generator=rng) for dim in (24, 40))
    at = torch.arange(21)
    reference.write_pages(k, v, other, torch.tensor(TABLE[0])[at // 4] * 4 + at % 4)
    for one, two in zip(cache.sides, other.sides, strict=True):
        assert torch.equal(one.elements, two.elements)
        assert torch.equal(one.scales.view(torch.uint8), two.scales.view(torch.uint8))
