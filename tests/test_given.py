"""Caches, scales and slots that look right and are not: refused before anything is written."""

import math
from dataclasses import replace

import pytest
import torch

from pageant import ArgumentError, Attention, Batch, CacheSpec, Layer, Limits, Shape, ops

SHAPE = Shape(num_q_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float32)


def attention(format: str = "nvfp4", page_size: int = 6) -> Attention:
    limits = Limits(max_requests=2, max_tokens=8, max_seq_len=32)
    return Attention(SHAPE, CacheSpec(format=format, page_size=page_size), limits)


@pytest.mark.parametrize(
    "change",
    [
        {"v_scale_order": "swizzled"},
        {"v_scale_order": "junk"},
        {"format": "nvfp4"},
        {"k": [1]},
        {"k": torch.zeros(2, 6, 1, 64, dtype=torch.uint8)[..., ::2]},
        {"k": torch.zeros(2, 6, 1, 32, dtype=torch.uint8, device="meta")},
        {"k_scales": None},
        {"v_scales": torch.zeros(3, 6, 1, 4).to(torch.float8_e4m3fn)},
        {"v_scales": torch.zeros(2, 6, 1, 4)},
    ],
)
def test_a_changed_cache(change):
    attn = attention()
    whole = attn.new_cache(num_layers=1, num_pages=2)
    cache = replace(whole[0], **change)
    plan = attn.plan(Batch.from_lengths([2], [6], [[1]], page_size=6))
    with pytest.raises(ArgumentError, match="cache"):
        attn.run(plan, torch.ones(2, 2, 64), cache)
    with pytest.raises(ArgumentError, match="cache"):
        attn.write(plan, cache, torch.ones(2, 1, 64), torch.ones(2, 1, 64))
    assert not whole.storage.any()


BAD_SCALES = [
    0.0, -1.0, math.nan, math.inf, 1e-50, 1e39, 10**400, "1", None, True,
    torch.ones(2), torch.ones(1).to_sparse(), torch.ones(1, dtype=torch.complex64),
    torch.ones(1, requires_grad=True), torch.ones(1, device="meta"), torch.tensor(True),
]  # fmt: skip


@pytest.mark.parametrize("scale", BAD_SCALES, ids=lambda s: str(type(s)) + str(s)[:9])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_is_none(name, scale):
    attn = attention("fp8", 16)
    whole = attn.new_cache(num_layers=1, num_pages=1)
    plan = attn.plan(Batch.from_lengths([1], [1], [[0]], page_size=16))
    rows, layer = torch.ones(1, 1, 64), Layer(**{name: scale})
    with pytest.raises(ArgumentError, match=name):
        attn.write(plan, whole[0], rows, rows, layer)
    with pytest.raises(ArgumentError, match=name):
        attn.run(plan, torch.ones(1, 2, 64), whole[0], layer)
    assert not whole.storage.any()
    for call in (ops.quantize, lambda x, *rest: ops.dequantize(x, None, *rest)):
        with pytest.raises(ArgumentError, match="scale"):
            call(torch.ones(4).to(torch.float8_e4m3fn) if call is not ops.quantize
                 else torch.ones(4), "fp8", scale)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", [1.0]),
        ("v", None),
        ("k", torch.ones(3, 16)),
        ("k_cache", None),
        ("k_cache", torch.zeros(4, 4, 16)),
        ("slot_mapping", [0, 1, 2]),
        ("slot_mapping", torch.tensor([[0, 1, 2]])),
        ("slot_mapping", torch.tensor([0, 1, 2], dtype=torch.int32)),
        ("slot_mapping", torch.tensor(0)),
        ("scales", (1.0,)),
        ("scales", 2.0),
        ("format", []),
    ],
)
def test_write_pages(name, value):
    cache = torch.zeros(4, 4, 1, 16)
    given = {
        "k": torch.ones(3, 1, 16),
        "v": torch.ones(3, 1, 16),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "slot_mapping": torch.tensor([0, 1, 2]),
    }
    with pytest.raises(ArgumentError):
        ops.write_pages(**{**given, name: value})
    assert not cache.any()


def test_memory_that_two_slots_share():
    attn = attention("int8", 16)
    k, scales = torch.zeros(3, 16, 1, 64, dtype=torch.int8), torch.zeros(3, 16, 1)
    with pytest.raises(ArgumentError, match="the memory of k"):
        attn.wrap_cache(k, k, scales, scales.clone())
    with pytest.raises(ArgumentError, match="the memory of k_scales"):
        attn.wrap_cache(k, k.clone(), scales, scales)
    with pytest.raises(ArgumentError, match="apart"):
        attn.wrap_cache(k[:1].expand(3, -1, -1, -1), k.clone(), scales, scales.clone())
    assert attn.wrap_cache(k, k.clone(), scales, scales.clone()).num_pages == 3


def test_inference_tensors_among_the_scales():
    attn = attention("int8", 16)
    k = torch.zeros(3, 16, 1, 64, dtype=torch.int8)
    with torch.inference_mode():
        scales = torch.zeros(3, 16, 1)
    cache = attn.wrap_cache(k, k.clone(), scales, torch.zeros(3, 16, 1))
    plan = attn.plan(Batch.from_lengths([1], [1], [[0]], page_size=16))
    with pytest.raises(ArgumentError, match="inference"):
        attn.write(plan, cache, torch.ones(1, 1, 64), torch.ones(1, 1, 64))
    assert not k.any()


@pytest.mark.parametrize("rows", [1, 20])
def test_float16_with_a_large_value_scale(rows):
    """Stored values are tiny, and float16 would round them before the scale brings them back."""
    shape = Shape(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    rng, answers = torch.Generator().manual_seed(0), []
    q, k, v = (torch.randn(300, heads, 64, generator=rng).half() for heads in (4, 2, 2))
    for kernels in ("auto", "reference"):
        attn = Attention(
            shape, CacheSpec(format="fp8_e5m2"),
            Limits(max_requests=1, max_tokens=300, max_seq_len=300),
            options=replace(attention().options, kernels=kernels),
        )  # fmt: skip
        kv, layer = attn.new_cache(num_layers=1, num_pages=20), Layer(v_scale=1e4)
        pages = [list(range(20))]
        attn.write(attn.plan(Batch.from_lengths([300], [300], pages, 16)), kv[0], k, v, layer)
        plan = attn.plan(Batch.from_lengths([rows], [300], pages, 16))
        answers.append(attn.run(plan, q[:rows], kv[0], layer).double())
    assert (answers[0] - answers[1]).norm() <= 1e-3 * answers[1].norm()
