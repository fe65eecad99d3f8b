"""R9: paged kernels took one scale for a whole tensor; finer ones meant dequantising first.

int8 and fp8_e4m3_token_head keep a float32 scale for every token and head with the page, or beside
it, and attention honours each.
"""

import math

import pytest
import torch

import pageant
from pageant.cache.quantize import dequantize
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import assert_means, each_dtype, each_kernel, each_phase, scene

FORMATS = ("int8", "fp8_e4m3_token_head")
each_format = pytest.mark.parametrize("format", FORMATS)
each_home = pytest.mark.parametrize("home", ["own", "beside", "inline"])


def attention(kernels, format, heads=(1, 1), dim=16, dtype=torch.float32, page_size=4, **others):
    return pageant.Attention(
        pageant.Shape(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, dtype=dtype),
        pageant.CacheSpec(format=format, page_size=page_size, **others),
        pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=256),
        pageant.Features(windows=(None, 3), soft_cap=True, sinks=True, lse=True),
        pageant.Options(kernels=kernels),
    )


def pages(attn, home, heads, dim, num_pages):
    """A cache whose scales lie in our own pages, in tensors of their own, or in one of bytes."""
    if home == "own":
        return attn.new_cache(num_layers=1, num_pages=num_pages)[0]
    size = attn.cache.page_size
    if home == "inline":
        row = 2 * (dim + 4)
        return attn.wrap_cache(torch.zeros(num_pages, heads, size, row, dtype=torch.uint8))
    rows = (num_pages, size, heads)
    k, v = (torch.zeros(*rows, dim).to(attn.format.element_dtype) for _ in range(2))
    return attn.wrap_cache(k, v, torch.zeros(rows), torch.zeros(rows))


@each_kernel
@each_phase
@each_format
@each_home
def test_the_example(kernels, phase, format, home):
    """Codes of 1 under scales 1 and 2 for keys, 1 and 3 for values: logits are 1 and 2."""
    attn = attention(kernels, format)
    cache = pages(attn, home, 1, 16, 2)
    one = torch.tensor(1.0).to(attn.format.element_dtype)
    cache.k[1, :2, 0, 0], cache.v[1, :2] = one, one
    cache.k_scales[1, :2, 0] = torch.tensor([1.0, 2.0])
    cache.v_scales[1, :2, 0] = torch.tensor([1.0, 3.0])
    m = 1 if phase == "decode" else 2
    q = torch.zeros(m, 1, 16)
    q[:, 0, 0] = 1.0
    plan = attn.plan(pageant.Batch.from_lengths([m], [2], [[1]], 4))
    out, lse = attn.run(plan, q, cache, pageant.Layer(scale=1.0), return_lse=True)
    want = (math.e + 3 * math.e**2) / (math.e + math.e**2)
    assert want == pytest.approx(2.462117, abs=1e-6)
    assert out[-1].flatten().tolist() == pytest.approx([want] * 16, abs=1e-5)
    assert lse[-1, 0].item() == pytest.approx(math.log(math.e + math.e**2), abs=1e-5)


@each_kernel
@each_phase
@each_dtype
@each_format
@each_home
def test_attention_over_what_was_written(kernels, phase, dtype, format, home):
    """Rows of very different sizes: one scale for all of them would leave nothing of the small."""
    attn = attention(kernels, format, (4, 2), 24, dtype)
    cache = pages(attn, home, 2, 24, 6)
    rng = torch.Generator().manual_seed(4)
    sizes = torch.exp2(torch.arange(21.0) % 7)[:, None, None]
    k = (torch.randn(21, 2, 24, generator=rng) / sizes).to(dtype)
    v = (torch.randn(21, 2, 24, generator=rng) * sizes).to(dtype)
    table = [[4, 0, 5, 1, 3, 2]]
    attn.write(attn.plan(pageant.Batch.from_lengths([21], [21], table, 4)), cache, k, v)
    slots = torch.tensor(table[0])[torch.arange(21) // 4], torch.arange(21) % 4
    stored = [dequantize(side.elements[slots], side.scales[slots], format) for side in cache.sides]
    for x, back in zip((k, v), stored, strict=True):
        step = x.float().abs().amax(-1, keepdim=True) / (127 if format == "int8" else 14)
        assert ((back - x.float()).abs() <= 0.51 * step).all()
    m = 1 if phase == "decode" else 9
    q = torch.randn(m, 4, 24, generator=rng).to(dtype)
    plan = attn.plan(pageant.Batch.from_lengths([m], [21], table, 4))
    for layer in (pageant.Layer(), pageant.Layer(window=3, soft_cap=2.0, sinks=torch.ones(4))):
        out, lse = attn.run(plan, q, cache, layer, return_lse=True)
        want, want_lse = pageant.ops.paged_attention(
            q.float(),
            stored[0][None],
            stored[1][None],
            torch.tensor([0, m], dtype=torch.int32),
            torch.tensor([21], dtype=torch.int32),
            torch.tensor([[0]], dtype=torch.int32),
            layer=layer,
            kernels="reference",
            return_lse=True,
        )
        assert_close(out, want, BOUNDS[dtype])
        assert_close(lse, want_lse, BOUNDS[dtype])


@each_kernel
@each_phase
@each_dtype
@each_format
@pytest.mark.parametrize("size", [1, 3, 16])
def test_means_of_small_numbers_are_exact(kernels, phase, dtype, format, size):
    """Values j in all elements of row j: each row's own scale makes every one of them exact."""
    step = scene(
        kernels,
        phase,
        [2, 1],
        [9, 20],
        heads=(4, 2),
        dims=(24, 16),
        dtype=dtype,
        cache={"format": format, "page_size": size},
    )
    assert_means(step.means(), [3.5, 4.0, 9.5])


@each_kernel
@each_phase
@each_format
def test_the_layers_scales_do_not_matter(kernels, phase, format):
    step = scene(kernels, phase, [1], [7], cache={"format": format})
    q = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(5))
    want = step.run(q)
    got = step.run(q, pageant.Layer(k_scale=5.0, v_scale=torch.tensor([0.25])))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@each_kernel
@each_phase
@each_format
def test_one_scale_moves_one_token_of_one_head(kernels, phase, format):
    """Three tokens of mean 1; the last token's value of head 1 counts four times as much."""
    step = scene(kernels, phase, [1], [3], heads=(2, 2), cache={"format": format})
    cache, page = step.cache, int(step.batch.page_table[-1, 0])
    assert cache.v_scales[page, :3].isfinite().all()
    cache.v_scales[page, 2, 1] *= 4.0
    out, _ = step.run()
    torch.testing.assert_close(out[0, 0], torch.full((16,), 1.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(out[0, 1], torch.full((16,), 3.0), rtol=1e-5, atol=0)


@each_format
def test_a_token_takes_four_bytes_more_a_head_and_side(format):
    attn = attention("auto", format, (4, 2), 64)
    kv = attn.new_cache(num_layers=3, num_pages=5)
    assert kv.num_bytes == 3 * 5 * 4 * 2 * 2 * (64 + 4)
