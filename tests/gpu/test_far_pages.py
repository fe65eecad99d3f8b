"""R17: pages past 2**31 elements of a pool are read and written as those at its beginning. And more
requests in one batch than 16 bits count."""

from __future__ import annotations

import pytest
import torch

import pageant
from pageant import Layer
from tests.gpu.scene import PAGE, attention, batch
from tests.inputs import BOUNDS, assert_close

pytestmark = pytest.mark.gpu

FAR = 2**31
MANY = 66_000
TOKENS = 2 * PAGE - 3
LAYERS = (Layer(k_scale=0.5, v_scale=0.25), Layer(window=7))
SHAPE = pageant.Shape(num_q_heads=8, num_kv_heads=4, head_dim=128, dtype=torch.float16)


def used(attn, cache, pages):
    """What write and run make of new tokens in these two pages: answers, and stored bytes."""
    rng = torch.Generator("cuda").manual_seed(17)
    q, k, v = (
        torch.randn(TOKENS, heads, 128, generator=rng, device="cuda").half() for heads in (8, 4, 4)
    )
    plan = attn.plan(batch([TOKENS], [TOKENS], pages))
    attn.write(plan, cache, k, v, LAYERS[0])
    answers = [x for layer in LAYERS for x in attn.run(plan, q, cache, layer, return_lse=True)]
    last = attn.plan(batch([1], [TOKENS], pages, slot_mapping=None))
    answers += [x for layer in LAYERS for x in attn.run(last, q[:1], cache, layer, return_lse=True)]
    parts = [part for side in cache.sides for part in (side.elements, side.scales)]
    return answers + [
        torch.cat([part[page] for page in pages])[:TOKENS].contiguous().view(torch.uint8)
        for part in parts
        if part is not None
    ]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3", "int8", "nvfp4"])
def test_the_last_pages_of_a_large_pool(format, layout):
    spec = pageant.CacheSpec(format=format, page_size=PAGE, layout=layout)
    limits = pageant.Limits(max_requests=2, max_tokens=64, max_seq_len=64)
    attn = attention(limits, LAYERS, shape=SHAPE, cache=spec)
    near = attn.new_cache(num_layers=1, num_pages=2)[0]
    num_pages = FAR // near.k.stride(0) + 3
    if torch.cuda.mem_get_info()[0] < 3 * FAR * near.k.itemsize:
        pytest.skip("too little memory")
    far = attn.new_cache(num_layers=1, num_pages=num_pages)[0]
    assert (num_pages - 2) * far.k.stride(0) >= FAR
    last = num_pages - 1
    got, want = used(attn, far, [last, last - 1]), used(attn, near, [0, 1])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.uint8 or one.isfinite().all()


@pytest.mark.parametrize("query_len", [1, 2])
def test_66_000_requests(query_len):
    """Decodes, and prefills of two tokens, against softmax over gathered keys."""
    shape = pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    width, device = 3, "cuda"
    limits = pageant.Limits(
        max_requests=MANY, max_tokens=MANY * query_len, max_seq_len=width * PAGE
    )
    attn = attention(limits, shape=shape)
    torch.manual_seed(0)
    kv = attn.new_cache(num_layers=1, num_pages=MANY * width)[0]
    for view in (kv.k, kv.v):
        view.copy_(torch.randn(view.shape, device=device))
    lens = query_len + torch.arange(MANY, device=device) % (width * PAGE - query_len + 1)
    table = torch.randperm(MANY * width, device=device).view(MANY, width)
    plan = attn.plan(
        pageant.Batch(
            query_start_loc=(torch.arange(MANY + 1, device=device) * query_len).int(),
            seq_lens=lens.int(),
            page_table=table.int(),
            num_requests=MANY,
            num_tokens=MANY * query_len,
            max_query_len=query_len,
            max_seq_len=width * PAGE,
        )
    )
    q = torch.randn(MANY, query_len, 2, 16, device=device).half()
    out = attn.run(plan, q.flatten(0, 1), kv)
    keys, values = (view[table].flatten(1, 2)[:, :, 0].float() for view in (kv.k, kv.v))
    scores = torch.einsum("rmhd,rjd->rmhj", q.float(), keys) / 4
    position = lens[:, None] - query_len + torch.arange(query_len, device=device)
    hidden = torch.arange(width * PAGE, device=device) > position[:, :, None]
    weights = scores.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1)
    want = torch.einsum("rmhj,rjd->rmhd", weights, values)
    assert_close(out, want.flatten(0, 1), BOUNDS[torch.float16])
