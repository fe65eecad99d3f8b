"""R7: fp8 caches failed without native fp8, and values above the maximum became NaN in places.

Writing saturates, a NaN stays one, and the bytes are the same everywhere; all 256 codes read as the
specification says, through attention itself.
"""

import math

import pytest
import torch

import pageant
from tests.cache.definition import TABLES
from tests.reports.scene import each_dtype, each_kernel, each_phase, poison

E4M3 = {
    # value: (byte, what reads back)
    1000.0: (0x7E, 448.0),
    -1000.0: (0xFE, -448.0),
    448.0: (0x7E, 448.0),
    464.0: (0x7E, 448.0),
    465.0: (0x7E, 448.0),
    1e30: (0x7E, 448.0),
    math.inf: (0x7E, 448.0),
    -math.inf: (0xFE, -448.0),
    432.0: (0x7E, 448.0),  # a tie between 416 and 448, whose code is even
    1.0: (0x38, 1.0),
    -0.0: (0x80, 0.0),
    1.0625: (0x38, 1.0),
    1.1875: (0x3A, 1.25),
    2.0**-9: (0x01, 2.0**-9),
    2.0**-10: (0x00, 0.0),
}
E5M2 = {
    1e6: (0x7B, 57344.0),
    -1e6: (0xFB, -57344.0),
    57344.0: (0x7B, 57344.0),
    61440.0: (0x7B, 57344.0),
    math.inf: (0x7B, 57344.0),
    1.125: (0x3C, 1.0),
    1.375: (0x3E, 1.5),
    2.0**-16: (0x01, 2.0**-16),
    2.0**-17: (0x00, 0.0),
}
SEEN = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
NANS = {"fp8_e4m3": (0x7F, 0xFF), "fp8_e5m2": (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)}
each_format = pytest.mark.parametrize("format", SEEN)


def attention(kernels, format, dim, value_dim=None, dtype=torch.float32, requests=8):
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=2, num_kv_heads=1, head_dim=dim, v_head_dim=value_dim, dtype=dtype
        ),
        pageant.CacheSpec(format=format, page_size=4),
        pageant.Limits(max_requests=requests, max_tokens=requests * 8, max_seq_len=64),
        pageant.Features(lse=True),
        pageant.Options(kernels=kernels),
    )


@each_kernel
@each_phase
@each_format
@each_dtype
def test_writing_saturates_and_reads_back(kernels, phase, format, dtype):
    """One key: its weight is one, so the output is the value itself."""
    seen = {x: said for x, said in SEEN[format].items() if torch.tensor(x, dtype=dtype) == x}
    attn = attention(kernels, format, 16, dtype=dtype)
    kv = attn.new_cache(num_layers=1, num_pages=2)
    m = 1 if phase == "decode" else 2
    poison(kv[0])
    v = torch.zeros(m, 1, 16, dtype=dtype)
    v[0, 0, : len(seen)] = torch.tensor(list(seen), dtype=dtype)
    plan = attn.plan(pageant.Batch.from_lengths([m], [m], [[1]], 4))
    attn.write(plan, kv[0], v, v)
    bytes_seen = kv[0].v.view(torch.uint8)[1, 0, 0, : len(seen)].tolist()
    assert bytes_seen == [byte for byte, _ in seen.values()]
    assert kv[0].k.view(torch.uint8)[1, 0, 0, : len(seen)].tolist() == bytes_seen
    out = attn.run(plan, torch.zeros(m, 2, 16, dtype=dtype), kv[0])
    want = torch.tensor([back for _, back in seen.values()], dtype=dtype)
    for head in range(2):
        assert torch.equal(out[0, head, : len(seen)], want)


@each_kernel
@each_phase
@each_format
def test_a_nan_stays_one_and_touches_nothing_else(kernels, phase, format):
    attn = attention(kernels, format, 16)
    kv = attn.new_cache(num_layers=1, num_pages=2)
    m = 1 if phase == "decode" else 2
    plan = attn.plan(pageant.Batch.from_lengths([m], [m], [[0]], 4))
    v = torch.ones(m, 1, 16)
    v[0, 0, 5] = math.nan
    attn.write(plan, kv[0], torch.ones(m, 1, 16), v, pageant.Layer(v_scale=0.5))
    assert kv[0].v.view(torch.uint8)[0, 0, 0, 5] in NANS[format]
    out = attn.run(plan, torch.ones(m, 2, 16), kv[0], pageant.Layer(v_scale=0.5))
    others = torch.arange(16) != 5
    assert out[0, :, 5].isnan().all()
    assert (out[:, :, others] == 1).all()


@each_kernel
@each_phase
@each_format
@each_dtype
def test_all_256_codes_of_values(kernels, phase, format, dtype):
    """A head of 256 elements holds every code once; a lone key hands them out unchanged."""
    attn = attention(kernels, format, 16, 256, dtype)
    cache = attn.new_cache(num_layers=1, num_pages=1)[0]
    cache.v.view(torch.uint8)[:] = torch.arange(256, dtype=torch.uint8)
    m = 1 if phase == "decode" else 2
    plan = attn.plan(pageant.Batch.from_lengths([m], [m], [[0]], 4))
    out = attn.run(plan, torch.zeros(m, 2, 16, dtype=dtype), cache)
    want = torch.from_numpy(TABLES[format]).to(dtype)
    for row in out[-1]:  # the last token: an earlier one may meet a hidden key's infinity
        torch.testing.assert_close(row, want, rtol=0, atol=0, equal_nan=True)


@each_kernel
@each_phase
@each_format
def test_all_finite_codes_of_keys(kernels, phase, format):
    """Request i asks with the i-th unit vector: its lse over one key is the key's i-th element."""
    table = TABLES[format]
    finite = [code for code in range(256) if math.isfinite(table[code])]
    attn = attention(kernels, format, 256, 16, requests=256)
    cache = attn.new_cache(num_layers=1, num_pages=1)[0]
    codes = [code if math.isfinite(table[code]) else 0 for code in range(256)]
    cache.k.view(torch.uint8)[:] = torch.tensor(codes, dtype=torch.uint8)
    m = 1 if phase == "decode" else 2
    batch = pageant.Batch.from_lengths([m] * 256, [m] * 256, [[0]] * 256, 4)
    plan = attn.plan(batch)
    q = torch.eye(256).repeat_interleave(m, 0)[:, None].expand(256 * m, 2, 256).contiguous()
    _, lse = attn.run(plan, q, cache, pageant.Layer(scale=1.0), return_lse=True)
    want = torch.from_numpy(table)[finite].float()
    for head in range(2):
        torch.testing.assert_close(lse[::m, head][finite], want, rtol=1e-6, atol=1e-9)


@each_kernel
@each_format
def test_the_same_bytes_whatever_the_model_computes_in(kernels, format):
    """Values that every dtype holds are stored alike."""
    x = torch.arange(-64, 64).reshape(2, 4, 16).float() * 3
    stored = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        attn = pageant.Attention(
            pageant.Shape(num_q_heads=4, num_kv_heads=4, head_dim=16, dtype=dtype),
            pageant.CacheSpec(format=format, page_size=4),
            options=pageant.Options(kernels=kernels),
        )
        kv = attn.new_cache(num_layers=1, num_pages=1)
        plan = attn.plan(pageant.Batch.from_lengths([2], [2], [[0]], 4))
        layer = pageant.Layer(k_scale=0.3, v_scale=torch.tensor([0.7]))
        attn.write(plan, kv[0], x.to(dtype), x.to(dtype), layer)
        stored.append(kv.storage)
    assert stored[0].any()
    assert torch.equal(stored[0], stored[1])
    assert torch.equal(stored[0], stored[2])
