"""Writing pages: the fast writer leaves exactly the bytes the plain one leaves, and no others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant import ops
from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS, CacheLayout
from pageant.cache.pages import LayerCache
from pageant.kernels import reference
from pageant.kernels.cpu.write_pages import write_pages
from pageant.plan.pages import write_index

PAGES = 5


def dirty_cache(order, name, page_size, heads, dims=(16, 24)):
    """Three layers full of random bytes, and views of the middle one."""
    fmt = FORMATS[name]
    layout = CacheLayout(
        order, 3, PAGES, heads, page_size, fmt.data_bytes(dims[0]), fmt.data_bytes(dims[1])
    )
    rng = torch.Generator().manual_seed(11)
    storage = torch.randint(0, 256, (layout.num_bytes,), generator=rng).to(torch.uint8)
    return storage, LayerCache(*layout.views(storage, 1, fmt.element_dtype), fmt)


def tokens(count, heads, dtype, dims=(16, 24), size=100.0):
    rng = torch.Generator().manual_seed(count)
    k = torch.randn(count, heads, dims[0], generator=rng) * size
    v = torch.randn(count, heads, dims[1], generator=rng) * size
    k.flatten()[:4] = torch.tensor([float("nan"), float("inf"), -1e9, 0.0])[: k.numel()]
    return k.to(dtype), v.to(dtype)


def agree(order, name, page_size, heads, dtype, slots, scales=(1.0, 1.0), extra=0):
    """Both writers over equal memory; the whole storage is compared."""
    k, v = tokens(len(slots) + extra, heads, dtype)
    slots = torch.tensor(slots, dtype=torch.int64)
    plain, plain_cache = dirty_cache(order, name, page_size, heads)
    fast, fast_cache = dirty_cache(order, name, page_size, heads)
    before = fast.clone()
    reference.write_pages(k, v, plain_cache, slots, scales)
    write_pages(k, v, fast_cache, write_index(slots, page_size), scales)
    assert torch.equal(plain, fast)
    return before, fast


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("heads", [1, 3, 4, 8])
def test_equals_the_plain_writer(order, name, page_size, heads):
    pool = PAGES * page_size
    slots = [pool - 1, -1, 0, pool // 2, -(2**40)]
    before, after = agree(order, name, page_size, heads, torch.float32, slots, extra=2)
    # Three tokens were written, with 40 elements a head, and no byte besides.
    changed = int((before != after).sum())
    assert 0 < changed <= 3 * heads * 40 * FORMATS[name].bits // 8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(0.5, 3.0), (torch.tensor(0.1), torch.tensor([7.0]))])
def test_every_dtype_and_scale(name, dtype, scales):
    agree("LBHNC", name, 16, 2, dtype, [3, 17, 40, -1], scales)


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(tuple(FORMATS)),
    st.sampled_from((1, 3, 16)),
    st.sampled_from((1, 2, 5)),
    st.data(),
)
def test_random_slots(order, name, page_size, heads, data):
    slot = st.integers(-3, PAGES * page_size - 1)
    slots = data.draw(st.lists(slot, max_size=12, unique_by=lambda s: s if s >= 0 else object()))
    agree(order, name, page_size, heads, torch.bfloat16, slots, extra=data.draw(st.integers(0, 2)))


@pytest.mark.parametrize("name", FORMATS)
def test_values_lie_at_their_slots(name):
    _, cache = dirty_cache("LBNHC", name, 4, 2)
    k = torch.arange(1.0, 4.0)[:, None, None].expand(3, 2, 16)
    v = torch.arange(4.0, 7.0)[:, None, None].expand(3, 2, 24)
    write_pages(k, v, cache, write_index(torch.tensor([9, -1, 2]), 4))
    assert (cache.k[2, 1].float() == 1).all()
    assert (cache.v[2, 1].float() == 4).all()
    assert (cache.k[0, 2].float() == 3).all()
    assert (cache.v[0, 2].float() == 6).all()


@pytest.mark.parametrize("slots", [[], [-1, -1, -5]])
def test_nothing_to_write(slots):
    before, after = agree("LBHNC", "bf16", 16, 2, torch.float32, slots, extra=1)
    assert torch.equal(before, after)


def test_rows_beyond_the_slot_mapping_are_ignored():
    before, _ = dirty_cache("LBHNC", "bf16", 16, 2)
    _, after = agree("LBHNC", "bf16", 16, 2, torch.float32, [], extra=4)
    assert torch.equal(before, after)


@pytest.mark.parametrize("where", ["fused", "permuted", "spread"])
def test_any_strides_of_keys_and_values(where):
    k, v = tokens(4, 2, torch.float32, dims=(16, 16))
    odd = {
        "fused": lambda x: torch.cat([x, x * 2], dim=-1)[..., :16],
        "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "spread": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    }[where]
    slots = write_index(torch.tensor([5, -1, 17, 2]), 16)
    plain, cache = dirty_cache("LBHNC", "fp8_e4m3", 16, 2, (16, 16))
    write_pages(k, v, cache, slots)
    other, cache = dirty_cache("LBHNC", "fp8_e4m3", 16, 2, (16, 16))
    write_pages(odd(k), odd(v), cache, slots)
    assert torch.equal(plain, other)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_and_ops_write_the_same(name):
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16),
        pageant.CacheSpec(format=name, page_size=4),
    )
    k, v = tokens(5, 2, torch.bfloat16, dims=(16, 16))
    plan = attn.plan(pageant.Batch.from_lengths([5], [7], [[2, 0]], page_size=4))
    mine, other = (attn.new_cache(num_layers=1, num_pages=3) for _ in range(2))
    layer = pageant.Layer(k_scale=0.25, v_scale=torch.tensor(2.0))
    attn.write(plan, mine[0], k, v, layer)
    slots = torch.tensor([10, 11, 0, 1, 2])
    ops.write_pages(
        k, v, other[0].k, other[0].v, slots, format=name, scales=(0.25, torch.tensor(2.0))
    )
    assert mine.storage.any()
    assert torch.equal(mine.storage, other.storage)
    assert not mine[0].k[1].view(torch.uint8).any()
