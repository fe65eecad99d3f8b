"""R15: views, interleaved caches and axes of size one have strides kernels misread, giving garbage.

Answers and written bytes are the same, bit for bit, however the same pages lie in memory.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from tests.reports.scene import each_kernel

P, N, D = 7, 4, 16
LENGTHS = ([1, 1, 5], [7, 9, 6])
TABLE = [[6, 1], [5, 2, 0], [4, 3]]


def separate(heads, dtype):
    return torch.zeros(P, N, heads, D, dtype=dtype), torch.zeros(P, N, heads, D, dtype=dtype)


def in_a_pair(heads, dtype):
    """Views of [P, 2, N, H, D]."""
    whole = torch.zeros(P, 2, N, heads, D, dtype=dtype)
    return whole[:, 0], whole[:, 1]


def pair_first(heads, dtype):
    whole = torch.zeros(2, P, N, heads, D, dtype=dtype)
    return whole[0], whole[1]


def side_by_side(heads, dtype):
    """Views of [P, N, H, 2 D]."""
    whole = torch.zeros(P, N, heads, 2 * D, dtype=dtype)
    return whole[..., :D], whole[..., D:]


def head_major(heads, dtype):
    k, v = torch.zeros(P, heads, N, D, dtype=dtype), torch.zeros(P, heads, N, D, dtype=dtype)
    return k.transpose(1, 2), v.transpose(1, 2)


def head_major_pair(heads, dtype):
    whole = torch.zeros(P, 2, heads, N, D, dtype=dtype)
    return whole[:, 0].transpose(1, 2), whole[:, 1].transpose(1, 2)


def heads_outermost(heads, dtype):
    whole = torch.zeros(heads, P, N, 2 * D, dtype=dtype).permute(1, 2, 0, 3)
    return whole[..., :D], whole[..., D:]


def with_gaps(heads, dtype):
    whole = torch.zeros(2 * P, N + 3, heads + 2, 2 * D + 8, dtype=dtype)
    part = whole[1::2, 1 : N + 1, 1 : heads + 1]
    return part[..., 8 : D + 8], part[..., D + 8 :]


def odd_head_stride(stride):
    """One head: the stride of its axis may say anything."""

    def views(heads, dtype):
        assert heads == 1
        k, v = torch.zeros(P, N, D, dtype=dtype), torch.zeros(P, N, D, dtype=dtype)
        return tuple(x.as_strided((P, N, 1, D), (N * D, D, stride, 1)) for x in (k, v))

    return views


MEMORIES = (
    in_a_pair,
    pair_first,
    side_by_side,
    head_major,
    head_major_pair,
    heads_outermost,
    with_gaps,
)
ONE_HEAD = {stride: odd_head_stride(stride) for stride in (1, D, 999, 0, 1 << 40)}


def answer(views, heads, kernels, format, dtype, fused=False):
    """Write a history and new tokens, run, and return every byte of keys, values, out and lse."""
    layer = pageant.Layer(window=6, k_scale=0.5, v_scale=2.0, sinks=torch.ones(2 * heads))
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2 * heads, num_kv_heads=heads, head_dim=D, dtype=dtype),
        pageant.CacheSpec(format=format, page_size=N),
        features=pageant.Features.of([layer], lse=True),
        options=pageant.Options(kernels=kernels),
    )
    cache = attn.wrap_cache(*views(heads, attn.format.element_dtype))
    rng = torch.Generator().manual_seed(8)
    history = pageant.Batch.from_lengths(LENGTHS[1], LENGTHS[1], TABLE, N)
    step = pageant.Batch.from_lengths(*LENGTHS, TABLE, N)
    for batch in (history, step):
        plan = attn.plan(batch)
        width = 4 * heads * D
        qkv = torch.randn(batch.num_tokens, width, generator=rng).to(dtype)
        q, k, v = (
            x.view(batch.num_tokens, -1, D)
            for x in qkv.split([2 * heads * D, heads * D, heads * D], dim=-1)
        )
        if not fused:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        attn.write(plan, cache, k, v, layer)
    out, lse = attn.run(plan, q, cache, layer, return_lse=True)
    pages = [view.contiguous().view(torch.uint8) for view in (cache.k, cache.v)]
    return [*pages, out.view(torch.uint8), lse.view(torch.int32)]


def same(got, want):
    for name, a, b in zip(("keys", "values", "out", "lse"), got, want, strict=True):
        assert torch.equal(a, b), f"{name} differ"


KINDS = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8_e4m3", torch.float16)]


@each_kernel
@pytest.mark.parametrize(("format", "dtype"), KINDS)
@pytest.mark.parametrize("heads", [1, 3])
def test_every_arrangement(kernels, format, dtype, heads):
    want = answer(separate, heads, kernels, format, dtype)
    assert want[0].any()
    assert want[1].any()
    for views in MEMORIES:
        same(answer(views, heads, kernels, format, dtype), want)


@each_kernel
@pytest.mark.parametrize(("format", "dtype"), KINDS)
def test_the_stride_of_one_head_means_nothing(kernels, format, dtype):
    want = answer(separate, 1, kernels, format, dtype)
    for views in ONE_HEAD.values():
        same(answer(views, 1, kernels, format, dtype), want)


@each_kernel
@pytest.mark.parametrize("heads", [1, 2])
def test_slices_of_fused_qkv(kernels, heads):
    plain = answer(separate, heads, kernels, "bf16", torch.bfloat16)
    same(answer(separate, heads, kernels, "bf16", torch.bfloat16, fused=True), plain)


@each_kernel
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC"])
@pytest.mark.parametrize("heads", [1, 2])
def test_one_tensor_in_the_layouts_own_order(kernels, layout, heads):
    want = answer(separate, heads, kernels, "fp32", torch.float32)

    def views(heads, dtype):
        """The views `wrap_cache(combined)` makes."""
        sizes = {"B": P, "H": heads, "N": N, "C": 2 * D}
        combined = torch.zeros([sizes[axis] for axis in layout[1:]], dtype=dtype)
        attn = pageant.Attention(
            pageant.Shape(num_q_heads=heads, num_kv_heads=heads, head_dim=D, dtype=dtype),
            pageant.CacheSpec(page_size=N, layout=layout),
        )
        cache = attn.wrap_cache(combined)
        assert cache.k.untyped_storage().data_ptr() == combined.untyped_storage().data_ptr()
        return cache.k, cache.v

    same(answer(views, heads, kernels, "fp32", torch.float32), want)


@each_kernel
def test_new_cache_layouts(kernels):
    """All six layouts of our own memory."""
    want = answer(separate, 2, kernels, "bf16", torch.bfloat16)
    for layout in pageant.cache.layout.LAYOUTS:

        def views(heads, dtype, layout=layout):
            attn = pageant.Attention(
                pageant.Shape(num_q_heads=heads, num_kv_heads=heads, head_dim=D, dtype=dtype),
                pageant.CacheSpec(page_size=N, layout=layout),
            )
            cache = attn.new_cache(num_layers=3, num_pages=P)[1]
            return cache.k, cache.v

        same(answer(views, 2, kernels, "bf16", torch.bfloat16), want)


@each_kernel
def test_page_tables_wider_than_needed(kernels):
    """The row stride of a table that is a slice of a wider one."""
    step = pageant.Batch.from_lengths([1, 3], [5, 7], [[2, 0], [1, 3]], N)
    wide = torch.full((2, 9), -1, dtype=torch.int32)
    wide[:, :2] = step.page_table
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=D, dtype=torch.float32),
        pageant.CacheSpec(page_size=N),
        options=pageant.Options(kernels=kernels),
    )
    rng = torch.Generator().manual_seed(2)
    cache = attn.wrap_cache(*(torch.randn(4, N, 1, D, generator=rng) for _ in "kv"))
    q = torch.randn(4, 2, D, generator=rng)
    want = attn.run(attn.plan(step), q, cache)
    for table in (wide, wide[:, :2], wide[:, :5]):
        assert torch.equal(attn.run(attn.plan(replace(step, page_table=table)), q, cache), want)


def test_content_stride_must_be_one():
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=D, dtype=torch.float32),
        pageant.CacheSpec(page_size=N),
    )
    good, scattered = torch.zeros(P, N, 1, D), torch.zeros(P, N, 1, 2 * D)[..., ::2]
    for name, views in (("k", (scattered, good)), ("v", (good, scattered))):
        with pytest.raises(pageant.ArgumentError, match="content stride 2") as caught:
            attn.wrap_cache(*views)
        assert caught.value.argument == name
    plan = attn.plan(pageant.Batch.from_lengths([1], [1], [[0]], N))
    cache = attn.wrap_cache(good, good.clone())
    with pytest.raises(pageant.ArgumentError, match="content stride 2") as caught:
        attn.run(plan, torch.zeros(1, 2, 2 * D)[..., ::2], cache)
    assert caught.value.argument == "q"
    with pytest.raises(pageant.ArgumentError, match="content stride 2") as caught:
        attn.run(plan, torch.zeros(1, 2, D), cache, out=torch.zeros(1, 2, 2 * D)[..., ::2])
    assert caught.value.argument == "out"
