"""R17: with a large pool the answer was zeros, garbage or a fault: offsets were 32-bit.

Pages, tokens and rows that lie past 2**31 elements are read and written as those at the beginning.
Memory is only taken where it is touched, so these pools cost a few pages each.
"""

import pytest
import torch

import pageant
from pageant import Layer
from tests.reports.scene import each_kernel, each_phase

FAR = 2**31
PAGE, HEADS, DIM = 4, 2, 32
ROW = HEADS * DIM
TOKENS = 6
LAYER = Layer(k_scale=0.5, v_scale=0.25)


def attention(kernels, phase, format, layout="LBHNC"):
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float16),
        pageant.CacheSpec(format=format, page_size=PAGE, layout=layout),
        pageant.Limits(max_requests=2, max_tokens=16, max_seq_len=64),
        pageant.Features.of([Layer(), Layer(window=3)], lse=True),
        pageant.Options(kernels=kernels, speculative_tokens=7 if phase == "decode" else 0),
    )


def used(attn, cache, pages):
    """What write and run make of six new tokens in these two pages: answers, and stored bytes."""
    rng = torch.Generator().manual_seed(17)
    k, v = (torch.randn(TOKENS, HEADS, DIM, generator=rng).half() for _ in range(2))
    q = torch.randn(TOKENS, 4, DIM, generator=rng).half()
    plan = attn.plan(pageant.Batch.from_lengths([TOKENS], [TOKENS], [pages], PAGE))
    attn.write(plan, cache, k, v, LAYER)
    layers = LAYER, Layer(window=3)
    answers = [x for layer in layers for x in attn.run(plan, q, cache, layer, return_lse=True)]
    parts = [part for side in cache.sides for part in (side.elements, side.scales)]
    stored = [
        torch.cat([part[page] for page in pages])[:TOKENS].view(torch.uint8)
        for part in parts
        if part is not None
    ]
    return q, answers, stored


def assert_far_as_near(attn, far, near):
    last = far.num_pages - 1
    _, got, got_bytes = used(attn, far, [last, last - 1])
    _, want, want_bytes = used(attn, near, [0, 1])
    assert all(x.isfinite().all() for x in want)
    for one, other in zip(got + got_bytes, want + want_bytes, strict=True):
        assert torch.equal(one, other)


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_dense_pools(kernels, phase, format):
    """Pages with nothing between them, so many that the last begins past 2**31 elements."""
    attn = attention(kernels, phase, format)
    num_pages = FAR // (PAGE * ROW) + 3
    shape = (num_pages, PAGE, HEADS, DIM)
    far = attn.wrap_cache(*(torch.empty(shape, dtype=torch.uint8) for _ in range(2)))
    assert (far.num_pages - 1) * far.k.stride(0) > FAR
    near = attn.new_cache(num_layers=1, num_pages=2)[0]
    assert_far_as_near(attn, far, near)


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3", "int8", "fp8_e4m3_token_head", "nvfp4"])
@pytest.mark.parametrize("axis", ["page", "token", "head"])
def test_far_strides(kernels, phase, format, axis):
    """Few pages, or tokens, or heads, far apart; scales stored with pages lie apart as well."""
    attn = attention(kernels, phase, format)
    fmt = attn.format

    def room(size, dtype):
        strides = {
            "page": (FAR + 64, ROW, DIM, 1),
            "token": (ROW, FAR // 3 + 64, DIM, 1),
            "head": (PAGE * DIM, DIM, FAR + 64, 1),
        }[axis]
        sizes = (2, PAGE, HEADS, size)
        last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        return torch.empty(last + 1, dtype=dtype).as_strided(sizes, strides)

    tensors = [room(DIM // fmt.per_byte, fmt.element_dtype) for _ in range(2)]
    if fmt.scale_dtype is not None:
        scales = [room(fmt.num_scales(DIM) or 1, fmt.scale_dtype) for _ in range(2)]
        tensors += scales if fmt.scale_block else [scale[..., 0] for scale in scales]
    far = attn.wrap_cache(*tensors)
    near = attn.new_cache(num_layers=1, num_pages=2)[0]
    assert_far_as_near(attn, far, near)


@each_kernel
@each_phase
def test_a_combined_pool(kernels, phase):
    """One tensor of both keys and values, as engines allot it."""
    attn = attention(kernels, phase, "fp8_e4m3", "LBNHC")
    num_pages = FAR // (PAGE * 2 * ROW) + 3
    whole = torch.empty(num_pages, PAGE, HEADS, 2 * DIM, dtype=torch.uint8)
    near = attn.new_cache(num_layers=1, num_pages=2)[0]
    assert_far_as_near(attn, attn.wrap_cache(whole), near)


@each_kernel
@each_phase
def test_queries_and_outputs_far_apart(kernels, phase):
    attn = attention(kernels, phase, "fp16")
    kv = attn.new_cache(num_layers=1, num_pages=2)[0]
    near, (want, want_lse, *_), _ = used(attn, kv, [0, 1])
    step = FAR // 4 + 64
    q, out = (
        torch.empty(step * (TOKENS - 1) + 4 * DIM, dtype=torch.float16).as_strided(
            (TOKENS, 4, DIM), (step, DIM, 1)
        )
        for _ in range(2)
    )
    q.copy_(near)
    plan = attn.plan(pageant.Batch.from_lengths([TOKENS], [TOKENS], [[0, 1]], PAGE))
    got, lse = attn.run(plan, q, kv, LAYER, out=out, return_lse=True)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)


@each_phase
def test_slots_past_an_int32(phase):
    """Page ids of 31 bits make slots of more: they are split into page and row without loss."""
    attn = attention("auto", phase, "fp16")
    page = 2**31 - 5
    batch = pageant.Batch.from_lengths([3], [3], [[page]], PAGE)
    assert batch.slot_mapping.tolist() == [page * PAGE + row for row in range(3)]
    index = attn.plan(batch).buffers.batch.writes
    assert index.pages.tolist() == [page] * 3
    assert index.rows.tolist() == [0, 1, 2]
    assert index.largest_slot == page * PAGE + 2
