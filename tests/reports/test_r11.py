"""R11: layers of one model that keep different cache types crashed or were misread.

Each Attention has its own format, one step plans them all, and a cache of one format never runs as
another. Keys and values of one layer share a format: anything else is refused by name.
"""

from itertools import permutations

import pytest
import torch

import pageant
from pageant.cache.formats import FORMATS
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import each_kernel, each_phase

TABLE = [[3, 0, 4], [1, 2]]
SHAPE = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.bfloat16)
MODEL = ("bf16", "fp8_e4m3", "int8", "nvfp4")
# How near a format comes to what was written, of elements about 1 in size.
ROUNDING = {"bf16": 4e-3, "fp8_e4m3": 0.06, "int8": 0.02, "nvfp4": 0.15}
BOTH = (torch.tensor([0, 9, 16], dtype=torch.int32), torch.tensor([9, 7], dtype=torch.int32))


def attention(kernels, format, shape=SHAPE):
    return pageant.Attention(
        shape,
        pageant.CacheSpec(format=format, page_size=4),
        pageant.Limits(max_requests=4, max_tokens=32, max_seq_len=64),
        pageant.Features(lse=True),
        pageant.Options(kernels=kernels),
    )


def step(phase):
    """New tokens and keys of the two requests after 8 and 6 keys were written."""
    return ([1, 1], [9, 7]) if phase == "decode" else ([5, 4], [9, 7])


@each_kernel
@each_phase
def test_four_formats_in_one_step(kernels, phase):
    """All layers are planned first, then each writes and runs, twice over, in either order."""
    rng = torch.Generator().manual_seed(3)
    k, v = (torch.randn(16, 2, 32, generator=rng).bfloat16() for _ in range(2))
    q = torch.randn(sum(step(phase)[0]), 4, 32, generator=rng).bfloat16()
    layers = {format: attention(kernels, format) for format in MODEL}
    caches = {
        format: attn.new_cache(num_layers=1, num_pages=5)[0] for format, attn in layers.items()
    }
    whole = pageant.Batch.from_lengths([9, 7], [9, 7], TABLE, 4)
    plans = {format: attn.plan(whole) for format, attn in layers.items()}
    for format, attn in layers.items():
        attn.write(plans[format], caches[format], k, v)
    batch = pageant.Batch.from_lengths(*step(phase), TABLE, 4)
    plans = {format: attn.plan(batch) for format, attn in layers.items()}
    starts = torch.tensor([0, 0, 0], dtype=torch.int32)
    starts[1:] = torch.tensor(step(phase)[0]).cumsum(0)
    exact, exact_lse = pageant.ops.ragged_attention(
        q.float(), k.float(), v.float(), starts, BOTH[0], kernels="reference", return_lse=True
    )
    answers = {}
    for format in (*MODEL, *reversed(MODEL)):
        out, lse = layers[format].run(plans[format], q, caches[format], return_lse=True)
        error = (out.float() - exact).norm() / exact.norm()
        assert error <= ROUNDING[format]
        assert (lse - exact_lse).abs().max() <= 2 * ROUNDING[format]
        if format in answers:
            assert torch.equal(out, answers[format])
        answers[format] = out
    for one, other in permutations(MODEL, 2):
        assert not torch.equal(answers[one], answers[other])


@each_kernel
@each_phase
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_beside_a_16_bit_layer(kernels, phase, format):
    """The same step through both: the quantised layer reads its own dequantised values."""
    rng = torch.Generator().manual_seed(4)
    k, v = (torch.randn(16, 2, 32, generator=rng).bfloat16() for _ in range(2))
    q = torch.randn(sum(step(phase)[0]), 4, 32, generator=rng).bfloat16()
    mine, plain = attention(kernels, format), attention(kernels, "bf16")
    caches = [attn.new_cache(num_layers=1, num_pages=5)[0] for attn in (mine, plain)]
    whole = pageant.Batch.from_lengths([9, 7], [9, 7], TABLE, 4)
    plans = [attn.plan(whole) for attn in (mine, plain)]
    for attn, plan, cache in zip((mine, plain), plans, caches, strict=True):
        attn.write(plan, cache, k, v)
    batch = pageant.Batch.from_lengths(*step(phase), TABLE, 4)
    plans = [attn.plan(batch) for attn in (mine, plain)]
    starts = torch.tensor([0, 0, 0], dtype=torch.int32)
    starts[1:] = torch.tensor(step(phase)[0]).cumsum(0)
    for attn, plan, cache in zip((mine, plain), plans, caches, strict=True):
        name = cache.format.name
        back = [
            pageant.ops.dequantize(*pageant.ops.quantize(x.float(), name), name) for x in (k, v)
        ]
        want, want_lse = pageant.ops.ragged_attention(
            q.float(), *back, starts, BOTH[0], kernels="reference", return_lse=True
        )
        out, lse = attn.run(plan, q, cache, return_lse=True)
        assert_close(out, want, BOUNDS[torch.bfloat16])
        assert_close(lse, want_lse, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize(("one", "other"), [*permutations(MODEL, 2)])
def test_a_cache_of_another_format_is_refused(one, other):
    attn, stranger = attention("auto", one), attention("auto", other)
    cache = stranger.new_cache(num_layers=1, num_pages=5)[0]
    plan = attn.plan(pageant.Batch.from_lengths([1, 1], [9, 7], TABLE, 4))
    rows = torch.zeros(2, 2, 32, dtype=torch.bfloat16)
    for call in (
        lambda: attn.run(plan, torch.zeros(2, 4, 32, dtype=torch.bfloat16), cache),
        lambda: attn.write(plan, cache, rows, rows),
    ):
        with pytest.raises(pageant.ArgumentError) as caught:
            call()
        assert caught.value.argument == "cache"


@pytest.mark.parametrize(
    ("format", "dtypes", "argument"),
    [
        ("bf16", (torch.bfloat16, torch.float8_e4m3fn), "v"),
        ("bf16", (torch.float8_e4m3fn, torch.bfloat16), "k"),
        ("fp8_e4m3", (torch.bfloat16, torch.float8_e4m3fn), "k"),
        ("fp8_e4m3", (torch.float8_e4m3fn, torch.float8_e5m2), "v"),
        ("auto", (torch.bfloat16, torch.float16), "v"),
    ],
)
def test_keys_and_values_of_different_types_are_refused(format, dtypes, argument):
    k, v = (torch.zeros(5, 4, 2, 32).to(dtype) for dtype in dtypes)
    with pytest.raises(pageant.ArgumentError) as caught:
        attention("auto", format).wrap_cache(k, v)
    assert caught.value.argument == argument
