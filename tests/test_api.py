"""The public surface: what an Attention promises whatever kernels it got."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import pageant
from pageant import ArgumentError, Batch, Features, Layer, ops
from pageant.kernels import reference
from pageant.plan.inputs import LayerParams
from pageant.select.bounds import LARGEST
from tests.inputs import BOUNDS, assert_close
from tests.reports.scene import each_dtype, each_kernel, each_phase

PAGE, DIM, VALUE_DIM, PAGES = 4, 16, 24, 12
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
EVERYTHING = Features(
    windows=(None, 2, 5),
    soft_cap=True,
    sinks=True,
    alibi=True,
    draft_masks=True,
    non_causal=True,
    lse=True,
)
each_format = pytest.mark.parametrize("format", ["auto", "fp8_e4m3", "fp8_e5m2"])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def attention(
    kernels="auto",
    phase="prefill",
    dtype=torch.float32,
    format="auto",
    features=EVERYTHING,
    **cache,
):
    """Four query heads over two; as decodes, requests bring up to eight new tokens."""
    return pageant.Attention(
        pageant.Shape(
            num_q_heads=4, num_kv_heads=2, head_dim=DIM, v_head_dim=VALUE_DIM, dtype=dtype
        ),
        pageant.CacheSpec(format=format, page_size=PAGE, **cache),
        pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=64),
        features,
        pageant.Options(kernels=kernels, speculative_tokens=7 if phase == "decode" else 0),
    )


def random(*sizes, seed=5, dtype=torch.float32):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(attn):
    kv = attn.new_cache(num_layers=1, num_pages=PAGES)[0]
    for seed, view in enumerate((kv.k, kv.v)):
        view.copy_(random(*view.shape, seed=seed).to(view.dtype))
    return kv


def batch(**others):
    """Requests of 5, 2 and 3 new tokens; the first token sees 4 keys."""
    return replace(
        Batch.from_lengths([5, 2, 3], [8, 14, 3], [[7, 2], [5, 0, 3, 9], [1]], PAGE), **others
    )


def queries(dtype=torch.float32, rows=10):
    return random(rows, 4, DIM, seed=9, dtype=dtype)


def answer(attn, kv, step, q, layer=None, **others):
    return attn.run(attn.plan(step), q, kv, layer, return_lse=True, **others)


def expected(attn, kv, step, q, layer, *, query_scale=1.0, key_scale=1.0, value_scale=1.0):
    """Out and lse from the definition, one request at a time."""
    outs, lses = [], []
    starts, cross = step.query_start_loc.tolist(), step.encoder_seq_lens is not None
    for r, n in enumerate(step.key_lens.tolist()):
        own, at = slice(starts[r], starts[r + 1]), torch.arange(n)
        m = own.stop - own.start
        pages = step.page_table[r, at // PAGE].long()
        causal = step.causal if isinstance(step.causal, bool) else bool(step.causal[r])
        mask = reference.visible(
            m,
            n,
            causal=causal and not cross,
            window=layer.window,
            draft=None if step.draft_mask is None else step.draft_mask[own],
        )
        scale = DIM**-0.5 if layer.scale is None else layer.scale
        params = LayerParams(
            score_scale=scale * query_scale * key_scale,
            value_scale=value_scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            alibi_slopes=layer.alibi_slopes,
        )
        k, v = kv.k.double()[pages, at % PAGE], kv.v.double()[pages, at % PAGE]
        out, lse = reference.attend(q[own].double(), k, v, mask, params)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# What was not declared


@pytest.mark.parametrize(
    ("declared", "layer", "field"),
    [
        ({"windows": (None, 2)}, Layer(window=5), "layer.window"),
        ({"windows": (2, 5)}, Layer(), "layer.window"),
        ({"soft_cap": False}, Layer(soft_cap=1.0), "layer.soft_cap"),
        ({"sinks": False}, Layer(sinks=SINKS), "layer.sinks"),
        ({"alibi": False}, Layer(alibi_slopes=SLOPES), "layer.alibi_slopes"),
        ({}, Layer(out_format="fp8_e4m3"), "layer.out_format"),
        ({}, Layer(out_format="nvfp4"), "layer.out_format"),
    ],
)
@each_kernel
def test_undeclared_layers(kernels, declared, layer, field):
    attn = attention(kernels, features=replace(EVERYTHING, **declared))
    kv, step = filled(attn), batch()
    with pytest.raises(ArgumentError) as caught:
        attn.run(attn.plan(step), queries(), kv, layer)
    assert caught.value.argument == field
    assert str(caught.value).startswith(f"{field} is ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("declared", "change", "field"),
    [
        ({"non_causal": False}, {"causal": False}, "batch.causal"),
        (
            {"non_causal": False},
            {"causal": torch.tensor([True, False, True])},
            "batch.causal",
        ),
        (
            {"draft_masks": False},
            {"draft_mask": torch.ones(10, 5, dtype=torch.bool)},
            "batch.draft_mask",
        ),
        (
            {"draft_masks": False},
            {"draft_parents": torch.full((10,), -1, dtype=torch.int32)},
            "batch.draft_parents",
        ),
    ],
)
@each_kernel
def test_undeclared_batches(kernels, declared, change, field):
    attn = attention(kernels, features=replace(EVERYTHING, **declared))
    with pytest.raises(ArgumentError) as caught:
        attn.plan(batch(**change))
    assert caught.value.argument == field
    assert attention(kernels).plan(batch(**change))


def test_undeclared_lse():
    attn = attention(features=replace(EVERYTHING, lse=False))
    kv, plan = filled(attn), attn.plan(batch())
    assert isinstance(attn.run(plan, queries(), kv), torch.Tensor)
    with pytest.raises(ArgumentError, match="lse=True") as caught:
        attn.run(plan, queries(), kv, return_lse=True)
    assert caught.value.argument == "return_lse"


def test_features_of_layers_declare_what_they_use():
    layers = [Layer(window=5, sinks=SINKS), Layer(soft_cap=2.0), Layer(alibi_slopes=SLOPES)]
    attn = attention(features=Features.of(layers))
    kv, plan = filled(attn), attn.plan(batch())
    for layer in layers:
        assert attn.run(plan, queries(), kv, layer).shape == (10, 4, VALUE_DIM)


# Wrong tensors


WRONG_ROWS = [
    (lambda x: x[:9], "[9, "),
    (lambda x: x[:, :1], "1, "),
    (lambda x: x[..., :8], ", 8]"),
    (lambda x: x[0], "], "),
    (lambda x: x[None], "[1, 10, "),
    (lambda x: x.double(), "float64"),
    (lambda x: x.half(), "float16"),
    (lambda x: x.to("meta"), "meta"),
    (lambda x: x.clone().requires_grad_(), "grad"),
    (lambda x: x.tolist(), "a tensor"),
]


@pytest.mark.parametrize("name", ["q", "out", "k", "v"])
@pytest.mark.parametrize(("change", "said"), WRONG_ROWS)
def test_wrong_tensors_are_refused(name, change, said):
    attn = attention()
    kv, plan = filled(attn), attn.plan(batch())
    before = bytes(kv.k.untyped_storage())
    rows = {
        "q": queries(),
        "out": torch.full((10, 4, VALUE_DIM), 7.0),
        "k": random(10, 2, DIM),
        "v": random(10, 2, VALUE_DIM),
    }
    rows[name] = change(rows[name])

    def use():
        if name in ("q", "out"):
            attn.run(plan, rows["q"], kv, out=rows["out"])
        else:
            attn.write(plan, kv, rows["k"], rows["v"])

    with pytest.raises(ArgumentError) as caught:
        use()
    assert caught.value.argument == name
    assert said.rstrip(", ") in str(caught.value)
    assert bytes(kv.k.untyped_storage()) == before
    if name == "q":
        assert (rows["out"] == 7.0).all()


@pytest.mark.parametrize(
    "other",
    [
        {"format": "bf16"},
        {"format": "fp8_e4m3"},
        {"page_size": 8},
        {"kv_heads": 4},
        {"head_dim": 24},
        {"v_head_dim": 16},
    ],
)
def test_the_cache_of_another_model_is_refused(other):
    fields = {
        "format": "auto",
        "page_size": PAGE,
        "kv_heads": 2,
        "head_dim": DIM,
        "v_head_dim": VALUE_DIM,
        **other,
    }
    foreign = pageant.Attention(
        pageant.Shape(
            num_q_heads=4,
            num_kv_heads=fields["kv_heads"],
            head_dim=fields["head_dim"],
            v_head_dim=fields["v_head_dim"],
            dtype=torch.float32,
        ),
        pageant.CacheSpec(format=fields["format"], page_size=fields["page_size"]),
    ).new_cache(num_layers=1, num_pages=PAGES)
    attn = attention()
    plan = attn.plan(batch())
    for use in (
        lambda kv: attn.run(plan, queries(), kv),
        lambda kv: attn.write(plan, kv, random(10, 2, DIM), random(10, 2, VALUE_DIM)),
    ):
        with pytest.raises(ArgumentError) as caught:
            use(foreign[0])
        assert caught.value.argument == "cache"
        with pytest.raises(ArgumentError, match="PagedCache") as caught:
            use(foreign)
        assert caught.value.argument == "cache"


def test_keys_and_values_come_together():
    attn = attention()
    kv, plan = filled(attn), attn.plan(batch())
    new = {"k": random(10, 2, DIM), "v": random(10, 2, VALUE_DIM)}
    want = attn.run(plan, queries(), kv)
    assert torch.equal(attn.run(plan, queries(), kv, **new), want)
    for name, missing in (("k", "v"), ("v", "k")):
        with pytest.raises(ArgumentError) as caught:
            attn.run(plan, queries(), kv, **{name: new[name]})
        assert caught.value.argument == missing


@pytest.mark.parametrize("out_format", ["model", "fp8_e4m3"])
def test_out_scales_of_formats_that_have_none(out_format):
    attn = quantising()
    with pytest.raises(ArgumentError, match=out_format) as caught:
        attn.run(
            attn.plan(batch()),
            queries(),
            filled(attn),
            Layer(out_format=out_format),
            out_scales=torch.ones(10, 8).to(E4M3),
        )
    assert caught.value.argument == "out_scales"


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(0), torch.ones(2, 1)])
def test_scales_of_several_elements(name, scale):
    attn = attention(format="fp8")
    q = queries().to(torch.float8_e4m3fn)
    with pytest.raises(ArgumentError, match="one element") as caught:
        attn.run(attn.plan(batch()), q, filled(attn), Layer(**{name: scale}))
    assert caught.value.argument == f"layer.{name}"


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "max_seq_len", "max_cached_tokens"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_limits(name, value):
    with pytest.raises(ArgumentError) as caught:
        pageant.Attention(
            pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16),
            limits=pageant.Limits(**{name: value}),
        )
    assert caught.value.argument == name
    assert repr(value) in str(caught.value)


# Scales


def forms(value):
    """The same number in every form a scale may have."""
    return (
        value,
        torch.tensor(value),
        torch.tensor([value]),
        torch.tensor([[value]]),
        torch.tensor(value, dtype=torch.float64),
    )


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_form_of_a_scale(kernels, phase, format):
    attn = attention(kernels, phase, format=format)
    kv, step, q = filled(attn), batch(), queries()
    want = expected(attn, kv, step, q, Layer(), key_scale=0.5, value_scale=3.0)
    answers = [
        answer(attn, kv, step, q, Layer(k_scale=k, v_scale=v))
        for k, v in zip(forms(0.5), forms(3.0), strict=True)
    ]
    for got in answers:
        same(got, answers[0])
        for part, exact in zip(got, want, strict=True):
            assert_close(part, exact, 1e-5)
    keys, values = random(10, 2, DIM, seed=3), random(10, 2, VALUE_DIM, seed=4)
    written = []
    for k, v in zip(forms(0.5), forms(3.0), strict=True):
        attn.write(attn.plan(step), kv, keys, values, Layer(k_scale=k, v_scale=v))
        written.append(bytes(kv.k.untyped_storage()))
        attn.write(attn.plan(step), kv, keys * 0, values * 0)
    assert len(set(written)) == 1


@each_kernel
@each_phase
def test_scales_are_read_each_time(kernels, phase):
    """One layer, one plan; its tensors change between runs."""
    attn = attention(kernels, phase, format="fp8_e4m3")
    kv, step, q = filled(attn), batch(), queries()
    k_scale, v_scale = torch.tensor(1.0), torch.tensor([1.0])
    layer, plan = Layer(k_scale=k_scale, v_scale=v_scale), attn.plan(step)
    for key, value in ((1.0, 1.0), (0.25, 3.0), (2.0, 0.125)):
        k_scale.fill_(key)
        v_scale.fill_(value)
        want, want_lse = expected(attn, kv, step, q, layer, key_scale=key, value_scale=value)
        out, lse = attn.run(plan, q, kv, layer, return_lse=True)
        assert_close(out, want, 1e-5)
        assert_close(lse, want_lse, 1e-5)


@each_kernel
@each_phase
@each_dtype
def test_scales_of_plain_caches_are_ignored(kernels, phase, dtype):
    attn = attention(kernels, phase, dtype)
    kv, step, q = filled(attn), batch(), queries(dtype)
    layer = Layer(k_scale=7.0, v_scale=torch.tensor(9.0), q_scale=11.0)
    same(answer(attn, kv, step, q, layer), answer(attn, kv, step, q))
    keys, values = random(10, 2, DIM, dtype=dtype), random(10, 2, VALUE_DIM, dtype=dtype)
    plan = attn.plan(step)
    attn.write(plan, kv, keys, values, layer)
    page, row = divmod(int(step.slot_mapping[3]), PAGE)
    assert torch.equal(kv.k[page, row], keys[3])
    assert torch.equal(kv.v[page, row], values[3])


@each_kernel
@each_phase
@each_dtype
@each_format
@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_quantised_query(kernels, phase, dtype, format, q_dtype):
    """q_scale multiplies the scores of an fp8 query, whatever the cache stores."""
    attn = attention(kernels, phase, dtype, format)
    kv, step, q = filled(attn), batch(), (queries() / 0.25).to(q_dtype)
    quantised = attn.format.quantized
    layer = Layer(q_scale=torch.tensor(0.25), k_scale=0.5, v_scale=3.0)
    want, want_lse = expected(
        attn,
        kv,
        step,
        q,
        layer,
        query_scale=0.25,
        key_scale=0.5 if quantised else 1.0,
        value_scale=3.0 if quantised else 1.0,
    )
    out, lse = answer(attn, kv, step, q, layer)
    assert out.dtype == dtype
    assert_close(out, want, BOUNDS[dtype])
    assert_close(lse, want_lse, BOUNDS[dtype])


# Rows past the real tokens


@each_kernel
@each_phase
@each_dtype
def test_padding_is_left_alone(kernels, phase, dtype):
    """Ten real tokens of thirteen planned; queries and out have more rows still."""
    attn = attention(kernels, phase, dtype)
    kv, q = filled(attn), queries(dtype, rows=16)
    want, want_lse = answer(attn, kv, batch(), q[:10])
    q[10:] = torch.nan
    plan = attn.plan(batch(num_tokens=13))
    out = torch.full((20, 4, VALUE_DIM), 77.0, dtype=dtype)
    got, lse = attn.run(plan, q, kv, out=out, return_lse=True)
    assert got is out
    assert (out[10:] == 77.0).all()
    assert torch.equal(out[:10], want)
    assert torch.equal(lse[:10], want_lse)
    assert (lse[10:] == -math.inf).all()
    made, _ = attn.run(plan, q, kv, return_lse=True)
    assert torch.equal(made[:10], want)
    assert (made[10:] == 0).all()


@each_kernel
@each_phase
def test_padded_requests(kernels, phase):
    """Requests of no length at the end, as engines pad: nothing of theirs is read."""
    attn = attention(kernels, phase)
    kv, q = filled(attn), queries(rows=12)
    want = answer(attn, kv, batch(), q[:10])
    table = torch.full((5, 4), 10**6, dtype=torch.int32)
    table[:3] = batch().page_table
    padded = batch(
        query_start_loc=ints(0, 5, 7, 10, 10, 10),
        seq_lens=ints(8, 14, 3, 0, 0),
        page_table=table,
        num_requests=5,
        num_tokens=12,
    )
    out, lse = answer(attn, kv, padded, q)
    same((out[:10], lse[:10]), want)


@each_kernel
@each_phase
@each_dtype
def test_an_out_of_any_strides(kernels, phase, dtype):
    attn = attention(kernels, phase, dtype)
    kv, q, plan = filled(attn), queries(dtype), attn.plan(batch())
    want = attn.run(plan, q, kv)
    whole = torch.full((4, 11, VALUE_DIM + 8), 77.0, dtype=dtype)
    out = whole.transpose(0, 1)[:10, :, 4 : VALUE_DIM + 4]
    assert attn.run(plan, q, kv, out=out) is out
    assert torch.equal(out, want)
    assert (whole[:, 10:] == 77.0).all()
    assert (whole[..., :4] == 77.0).all()
    assert (whole[..., VALUE_DIM + 4 :] == 77.0).all()


@each_kernel
@each_phase
def test_inputs_are_left_alone(kernels, phase):
    attn = attention(kernels, phase, format="fp8")
    kv, q, step = (
        filled(attn),
        queries(),
        batch(draft_parents=ints(-1, 0, 0, 1, 2, -1, 0, -1, 0, 1)),
    )
    keys, values = random(10, 2, DIM), random(10, 2, VALUE_DIM)
    layer = Layer(sinks=SINKS.clone(), alibi_slopes=SLOPES.clone(), soft_cap=3.0)
    inputs = (
        q,
        keys,
        values,
        layer.sinks,
        layer.alibi_slopes,
        *(value for value in vars(step).values() if isinstance(value, torch.Tensor)),
    )
    before = [x.clone() for x in inputs]
    plan = attn.plan(step)
    attn.write(plan, kv, keys, values, layer)
    attn.run(plan, q, kv, layer)
    same(inputs, before)


# One plan, many layers and batches of every kind

LAYERS = (
    Layer(),
    Layer(window=2),
    Layer(window=5, sinks=SINKS, scale=1.0),
    Layer(soft_cap=0.5),
    Layer(alibi_slopes=SLOPES, soft_cap=2.0, sinks=SINKS, window=2),
)


def kinds():
    parents = ints(-1, 0, 0, 1, 2, -1, -1, -1, 0, 0)
    return {
        "causal": {},
        "non-causal": {"causal": False},
        "some causal": {"causal": torch.tensor([True, False, True])},
        "others causal": {"causal": torch.tensor([False, True, False])},
        "cross": {"encoder_seq_lens": ints(3, 16, 1)},
        "mask": {"draft_mask": random(10, 5) > 0},
        "parents": {"draft_parents": parents},
    }


def meaning(step):
    """The draft mask that a batch's parents mean, by walking up from each token."""
    if step.draft_parents is None:
        return step
    mask = torch.zeros(step.num_tokens, step.max_query_len, dtype=torch.bool)
    starts = step.query_start_loc.tolist()
    for first, last in pairwise(starts):
        for token in range(first, last):
            node = token - first
            while node >= 0:
                mask[token, node] = True
                node = int(step.draft_parents[first + node])
    return replace(step, draft_parents=None, draft_mask=mask)


@each_kernel
@each_phase
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", kinds())
def test_layers_of_one_plan(kernels, phase, dtype, kind):
    attn = attention(kernels, phase, dtype)
    kv, step, q = filled(attn), batch(**kinds()[kind]), queries(dtype)
    plan = attn.plan(step)
    assert plan.split.num_decodes == (3 if phase == "decode" else 0)
    for layer in (*LAYERS, LAYERS[0]):
        out, lse = attn.run(plan, q, kv, layer, return_lse=True)
        want, want_lse = expected(attn, kv, meaning(step), q, layer)
        assert_close(out, want, BOUNDS[dtype])
        assert_close(lse, want_lse, BOUNDS[dtype])


@each_kernel
@each_phase
@each_format
def test_parents_are_the_mask_they_mean(kernels, phase, format):
    attn = attention(kernels, phase, format=format)
    kv, q = filled(attn), queries()
    step = batch(**kinds()["parents"])
    trees = answer(attn, kv, step, q)
    same(trees, answer(attn, kv, meaning(step), q))
    assert not torch.equal(trees[0], answer(attn, kv, batch(), q)[0])
    chain = batch(draft_parents=ints(-1, 0, 1, 2, 3, -1, 0, -1, 0, 1))
    for got, want in zip(answer(attn, kv, chain, q), answer(attn, kv, batch(), q), strict=True):
        assert_close(got, want, 1e-5)


@each_kernel
@each_phase
def test_a_tree_by_hand(kernels, phase):
    """Two keys, then drafts 2 to 5 with parents none, 0, 0 and 1; value j is the number j."""
    attn = attention(kernels, phase)
    kv = filled(attn)
    kv.v[3] = torch.arange(4.0)[:, None, None]
    kv.v[8] = torch.arange(4.0, 8.0)[:, None, None]
    # A second request brings more tokens than the first, so rows of the mask are padded.
    step = Batch.from_lengths(
        [4, 5], [6, 5], [[3, 8], [8, 3]], PAGE, draft_parents=ints(-1, 0, 0, 1, *range(-1, 4))
    )
    out, lse = answer(attn, kv, step, torch.zeros(9, 4, DIM))
    want = torch.tensor([1.0, 1.5, 1.75, 2.2])
    torch.testing.assert_close(out[:4, 0, 0], want, rtol=1e-6, atol=0)
    want = torch.tensor([3.0, 4.0, 4.0, 5.0])
    torch.testing.assert_close(lse[:4, 0].exp(), want, rtol=1e-5, atol=0)


@each_kernel
@each_phase
def test_causality_request_by_request(kernels, phase):
    """Each request of a mixed batch equals the same request of an unmixed one."""
    attn = attention(kernels, phase)
    kv, q = filled(attn), queries()
    mixed = answer(attn, kv, batch(causal=torch.tensor([True, False, True])), q)
    plain = answer(attn, kv, batch(), q)
    open_ended = answer(attn, kv, batch(causal=False), q)
    for rows, want in ((slice(0, 5), plain), (slice(5, 7), open_ended), (slice(7, 10), plain)):
        same((mixed[0][rows], mixed[1][rows]), (want[0][rows], want[1][rows]))
    assert not torch.equal(plain[0][5], open_ended[0][5])


@each_kernel
@each_phase
def test_cross_attention_ignores_causality_and_the_decoders_length(kernels, phase):
    attn = attention(kernels, phase)
    kv, q = filled(attn), queries()
    cross = {"encoder_seq_lens": ints(6, 9, 2)}
    want = answer(attn, kv, batch(**cross), q)
    same(answer(attn, kv, batch(causal=False, **cross), q), want)
    same(answer(attn, kv, batch(seq_lens=ints(60, 2, 40), max_seq_len=64, **cross), q), want)


@each_kernel
@each_dtype
@each_format
def test_decodes_and_prefills_in_one_batch(kernels, dtype, format):
    """Two decodes and a prefill: each phase's kernel writes its own rows."""
    attn = attention(kernels, "prefill", dtype, format)
    kv, q = filled(attn), queries(dtype)
    step = Batch.from_lengths([1, 1, 8], [7, 16, 10], [[7, 2], [5, 0, 3, 9], [1, 4, 6]], PAGE)
    layer = Layer(window=5, sinks=SINKS, k_scale=0.5, v_scale=2.0)
    plan = attn.plan(step)
    assert plan.split == (2, 1, 2, 8)
    scales = {"key_scale": 0.5, "value_scale": 2.0} if attn.format.quantized else {}
    want, want_lse = expected(attn, kv, step, q, layer, **scales)
    out, lse = attn.run(plan, q, kv, layer, return_lse=True)
    assert_close(out, want, BOUNDS[dtype])
    assert_close(lse, want_lse, BOUNDS[dtype])


@each_kernel
def test_step_by_step_equals_all_at_once(kernels):
    """A prompt of 5 then one token at a time, written and attended, against one prefill of 9."""
    attn = attention(kernels)
    q, k, v = queries(rows=9), random(9, 2, DIM, seed=1), random(9, 2, VALUE_DIM, seed=2)
    kv = attn.new_cache(num_layers=2, num_pages=3)
    outs = []
    for first, last in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        plan = attn.plan(Batch.from_lengths([last - first], [last], [[2, 0, 1]], PAGE))
        attn.write(plan, kv[0], k[first:last], v[first:last])
        outs.append(attn.run(plan, q[first:last], kv[0]))
    plan = attn.plan(Batch.from_lengths([9], [9], [[2, 0, 1]], PAGE))
    attn.write(plan, kv[1], k, v)
    assert_close(torch.cat(outs), attn.run(plan, q, kv[1]), 1e-5)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    each = [x.double().transpose(0, 1) for x in (q, k, v)]
    each[1:] = [x.repeat_interleave(2, 0) for x in each[1:]]
    want = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=mask)
    assert_close(torch.cat(outs), want.transpose(0, 1), 1e-5)


@each_kernel
@each_phase
def test_layers_have_pages_of_their_own(kernels, phase):
    attn = attention(kernels, phase)
    kv = attn.new_cache(num_layers=3, num_pages=PAGES)
    plan = attn.plan(batch())
    for i in range(3):
        attn.write(plan, kv[i], torch.zeros(10, 2, DIM), torch.full((10, 2, VALUE_DIM), i + 1.0))
    for i in range(3):
        out = attn.run(plan, torch.zeros(10, 4, DIM), kv[i])
        torch.testing.assert_close(out[7:], torch.full_like(out[7:], i + 1.0), rtol=1e-6, atol=0)


# Small print


def test_the_workspace_is_made_once():
    attn = attention(phase="decode")
    size = attn.workspace_bytes
    assert size >= 0
    kv = filled(attn)
    for kind in kinds().values():
        answer(attn, kv, batch(**kind), queries())
    assert attn.workspace_bytes == size
    assert attention(phase="prefill").workspace_bytes <= size


def test_defaults():
    attn = pageant.Attention(pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16))
    assert attn.cache == pageant.CacheSpec()
    assert attn.limits == pageant.Limits()
    assert attn.features == Features()
    assert attn.options == pageant.Options()
    assert attn.device == torch.device("cpu")
    assert attn.format.name == "bf16"
    assert attn.explain().support.ok


def test_a_refused_configuration_raises_its_reason():
    shape = pageant.Shape(num_q_heads=3, num_kv_heads=2, head_dim=16)
    with pytest.raises(ArgumentError) as caught:
        pageant.Attention(shape)
    answer = pageant.supports(shape)
    assert (str(caught.value), caught.value.argument) == (answer.reason, answer.argument)


@pytest.mark.parametrize("kind", [Batch, Layer, Features, pageant.Shape, pageant.CacheSpec])
def test_declarations_are_frozen_and_named(kind):
    with pytest.raises(TypeError):
        kind(1)


@each_kernel
@each_phase
def test_run_under_torch_compile(kernels, phase):
    """A compiled caller runs the same kernels, uncompiled, and gets the same bits."""
    attn = attention(kernels, phase)
    kv, q, plan = filled(attn), queries(), attn.plan(batch())
    layer = Layer(window=5)

    def block(x):
        return attn.run(plan, x * 2, kv, layer) + 1

    compiled = torch.compile(block, backend="eager")
    assert torch.equal(compiled(q), block(q))


@each_kernel
@each_phase
def test_ops_are_the_same_attention(kernels, phase):
    """A batch of decodes alone, or of prefills alone, is split alike by both."""
    attn = attention(kernels, "prefill")
    kv = filled(attn)
    if phase == "decode":
        step = Batch.from_lengths([1, 1], [8, 14], [[7, 2], [5, 0, 3, 9]], PAGE)
    else:
        step = batch()
    q, layer = queries(rows=step.num_tokens), Layer(window=5, soft_cap=2.0, sinks=SINKS)
    got = ops.paged_attention(
        q,
        kv.k,
        kv.v,
        step.query_start_loc,
        step.seq_lens,
        step.page_table,
        layer=layer,
        kernels=kernels,
        return_lse=True,
    )
    same(got, answer(attn, kv, step, q, layer))


@pytest.mark.parametrize("device", ["tpu", "sm90", 3.5, "cuda:99", "meta"])
def test_a_device_that_is_none(device):
    with pytest.raises(ArgumentError, match=r"^device is .*; allowed: cpu") as error:
        pageant.Attention(pageant.Shape(num_q_heads=1, num_kv_heads=1, head_dim=16), device=device)
    assert error.value.argument == "device"


# Memory of out


def shared(q):
    """Room for `q` and more around it, and a view of it that holds q."""
    memory = torch.zeros(4 * q.numel())
    held = memory[q.numel() : 2 * q.numel()].view(q.shape)
    return memory, held.copy_(q)


def square(kernels="auto", phase="prefill", **others):
    """An Attention whose outputs have the queries' shape, and 10 queries."""
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=64),
        EVERYTHING,
        pageant.Options(kernels=kernels, speculative_tokens=7 if phase == "decode" else 0),
    )
    return attn, filled(attn), attn.plan(batch(**others)), queries()


PARTLY = {
    "a row later": lambda memory, q: memory[q.numel() + 64 :][: q.numel()].view(q.shape),
    "a row earlier": lambda memory, q: memory[q.numel() - 64 :][: q.numel()].view(q.shape),
    "an element later": lambda memory, q: memory[q.numel() + 1 :][: q.numel()].view(q.shape),
    "heads swapped": lambda memory, q: q.view(4, 10, DIM).transpose(0, 1),
    "wider rows": lambda memory, q: memory[q.numel() :].as_strided(q.shape, (128, DIM, 1)),
}


@pytest.mark.parametrize("view", PARTLY.values(), ids=PARTLY)
def test_an_out_over_part_of_q(view):
    attn, kv, plan, q = square()
    memory, q = shared(q)
    before = memory.clone()
    with pytest.raises(ArgumentError, match="a part of q's memory") as caught:
        attn.run(plan, q, kv, out=view(memory, q))
    assert caught.value.argument == "out"
    assert torch.equal(memory, before)


@each_phase
@each_kernel
def test_an_out_beside_q_or_in_its_place(kernels, phase):
    attn, kv, plan, q = square(kernels, phase)
    want = attn.run(plan, q, kv)
    packed = torch.stack([q, q, q], dim=1)
    attn.run(plan, packed[:, 0], kv, out=packed[:, 2])
    assert torch.equal(packed[:, 2], want)
    assert torch.equal(packed[:, 1], q)
    wide = torch.cat([q, torch.zeros(3, 4, DIM)])
    attn.run(plan, wide, kv, out=wide[:11])
    assert torch.equal(wide[:10], want)
    for held in (q.clone(), packed[:, 0]):
        attn.run(plan, held, kv, out=held)
        assert torch.equal(held, want)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(1, 4, DIM).expand(10, 4, DIM),
        torch.zeros(10, 1, DIM).expand(10, 4, DIM),
        torch.zeros(2000).as_strided((10, 4, DIM), (4 * DIM - 1, DIM, 1)),
        torch.zeros(2000).as_strided((10, 4, DIM), (DIM, 9 * DIM, 1)),
    ],
)
def test_an_out_over_itself(out):
    attn, kv, plan, q = square()
    with pytest.raises(ArgumentError, match="do not overlap") as caught:
        attn.run(plan, q, kv, out=out)
    assert caught.value.argument == "out"
    assert not out.any()


@pytest.mark.parametrize("where", ["k", "v", "sinks", "alibi_slopes"])
def test_an_out_over_what_is_read(where):
    attn, kv, plan, q = square()
    layer, memory = Layer(), torch.zeros(10 * 4 * DIM)
    if where in ("k", "v"):
        memory = getattr(kv, where)
    else:
        layer = Layer(**{where: memory[-4:]})
    before = kv.k.clone(), kv.v.clone(), memory.clone()
    with pytest.raises(ArgumentError, match="inside the") as caught:
        attn.run(plan, q, kv, layer, out=memory.as_strided((10, 4, DIM), (4 * DIM, DIM, 1)))
    assert caught.value.argument == "out"
    same(before, (kv.k, kv.v, memory))


def test_inference_tensors_outside_inference_mode():
    attn, kv, plan, q = square()
    with torch.inference_mode():
        out, frozen = torch.empty(10, 4, DIM), attn.new_cache(num_layers=1, num_pages=PAGES)[0]
        attn.run(plan, q, kv, out=out)
        want = out.clone()
        attn.write(plan, frozen, q[:, :2], q[:, 2:])
    with pytest.raises(ArgumentError, match="inference") as caught:
        attn.run(plan, q, kv, out=out)
    assert caught.value.argument == "out"
    assert torch.equal(out, want)
    with pytest.raises(ArgumentError, match="inference") as caught:
        attn.write(plan, frozen, q[:, :2], q[:, 2:])
    assert caught.value.argument == "cache"


# Arguments of another kind


@pytest.mark.parametrize("value", [0, False, "", [], (), {}, 5, "auto", object])
@pytest.mark.parametrize("name", ["cache", "limits", "features", "options"])
def test_parts_of_another_kind(name, value):
    shape = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM)
    with pytest.raises(ArgumentError) as caught:
        pageant.Attention(shape, **{name: value})
    assert caught.value.argument == name
    if name != "limits":
        verdict = pageant.supports(shape, **{name: value})
        assert (verdict.reason, verdict.argument) == (str(caught.value), name)
    with pytest.raises(ArgumentError) as caught:
        pageant.Attention(value)
    assert caught.value.argument == "shape"


@pytest.mark.parametrize("value", [0, False, "", [], 5, "plain", Layer])
def test_layers_plans_batches_and_caches_of_another_kind(value):
    attn, kv, plan, q = square()
    for name, call in (
        ("batch", lambda: attn.plan(value)),
        ("plan", lambda: attn.update(value)),
        ("plan", lambda: attn.run(value, q, kv)),
        ("plan", lambda: attn.write(value, kv, q[:, :2], q[:, :2])),
        ("cache", lambda: attn.run(plan, q, value)),
        ("cache", lambda: attn.write(plan, value, q[:, :2], q[:, :2])),
        ("layer", lambda: attn.run(plan, q, kv, value)),
        ("layer", lambda: attn.write(plan, kv, q[:, :2], q[:, :2], value)),
        ("q", lambda: attn.run(plan, value, kv)),
        ("out", lambda: attn.run(plan, q, kv, out=value)),
        ("k", lambda: attn.run(plan, q, kv, k=value, v=q[:, :2])),
        ("v", lambda: attn.run(plan, q, kv, k=q[:, :2], v=value)),
        ("out_scales", lambda: attn.run(plan, q, kv, out_scales=value)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == name
    if value is not False:
        with pytest.raises(ArgumentError) as caught:
            attn.run(plan, q, kv, return_lse=value)
        assert caught.value.argument == "return_lse"


def test_none_is_no_batch_plan_or_cache():
    attn, kv, plan, q = square()
    for name, call in (
        ("batch", lambda: attn.plan(None)),
        ("plan", lambda: attn.update(None)),
        ("plan", lambda: attn.run(None, q, kv)),
        ("cache", lambda: attn.run(plan, q, None)),
        ("q", lambda: attn.run(plan, None, kv)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == name


def test_unpaged_keys_and_values_are_those_of_the_new_tokens():
    attn, kv, plan, q = square()
    want = attn.run(plan, q, kv)
    assert torch.equal(attn.run(plan, q, kv, k=q[:, :2], v=q[:, 2:]), want)
    for change, name in (({"k": q[:9, :2]}, "k"), ({"v": q}, "v"), ({"v": q[:, 2:].half()}, "v")):
        with pytest.raises(ArgumentError) as caught:
            attn.run(plan, q, kv, **{"k": q[:, :2], "v": q[:, 2:], **change})
        assert caught.value.argument == name


def test_the_decode_threshold_is_the_explanations(monkeypatch):
    """A kernel that takes no drafts leaves requests with drafts to the prefill kernel."""
    assert square(phase="decode")[2].split.num_decodes == 3
    monkeypatch.setattr(pageant.Explanation, "decode_threshold", property(lambda self: 2))
    attn, _, _, _ = square(phase="decode")
    plan = attn.plan(Batch.from_lengths([1, 2, 3, 1], [4, 4, 4, 4], [[0]] * 4, PAGE))
    assert plan.split == (2, 2, 3, 4)


# Numbers beyond every machine


HUGE = (2**31, 2**40, 2**63, 10**30)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    ("part", "name", "argument"),
    [
        ("shape", "num_q_heads", "q_heads"),
        ("shape", "num_kv_heads", "q_heads"),
        ("cache", "page_size", "page_size"),
        ("limits", "max_requests", "max_requests"),
        ("limits", "max_tokens", "max_tokens"),
        ("limits", "max_seq_len", "max_seq_len"),
        ("features", "windows", "window"),
        ("options", "speculative_tokens", "spec"),
        ("options", "plan_slots", "plan_slots"),
        ("options", "debug_splits", "debug_splits"),
    ],
)
def test_huge_numbers(part, name, argument, value):
    parts = {
        "shape": pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM),
        "cache": pageant.CacheSpec(),
        "limits": pageant.Limits(),
        "features": Features(),
        "options": pageant.Options(),
    }
    parts[part] = replace(parts[part], **{name: (value,) if name == "windows" else value})
    with pytest.raises(ArgumentError, match=r"; allowed: .*to \d+|multiple") as caught:
        pageant.Attention(**parts)
    assert caught.value.argument == argument
    if part != "limits":
        verdict = pageant.supports(**{k: v for k, v in parts.items() if k != "limits"})
        assert (verdict.reason, verdict.argument) == (str(caught.value), argument)


def test_numbers_within_their_bounds_that_no_memory_holds():
    shape = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM)
    limits = pageant.Limits(max_requests=LARGEST["max_requests"])
    options = pageant.Options(
        debug_splits=LARGEST["debug_splits"], speculative_tokens=LARGEST["speculative_tokens"]
    )
    with pytest.raises(ArgumentError, match="fit in memory") as caught:
        pageant.Attention(shape, limits=limits, options=options)
    assert caught.value.argument == "limits"
    cache = pageant.CacheSpec(page_size=LARGEST["page_size"])
    attn = pageant.Attention(shape, cache)
    with pytest.raises(ArgumentError, match="fits in memory; this takes") as caught:
        attn.new_cache(num_layers=1, num_pages=LARGEST["num_pages"])
    assert caught.value.argument == "num_pages"


@pytest.mark.parametrize("value", [*HUGE, 0, -1, True, 1.0, "8", None])
@pytest.mark.parametrize("name", ["num_layers", "num_pages"])
def test_sizes_of_a_cache(name, value):
    attn = square()[0]
    with pytest.raises(ArgumentError, match=r"a whole number from 1 to \d+") as caught:
        attn.new_cache(**{"num_layers": 1, "num_pages": 1, name: value})
    assert caught.value.argument == name
    if name == "num_layers":
        with pytest.raises(ArgumentError) as caught:
            attn.pages_for(10**9, value)
        assert caught.value.argument == name


def test_limits_at_their_bounds_cost_nothing_in_advance():
    shape = pageant.Shape(num_q_heads=1, num_kv_heads=1, head_dim=DIM, dtype=torch.float32)
    names = ("max_requests", "max_seq_len", "max_cached_tokens")
    limits = pageant.Limits(**{name: LARGEST[name] for name in names})
    attn = pageant.Attention(shape, pageant.CacheSpec(page_size=PAGE), limits)
    plan = attn.plan(batch())
    assert (
        attn.run(plan, torch.zeros(10, 1, DIM), attn.new_cache(num_layers=1, num_pages=10)[0])[
            0, 0, 0
        ]
        == 0
    )


# Quantised outputs

E4M3 = torch.float8_e4m3fn
BLOCKS = 4 * 32 // 16


def quantising(kernels="auto", phase="prefill", dtype=torch.float32, format="auto"):
    """As `attention`, for layers of every output format; values of two blocks a head."""
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM, v_head_dim=32, dtype=dtype),
        pageant.CacheSpec(format=format, page_size=PAGE),
        pageant.Limits(max_requests=8, max_tokens=64, max_seq_len=64),
        replace(EVERYTHING, out_formats=("model", "fp8_e4m3", "nvfp4")),
        pageant.Options(kernels=kernels, speculative_tokens=7 if phase == "decode" else 0),
    )


def room_for_scales(rows=10):
    return torch.full((rows, BLOCKS), 0x55, dtype=torch.uint8).view(E4M3)


def stored(out, scales, out_scale):
    """What a quantised output stands for."""
    if scales is None:
        return ops.dequantize(out, None, "fp8_e4m3", out_scale)
    return ops.dequantize(out, scales[: len(out)].unflatten(1, (4, 2)), "nvfp4") / out_scale


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.zeros(10, 4, 16), "torch.float32"),
        (torch.zeros(10, 4, 16).to(E4M3), "float8"),
        (torch.zeros(10, 4, 32, dtype=torch.uint8), "32"),
        (torch.zeros(9, 4, 16, dtype=torch.uint8), "9"),
        (torch.zeros(10, 64, dtype=torch.uint8), "64"),
        (torch.zeros(10, 16, 4, dtype=torch.uint8).mT, "stride"),
        (torch.zeros(1, 4, 16, dtype=torch.uint8).expand(10, 4, 16), "overlap"),
        ([1], "1"),
    ],
)
def test_an_out_that_is_no_nvfp4(out, said):
    attn = quantising()
    with pytest.raises(ArgumentError, match=said) as caught:
        attn.run(
            attn.plan(batch()),
            queries(),
            filled(attn),
            Layer(out_format="nvfp4"),
            out=out,
            out_scales=room_for_scales(),
        )
    assert caught.value.argument == "out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e5m2])
def test_an_out_that_is_no_fp8(dtype):
    attn = quantising()
    out = torch.zeros(10, 4, 32).to(dtype)
    with pytest.raises(ArgumentError, match="float8_e4m3fn") as caught:
        attn.run(attn.plan(batch()), queries(), filled(attn), Layer(out_format="fp8_e4m3"), out=out)
    assert caught.value.argument == "out"


def tiles(rows, columns, start_row=0):
    return pageant.SwizzledScales(torch.zeros(rows, columns).to(E4M3), start_row)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (None, "SwizzledScales"),
        (1.0, "a tensor of"),
        (torch.zeros(10, BLOCKS), "float32"),
        (torch.zeros(10, BLOCKS, dtype=torch.uint8), "uint8"),
        (room_for_scales()[:9], "at least 10"),
        (room_for_scales()[:, :4], "at least 10"),
        (torch.zeros(128, BLOCKS + 4).to(E4M3), "SwizzledScales"),
        (room_for_scales().view(10, 4, 2), "2 dimensions"),
        (torch.zeros(BLOCKS, 10).to(E4M3).T, "stride"),
        (room_for_scales()[:1].expand(10, BLOCKS), "overlap"),
        (pageant.SwizzledScales(torch.zeros(128, BLOCKS)), "float32"),
        (pageant.SwizzledScales(None), "None"),
        (tiles(127, BLOCKS), "a multiple of 128"),
        (tiles(128, BLOCKS + 4), "128, 8"),
        (pageant.SwizzledScales(torch.zeros(256, BLOCKS).to(E4M3)[::2]), "contiguous"),
        (tiles(0, BLOCKS), "start_row"),
        (tiles(128, BLOCKS, 119), "start_row"),
        (tiles(128, BLOCKS, -1), "start_row"),
        (tiles(128, BLOCKS, 1.0), "start_row"),
        (tiles(128, BLOCKS, True), "start_row"),
        (tiles(128, BLOCKS, None), "start_row"),
    ],
)
def test_wrong_out_scales(scales, said):
    attn = quantising()
    with pytest.raises(ArgumentError, match=said) as caught:
        attn.run(
            attn.plan(batch()),
            queries(),
            filled(attn),
            Layer(out_format="nvfp4"),
            out_scales=scales,
        )
    assert caught.value.argument == "out_scales"


@pytest.mark.parametrize("where", ["out", "q", "cache", "layer"])
def test_out_scales_over_what_is_read_or_written(where):
    attn = quantising()
    kv, q, sinks = filled(attn), queries(), torch.zeros(40)
    out = torch.zeros(10, 4, 16, dtype=torch.uint8)
    memory = {"out": out, "q": q, "cache": kv.v, "layer": sinks}[where]
    scales = memory.view(torch.uint8).as_strided((10, BLOCKS), (BLOCKS, 1)).view(E4M3)
    layer = Layer(out_format="nvfp4", sinks=sinks[:4])
    with pytest.raises(ArgumentError, match="memory") as caught:
        attn.run(attn.plan(batch()), q, kv, layer, out=out, out_scales=scales)
    assert caught.value.argument == "out_scales"


@pytest.mark.parametrize("scale", [torch.ones(2), 0.0, -1.0, math.nan, math.inf, "1", None, True])
def test_wrong_scales_of_outputs(scale):
    attn = quantising()
    plan, kv = attn.plan(batch()), filled(attn)
    with pytest.raises(ArgumentError) as caught:
        attn.run(plan, queries(), kv, Layer(out_format="fp8_e4m3", out_scale=scale))
    assert caught.value.argument == "layer.out_scale"


@pytest.mark.parametrize("v_head_dim", [24, 40, 72])
def test_nvfp4_outputs_have_whole_blocks(v_head_dim):
    shape = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=v_head_dim)
    features = Features(out_formats=("model", "nvfp4"))
    for device in ("cpu", "sm90", "sm100"):
        verdict = pageant.supports(shape, features=features, device=device)
        assert not verdict.ok
        assert verdict.argument == "out_formats"
        assert "multiple of 16" in verdict.reason
    with pytest.raises(ArgumentError, match="multiple of 16") as caught:
        pageant.Attention(shape, features=features)
    assert caught.value.argument == "out_formats"
    attn = pageant.Attention(shape, features=Features(out_formats=("fp8_e4m3",)))
    assert attn.explain().fused_out_formats == ("fp8_e4m3",)
    whole = pageant.Attention(replace(shape, v_head_dim=48), features=features)
    assert whole.explain().fused_out_formats == ("fp8_e4m3", "nvfp4")


@each_kernel
@each_phase
@each_dtype
@pytest.mark.parametrize("format", ["auto", "fp8_e4m3", "nvfp4"])
def test_outputs_that_are_made(kernels, phase, dtype, format):
    """An output made here has the rows of q; its padding is 0, that of the scales left alone."""
    attn = quantising(kernels, phase, dtype, format)
    kv = attn.new_cache(num_layers=1, num_pages=PAGES)[0]
    step, q = batch(num_tokens=13), queries(dtype, rows=16)
    plan = attn.plan(step)
    attn.write(plan, kv, random(10, 2, DIM, dtype=dtype), random(10, 2, 32, dtype=dtype))
    want, want_lse = attn.run(plan, q, kv, return_lse=True)
    out, lse = attn.run(plan, q, kv, Layer(out_format="fp8_e4m3", out_scale=0.01), return_lse=True)
    assert (out.dtype, list(out.shape)) == (E4M3, [16, 4, 32])
    assert torch.equal(lse, want_lse)
    assert_close(stored(out, None, 0.01), want.float(), 2**-4)
    assert (out[10:].view(torch.uint8) == 0).all()
    scales = room_for_scales(14)
    layer = Layer(out_format="nvfp4", out_scale=100.0)
    out, lse = attn.run(plan, q, kv, layer, out_scales=scales, return_lse=True)
    assert (out.dtype, list(out.shape)) == (torch.uint8, [16, 4, 16])
    assert torch.equal(lse, want_lse)
    assert_close(stored(out[:10], scales, 100.0), want[:10].float(), 0.12)
    assert (out[10:] == 0).all()
    assert (scales[10:].view(torch.uint8) == 0x55).all()


@each_kernel
@each_phase
@pytest.mark.parametrize("out_format", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("format", ["auto", "fp8_e4m3"])
def test_scales_of_outputs_are_read_each_time(kernels, phase, out_format, format):
    """Every form of a scale means the same, and a tensor may change between two runs."""
    attn = quantising(kernels, phase, format=format)
    kv, q, plan = filled(attn), (queries() / 0.25).to(E4M3), attn.plan(batch())
    live = torch.tensor(1.0)

    def bytes_of(out_scale):
        scales = room_for_scales() if out_format == "nvfp4" else None
        layer = Layer(q_scale=0.25, out_format=out_format, out_scale=out_scale)
        out = attn.run(plan, q, kv, layer, out_scales=scales)
        parts = (out,) if scales is None else (out, scales)
        return tuple(bytes(part.view(torch.uint8).numpy()) for part in parts)

    answers = set()
    for value in (1.0, 0.3, 5.0):
        live.fill_(value)
        first = bytes_of(live)
        assert all(bytes_of(form) == first for form in forms(value))
        answers.add(first)
    assert len(answers) == 3


@each_kernel
@each_phase
def test_layers_that_differ_in_everything(kernels, phase):
    """Layers of one plan, each with an output format of its own."""
    attn = quantising(kernels, phase)
    kv, step, q = filled(attn), batch(), queries()
    plan = attn.plan(step)
    formats = ("model", "fp8_e4m3", "nvfp4", "fp8_e4m3", "model", "nvfp4")
    layers = (
        Layer(),
        Layer(window=2, scale=0.7),
        Layer(window=5, soft_cap=2.0),
        Layer(sinks=SINKS, soft_cap=0.5),
        Layer(window=5, alibi_slopes=SLOPES, sinks=SINKS),
        Layer(window=2, alibi_slopes=SLOPES, soft_cap=1.0, sinks=SINKS, scale=0.1),
    )
    for plain, out_format in (*zip(layers, formats, strict=True), (layers[0], "nvfp4")):
        want, want_lse = expected(attn, kv, step, q, plain)
        out_scale = 400.0 if out_format == "nvfp4" else 0.01
        layer = replace(plain, out_format=out_format, out_scale=out_scale)
        scales = room_for_scales() if out_format == "nvfp4" else None
        out, lse = attn.run(plan, q, kv, layer, out_scales=scales, return_lse=True)
        assert_close(lse, want_lse, 1e-5)
        if out_format == "model":
            assert_close(out, want, 1e-5)
        else:
            got = stored(out, scales, out_scale)
            assert_close(got, want, 0.12 if out_format == "nvfp4" else 2**-4)


@each_kernel
@each_phase
def test_sinks_refreshed_in_place(kernels, phase):
    """A reload of the weights writes new sinks where the old ones were; no plan is made anew."""
    attn = attention(kernels, phase)
    kv, step, q = filled(attn), batch(), queries()
    sinks, plan = SINKS.clone(), attn.plan(step)
    layer, answers = Layer(sinks=sinks), []
    for values in (SINKS, -3 * SINKS, SINKS + 4.0):
        sinks.copy_(values)
        want, want_lse = expected(attn, kv, step, q, Layer(sinks=values))
        out, lse = attn.run(plan, q, kv, layer, return_lse=True)
        assert_close(out, want, 1e-5)
        assert_close(lse, want_lse, 1e-5)
        answers.append(out)
    assert not torch.allclose(answers[0], answers[1])
    assert not torch.allclose(answers[0], answers[2])


def test_an_out_in_the_place_of_an_fp8_query():
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        features=Features(out_formats=("fp8_e4m3",)),
    )
    kv, q, plan = filled(attn), queries().to(E4M3), attn.plan(batch())
    layer = Layer(out_format="fp8_e4m3", out_scale=0.02)
    want = attn.run(plan, q.clone(), kv, layer)
    assert attn.run(plan, q, kv, layer, out=q) is q
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    memory = queries(rows=11).to(E4M3)
    with pytest.raises(ArgumentError, match="q's memory") as caught:
        attn.run(plan, memory[:10], kv, layer, out=memory[1:])
    assert caught.value.argument == "out"


def test_quantised_outputs_with_an_attention_made_in_inference_mode():
    with torch.inference_mode():
        attn = quantising()
    kv, plan = filled(attn), attn.plan(batch())
    out = attn.run(plan, queries(), kv, Layer(out_format="fp8_e4m3"))
    with torch.inference_mode():
        again = attn.run(plan, queries(), kv, Layer(out_format="fp8_e4m3"))
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))


def test_rows_wait_in_the_workspace():
    rows = quantising().workspace_bytes - attention().workspace_bytes
    assert rows >= 64 * 4 * 32 * 4
    few = pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=DIM, v_head_dim=32)
    assert pageant.Attention(few).workspace_bytes < 8192 * 4 * 32 * 4


@pytest.mark.parametrize("out_format", ["fp8_e4m3", "nvfp4"])
def test_ops_with_quantised_outputs(out_format):
    attn = quantising()
    kv, step, q = filled(attn), batch(), queries()
    layer = Layer(out_format=out_format, out_scale=3.0, sinks=SINKS)
    scales = [room_for_scales() if out_format == "nvfp4" else None for _ in range(2)]
    want = attn.run(attn.plan(step), q, kv, layer, out_scales=scales[0])
    out = torch.empty_like(want)
    got = ops.paged_attention(
        q,
        kv.k,
        kv.v,
        step.query_start_loc,
        step.seq_lens,
        step.page_table,
        layer=layer,
        out=out,
        out_scales=scales[1],
    )
    assert got is out
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    if scales[0] is not None:
        assert torch.equal(*(x.view(torch.uint8) for x in scales))
