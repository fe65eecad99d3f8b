"""Layers of one plan over quantised caches: fp8 queries, windows, drafts and caches they share."""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Layer
from pageant.cache.formats import FORMATS
from pageant.cache.quantize import dequantize
from pageant.kernels import reference
from pageant.plan.inputs import LayerParams
from tests.inputs import Case, assert_close, build
from tests.reports.scene import each_kernel, each_phase

PAGE, PAGES, DIM, VALUE_DIM = 4, 40, 32, 48
# Decodes, drafts and a prefill, or prefills alone; tables whose pages repeat in no order.
QUERY_LENS, SEQ_LENS = (1, 3, 0, 2, 9), (30, 17, 5, 2, 21)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.25, 0.5, 0.1, 0.0])
LAYERS = (
    Layer(k_scale=0.5, v_scale=3.0),
    Layer(window=5, k_scale=torch.tensor([0.25]), q_scale=0.5),
    Layer(window=11, soft_cap=2.0, v_scale=0.5, scale=0.3),
    Layer(sinks=SINKS, soft_cap=0.5),
    Layer(window=5, alibi_slopes=SLOPES, sinks=SINKS, k_scale=2.0),
    Layer(window=11, alibi_slopes=SLOPES, soft_cap=1.0, sinks=SINKS, scale=0.1, q_scale=2.0),
)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("drafts", "speculative"), [(None, 0), ("mask", 3), ("parents", 3)])
def test_a_quantised_query_with_everything(kernels, dtype, format, drafts, speculative):
    case = Case(
        seed=31,
        dtype=dtype,
        group=3,
        head_dim=32,
        v_head_dim=48,
        format=format,
        lengths=((1, 40), (4, 21), (2, 2), (0, 9), (9, 33)),
        window=14,
        soft_cap=3.0,
        sinks=True,
        alibi=True,
        scales=True,
        drafts=drafts,
        speculative=speculative,
        padding=2,
        query_scale=0.25,
    )
    build(case, kernels).check()


def attention(kernels, phase, format, layers=LAYERS, **options):
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=4,
            num_kv_heads=2,
            head_dim=DIM,
            v_head_dim=VALUE_DIM,
            dtype=torch.float32,
        ),
        pageant.CacheSpec(page_size=PAGE, format=format),
        pageant.Limits(max_requests=8, max_tokens=32, max_seq_len=64),
        pageant.Features.of(layers, lse=True, draft_masks=True),
        pageant.Options(
            kernels=kernels, speculative_tokens=2 if phase == "decode" else 0, **options
        ),
    )


def batch(**others):
    ids = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[ids.pop() for _ in range(-(-n // PAGE))] for n in SEQ_LENS]
    return pageant.Batch.from_lengths(QUERY_LENS, SEQ_LENS, tables, PAGE, **others)


def fill(kv, seed):
    """Every slot of one layer's cache, written under that layer's scales."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(PAGES * PAGE, 2, DIM, generator=rng)
    v = torch.randn(PAGES * PAGE, 2, VALUE_DIM, generator=rng)
    layer = LAYERS[seed % len(LAYERS)]
    pageant.ops.write_pages(
        k,
        v,
        kv.k,
        kv.v,
        torch.arange(len(k)),
        k_scales=kv.k_scales,
        v_scales=kv.v_scales,
        format=kv.format.name,
        scales=(layer.k_scale, layer.v_scale),
    )


def stored(kv):
    """All bytes of keys and values."""
    return torch.cat([view.clone().view(torch.uint8).flatten() for view in (kv.k, kv.v)])


def read(kv, side, pages, n, scale):
    """float64 [n, Hkv, D]: a request's keys or values as they read back."""
    at = torch.arange(n)
    page, row = torch.tensor(pages)[at // PAGE], at % PAGE
    view = kv.sides[side]
    # Bytes, as not every fp8 type can be indexed.
    codes = view.elements.view(torch.uint8)[page, row].view(view.elements.dtype)
    scales = None
    if view.scales is not None:
        scales = view.scales.float()[page, row].to(view.scales.dtype)
    return dequantize(codes, scales, kv.format.name, scale).double()


def expected(kv, step, q, layer, draft):
    """Output and lse of all tokens, from the definition."""
    outs, lses, starts = [], [], step.query_start_loc.tolist()
    scale = DIM**-0.5 if layer.scale is None else layer.scale
    quantised = q.dtype == torch.float8_e4m3fn
    params = LayerParams(
        score_scale=scale * (float(layer.q_scale) if quantised else 1.0),
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        alibi_slopes=layer.alibi_slopes,
    )
    for r, (m, n) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        pages = step.page_table[r].tolist()
        k, v = (
            read(kv, side, pages, n, factor)
            for side, factor in ((0, layer.k_scale), (1, layer.v_scale))
        )
        rows = slice(starts[r], starts[r + 1])
        own = None if draft is None else draft[rows, :m]
        mask = reference.visible(m, n, causal=True, window=layer.window, draft=own)
        out, lse = reference.attend(q[rows].double(), k, v, mask, params)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def queries(quantised):
    q = torch.randn(sum(QUERY_LENS), 4, DIM, generator=torch.Generator().manual_seed(2))
    return q.to(torch.float8_e4m3fn) if quantised else q


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_4over6", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_that_differ_in_everything(kernels, phase, format, quantised, masked):
    """Six layers, each with pages of its own, one plan; forwards, then backwards with the same."""
    draft = torch.rand(15, 9, generator=torch.Generator().manual_seed(3)) < 0.6 if masked else None
    attn = attention(kernels, phase, format)
    kv = attn.new_cache(num_layers=len(LAYERS), num_pages=PAGES)
    for index in range(len(LAYERS)):
        fill(kv[index], index)
    step, q = batch(draft_mask=draft), queries(quantised)
    plan = attn.plan(step)
    assert plan.split.num_prefills == (1 if phase == "decode" else 4)
    first = []
    for index, layer in enumerate(LAYERS):
        out, lse = attn.run(plan, q, kv[index], layer, return_lse=True)
        want, want_lse = expected(kv[index], step, q, layer, draft)
        assert_close(out, want, 1e-5)
        assert_close(lse, want_lse, 1e-5)
        first.append(out)
    for index in reversed(range(len(LAYERS))):
        assert torch.equal(attn.run(plan, q, kv[index], LAYERS[index]), first[index])


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["fp32", "nvfp4", "fp8_e4m3_token_head"])
@pytest.mark.parametrize("quantised", [False, True])
def test_layers_that_share_a_cache(kernels, phase, format, quantised):
    """Two owners in turn with two layers that read theirs, in one plan of decodes and prefills."""
    scales = {"k_scale": 0.5, "v_scale": 2.0}
    owners = (Layer(**scales), Layer(window=5, sinks=SINKS, **scales))
    sharing = (
        Layer(window=11, soft_cap=2.0, shares_cache=True, **scales),
        Layer(alibi_slopes=SLOPES, sinks=SINKS, shares_cache=True, q_scale=0.5, **scales),
    )
    attn = attention(kernels, phase, format, (*owners, *sharing))
    kv = attn.new_cache(num_layers=2, num_pages=PAGES)
    step, q = batch(), queries(quantised)
    plan = attn.plan(step)
    assert plan.split.num_decodes
    assert plan.split.num_prefills
    rng = torch.Generator().manual_seed(4)
    for index, owner in enumerate(owners):
        fill(kv[index], index)
        k = torch.randn(15, 2, DIM, generator=rng)
        v = torch.randn(15, 2, VALUE_DIM, generator=rng)
        before = stored(kv[index])
        attn.write(plan, kv[index], k, v, owner)
        written = stored(kv[index])
        assert not torch.equal(written, before)
        for layer in (owner, *sharing):
            attn.write(plan, kv[index], -k, -v, replace(layer, shares_cache=True))
            out, lse = attn.run(plan, q, kv[index], layer, return_lse=True)
            want, want_lse = expected(kv[index], step, q, layer, None)
            assert_close(out, want, 1e-5)
            assert_close(lse, want_lse, 1e-5)
            assert torch.equal(stored(kv[index]), written)
