"""Functional forms: the same answers as an Attention, without keeping one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant import ArgumentError, Layer, ops
from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
from pageant.kernels import reference
from pageant.plan.op_inputs import SCALE_NAMES
from pageant.select.choose import STEPS, load_step
from tests.inputs import BOUNDS, Case, assert_close, build
from tests.reports.scene import each_dtype, each_kernel

MODEL_FORMAT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def case(**others):
    fields = {"lengths": ((1, 9), (3, 14), (0, 0), (5, 5)), **others}
    return Case(seed=12, v_head_dim=24, **fields)


COMBINATIONS = (
    {},
    {"window": 5, "soft_cap": 2.0, "sinks": True},
    {"alibi": True, "causal": False, "memory": "BLNHC"},
    {"causal": (True, False, True, False), "window": 3},
    {"format": "fp8_e4m3", "scales": True, "page_size": 1},
    {"format": "fp8_e5m2", "scales": True, "drafts": "parents", "memory": "strided"},
    {"drafts": "mask", "alibi": True, "sinks": True},
    {"cross": True, "soft_cap": 2.0, "padding": 2},
)


@each_kernel
@each_dtype
@pytest.mark.parametrize("others", COMBINATIONS)
def test_paged_attention_equals_an_attention(kernels, dtype, others):
    others = {"format": MODEL_FORMAT[dtype], **others}
    problem = build(case(dtype=dtype, **others), kernels)
    want_out, want_lse = problem.run()
    batch, real = problem.batch, len(problem.expected_out)
    fields = {
        name: getattr(batch, name)
        for name in ("causal", "draft_mask", "draft_parents", "encoder_seq_lens")
    }
    out, lse = ops.paged_attention(
        problem.q,
        problem.cache.k,
        problem.cache.v,
        batch.query_start_loc,
        batch.seq_lens,
        batch.page_table,
        layer=problem.layer,
        format=problem.attn.format.name,
        kernels=kernels,
        return_lse=True,
        **fields,
    )
    assert torch.equal(out[:real], want_out)
    assert torch.equal(lse[:real], want_lse)
    assert_close(out[:real], problem.expected_out, BOUNDS[dtype])


@each_kernel
@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention_equals_torch(kernels, dtype, causal):
    """Keys one request after another; longer, as long, shorter than the query, and none."""
    lens = [(3, 9), (4, 4), (5, 2), (1, 0), (0, 6), (1, 1)]
    rng = torch.Generator().manual_seed(3)
    queries, keys = sum(m for m, _ in lens), sum(n for _, n in lens)
    q = torch.randn(queries, 4, 16, generator=rng).to(dtype)
    k, v = (torch.randn(keys, 2, dim, generator=rng).to(dtype) for dim in (16, 24))
    starts = [
        ints([0, *torch.tensor(column).cumsum(0).tolist()]) for column in zip(*lens, strict=True)
    ]
    out, lse = ops.ragged_attention(
        q, k, v, *starts, causal=causal, kernels=kernels, return_lse=True
    )
    assert out.dtype == dtype
    for request, (m, n) in enumerate(lens):
        rows = slice(int(starts[0][request]), int(starts[0][request]) + m)
        span = slice(int(starts[1][request]), int(starts[1][request]) + n)
        mask = torch.ones(m, n, dtype=torch.bool)
        if causal:
            mask = mask.tril(n - m)
        seen = mask.any(-1)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[rows].double().transpose(0, 1),
            k[span].double().transpose(0, 1).repeat_interleave(2, 0),
            v[span].double().transpose(0, 1).repeat_interleave(2, 0),
            attn_mask=mask,
        ).transpose(0, 1)
        assert_close(out[rows][seen], want[seen], BOUNDS[dtype])
        assert (out[rows][~seen] == 0).all()
        assert (lse[rows][~seen] == -math.inf).all()


@each_kernel
def test_ragged_attention_takes_what_paged_attention_takes(kernels):
    """One request; a window, a cap and sinks, against the definition."""
    layer = Layer(window=3, soft_cap=2.0, sinks=torch.tensor([0.5, -1.0]))
    rng = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(count, 2, 16, generator=rng) for count in (4, 7, 7))
    got = ops.ragged_attention(q, k, v, ints([0, 4]), ints([0, 7]), layer=layer, kernels=kernels)
    params = pageant.plan.inputs.LayerParams(
        score_scale=0.25, window=3, soft_cap=2.0, sinks=layer.sinks
    )
    mask = reference.visible(4, 7, causal=True, window=3, draft=None)
    want, _ = reference.attend(q.double(), k.double(), v.double(), mask, params)
    assert_close(got, want, 1e-5)


@each_kernel
def test_ragged_attention_without_anything(kernels):
    nothing = torch.zeros(0, 2, 16)
    out, lse = ops.ragged_attention(
        nothing, nothing, nothing, ints([0]), ints([0]), kernels=kernels, return_lse=True
    )
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)
    out = ops.ragged_attention(
        torch.ones(2, 2, 16), nothing, nothing, ints([0, 2]), ints([0, 0]), kernels=kernels
    )
    assert (out == 0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_write_then_attend(format):
    """Pages of bytes for formats of 8 bits and fewer: the format says how to read them."""
    fmt = FORMATS[format]
    dtype = fmt.element_dtype if fmt.bits > 8 else torch.uint8
    k_cache, v_cache = (torch.zeros(3, 4, 1, 16 // fmt.per_byte, dtype=dtype) for _ in "kv")
    stored = {}
    if fmt.scale_dtype is not None:
        shape = (3, 4, 1, 1) if fmt.scale_block else (3, 4, 1)
        stored = {name: torch.zeros(shape, dtype=fmt.scale_dtype) for name in SCALE_NAMES}
    v = torch.tensor([0.0, 3.0, 6.0])[:, None, None].expand(3, 1, 16)
    slots = torch.tensor([11, 0, 1])
    scales = (0.5, torch.tensor(2.0))
    ops.write_pages(
        torch.ones(3, 1, 16), v, k_cache, v_cache, slots, format=format, scales=scales, **stored
    )
    v_scales = stored["v_scales"][0, 1] if stored else None
    written = ops.dequantize(v_cache[0, 1], v_scales, format, 2.0)
    torch.testing.assert_close(written, torch.full((1, 16), 6.0), rtol=1e-6, atol=0)
    layer = Layer(k_scale=0.5, v_scale=torch.tensor(2.0))
    out = ops.paged_attention(
        torch.zeros(1, 2, 16),
        k_cache,
        v_cache,
        ints([0, 1]),
        ints([6]),
        ints([[2, 0]]),
        layer=layer,
        format=format,
        **stored,
    )
    # Keys 0 to 2 were never written and are zero; then come 0, 3 and 6.
    torch.testing.assert_close(out, torch.full((1, 2, 16), 1.5), rtol=1e-5, atol=0)


def test_write_pages_is_the_attentions():
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(format="fp8", page_size=4),
    )
    kv = attn.new_cache(num_layers=2, num_pages=3)
    rng = torch.Generator().manual_seed(1)
    k, v = torch.randn(5, 2, 16, generator=rng), torch.randn(5, 2, 16, generator=rng)
    batch = pageant.Batch.from_lengths([2, 3], [6, 3], [[1, 2], [0]], 4)
    attn.write(attn.plan(batch), kv[0], k, v, Layer(k_scale=0.1, v_scale=0.2))
    ops.write_pages(k, v, kv[1].k, kv[1].v, batch.slot_mapping, format="fp8", scales=(0.1, 0.2))
    for one, other in ((kv[0].k, kv[1].k), (kv[0].v, kv[1].v)):
        assert one.view(torch.uint8).any()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_no_kernel_by_that_name():
    with pytest.raises(ArgumentError) as caught:
        ops.paged_attention(
            torch.zeros(1, 1, 16),
            torch.zeros(1, 4, 1, 16),
            torch.zeros(1, 4, 1, 16),
            ints([0, 1]),
            ints([1]),
            ints([[0]]),
            kernels="magic",
        )
    assert caught.value.argument == "kernels"


STATES = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(0, 2**20))


@given(STATES, st.booleans(), st.sampled_from(tuple(BOUNDS)))
def test_merge_equals_the_reference(sizes, with_sinks, dtype):
    """Any number of parts, some rows of them empty, lse far apart."""
    parts, rows, heads, seed = sizes
    rng = torch.Generator().manual_seed(seed)
    outs = [torch.randn(rows, heads, 16, generator=rng).to(dtype) for _ in range(parts)]
    spread = 2 if with_sinks else 20  # a sink far above every lse leaves less than float16 holds
    lses = [torch.randn(rows, heads, generator=rng) * spread for _ in range(parts)]
    for lse in lses:
        lse[torch.rand(rows, heads, generator=rng) < 0.3] = -math.inf
        lse[torch.rand(rows, heads, generator=rng) < 0.1] = math.inf
    sinks = torch.randn(heads, generator=rng) * 2 if with_sinks else None
    out, lse = ops.merge_states(outs, lses, sinks)
    want_out, want_lse = reference.merge_states(outs, lses, sinks)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(out, want_out, BOUNDS[dtype])
    assert_close(lse, want_lse, 1e-5)


@each_dtype
def test_merge_by_hand(dtype):
    """Weights 1 and 3 of a whole of 4; then a sink of ln 4 halves the output, not the lse."""
    outs = [torch.full((1, 1, 2), 8.0, dtype=dtype), torch.full((1, 1, 2), 4.0, dtype=dtype)]
    lses = [torch.zeros(1, 1), torch.full((1, 1), math.log(3))]
    for sinks, want in ((None, 5.0), (torch.tensor([math.log(4)]), 2.5)):
        out, lse = ops.merge_states(outs, lses, sinks)
        torch.testing.assert_close(out.float(), torch.full((1, 1, 2), want), rtol=1e-6, atol=0)
        torch.testing.assert_close(lse, torch.full((1, 1), math.log(4)), rtol=1e-6, atol=0)


def test_merging_splits_of_one_attention_is_the_attention():
    rng = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(count, 2, 16, generator=rng) for count in (2, 40, 40))
    sinks = torch.tensor([0.3, 2.0])

    def part(first, last, layer=None):
        return ops.ragged_attention(
            q,
            k[first:last],
            v[first:last],
            ints([0, 2]),
            ints([0, last - first]),
            layer=layer,
            causal=False,
            return_lse=True,
        )

    want, want_lse = part(0, 40, Layer(sinks=sinks))
    pieces = [part(first, last) for first, last in ((0, 1), (1, 7), (7, 7), (7, 40))]
    out, lse = ops.merge_states(*zip(*pieces, strict=True), sinks=sinks)
    assert_close(out, want, 1e-5)
    assert_close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("starts", [[0, 9], [7, 0], [0, 8, 7]])
def test_ragged_keys_that_are_not_there(starts):
    starts = torch.tensor(starts, dtype=torch.int32)
    queries = torch.arange(len(starts), dtype=torch.int32)
    q, k = torch.zeros(len(starts) - 1, 2, 16), torch.zeros(7, 1, 16)
    with pytest.raises(pageant.ArgumentError, match="never fall") as caught:
        pageant.ops.ragged_attention(q, k, k, queries, starts)
    assert caught.value.argument == "key_start_loc"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"k": torch.ones(1, 1, 1)}, "k"),
        ({"v": torch.ones(1, 2, 16)}, "v"),
        ({"slot_mapping": torch.tensor([20])}, "batch.slot_mapping"),
        ({"v_cache": torch.zeros(4, 4, 2, 24)}, "v"),
        ({"k_cache": torch.zeros(5, 4, 2, 16).bfloat16()}, "k"),
        ({"scales": (1.0, "a")}, "v_scale"),
    ],
)
def test_writing_what_does_not_fit(change, name):
    given = {
        "k": torch.ones(1, 2, 16),
        "v": torch.ones(1, 2, 24),
        "k_cache": torch.zeros(5, 4, 2, 16),
        "v_cache": torch.zeros(5, 4, 2, 24),
        "slot_mapping": torch.tensor([3]),
        **change,
    }
    with pytest.raises(pageant.ArgumentError) as caught:
        pageant.ops.write_pages(**given)
    assert caught.value.argument == name
    assert not given["k_cache"].any()
    assert not given["v_cache"].any()


# Arguments of another kind, or that do not fit


def paged(**others):
    """Arguments of a call that is right: two requests of one and two new tokens."""
    return {
        "q": torch.zeros(3, 2, 16),
        "k_cache": torch.ones(4, 4, 1, 16),
        "v_cache": torch.ones(4, 4, 1, 24),
        "query_start_loc": ints([0, 1, 3]),
        "seq_lens": ints([5, 2]),
        "page_table": ints([[0, 1], [2, 0]]),
        **others,
    }


def ragged(**others):
    return {
        "q": torch.zeros(3, 2, 16),
        "k": torch.ones(7, 1, 16),
        "v": torch.ones(7, 1, 24),
        "query_start_loc": ints([0, 1, 3]),
        "key_start_loc": ints([0, 5, 7]),
        **others,
    }


def merged(**others):
    return {
        "outs": [torch.ones(3, 2, 16), torch.ones(3, 2, 16)],
        "lses": [torch.zeros(3, 2), torch.zeros(3, 2)],
        "sinks": torch.zeros(2),
        "out": torch.full((3, 2, 16), 7.0),
        **others,
    }


CALLS = {
    "paged": (ops.paged_attention, paged),
    "ragged": (ops.ragged_attention, ragged),
    "merge": (ops.merge_states, merged),
}
NO_TENSORS = [None, 3, "q", [[1.0]], (), {}, object()]
WRONG = [
    lambda x: x.double() if x.is_floating_point() else x.long(),
    lambda x: x.bool(),
    lambda x: x.to(torch.complex64),
    lambda x: x[None],
    lambda x: x[..., 0],
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x.float().requires_grad_(),
]


@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call in ("paged", "ragged") for name in CALLS[call][1]()],
)
def test_tensors_of_another_kind(call, name):
    function, arguments = CALLS[call]
    assert function(**arguments()).shape == (3, 2, 24)
    wrong = [*NO_TENSORS, *(change(arguments()[name]) for change in WRONG)]
    for value in wrong:
        with pytest.raises(pageant.ArgumentError) as caught:
            function(**arguments(**{name: value}))
        assert caught.value.argument == name
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "change", "argument"),
    [
        *((call, {"foo": 1}, "foo") for call in ("paged", "ragged")),
        *((call, {"slot_mapping": None}, "slot_mapping") for call in ("paged", "ragged")),
        ("ragged", {"page_table": ints([[0]])}, "page_table"),
        ("ragged", {"seq_lens": ints([5, 2])}, "seq_lens"),
        *((call, {"layer": value}, "layer") for call in ("paged", "ragged") for value in (0, [])),
        *((call, {"return_lse": 1}, "return_lse") for call in ("paged", "ragged")),
        *((call, {"kernels": value}, "kernels") for call in ("paged", "ragged") for value in (0,)),
        *((call, {"format": value}, "format") for call in ("paged", "ragged") for value in (0, [])),
        *((call, {"format": "fp9"}, "cache") for call in ("paged", "ragged")),
        *((call, {"causal": 3}, "batch.causal") for call in ("paged", "ragged")),
        *((call, {"draft_mask": [1]}, "batch.draft_mask") for call in ("paged", "ragged")),
        *((call, {"encoder_seq_lens": 5}, "encoder_seq_lens") for call in ("paged", "ragged")),
        ("paged", {"q": torch.zeros(3, 2, 20)}, "k_cache"),
        ("paged", {"k_cache": torch.ones(4, 4, 1, 16).half()}, "k_cache"),
        ("paged", {"v_cache": torch.ones(4, 4, 1, 24).half()}, "v_cache"),
        ("paged", {"v_cache": torch.ones(4, 4, 2, 24)}, "v_cache"),
        ("paged", {"v_cache": torch.ones(3, 4, 1, 24)}, "v_cache"),
        ("paged", {"k_cache": torch.ones(4, 4, 1, 32)[..., ::2]}, "k_cache"),
        ("paged", {"k_cache": torch.ones(4, 0, 1, 16), "v_cache": torch.ones(4, 0, 1, 24)}, None),
        ("paged", {"query_start_loc": ints([0, 1])}, "batch.query_start_loc"),
        ("paged", {"query_start_loc": ints([3, 0, 0])}, "batch.query_start_loc[0]"),
        ("paged", {"seq_lens": ints([-5, -2])}, "batch.seq_lens[0]"),
        ("paged", {"page_table": ints([[0, 9], [2, 0]])}, "batch.page_table[0]"),
        ("ragged", {"v": torch.ones(6, 1, 24)}, "v"),
        ("ragged", {"k": torch.ones(7, 1, 16).half()}, "k"),
        ("ragged", {"key_start_loc": ints([])}, "key_start_loc"),
        ("ragged", {"key_start_loc": ints([-1, 5, 7])}, "key_start_loc"),
        ("merge", {"outs": torch.ones(2, 3, 2, 16)}, "outs"),
        ("merge", {"lses": torch.zeros(2, 3, 2)}, "lses"),
        ("merge", {"outs": None}, "outs"),
        ("merge", {"outs": [], "lses": []}, "outs"),
        ("merge", {"outs": [[1.0], [2.0]]}, "outs[0]"),
        ("merge", {"outs": [torch.ones(3, 2, 16), 5]}, "outs[1]"),
        ("merge", {"outs": [torch.ones(3, 2, 16).int()] * 2}, "outs[0]"),
        ("merge", {"outs": [torch.ones(3, 2, 16), torch.ones(3, 2, 16).to("meta")]}, "outs[1]"),
        ("merge", {"outs": [torch.ones(3, 2, 16).requires_grad_()] * 2}, "outs[0]"),
        ("merge", {"lses": [torch.zeros(3, 2), None]}, "lses[1]"),
        ("merge", {"lses": [torch.zeros(3, 2), torch.zeros(3, 2).long()]}, "lses[1]"),
        ("merge", {"lses": [torch.zeros(3, 2).requires_grad_()] * 2}, "lses[0]"),
        ("merge", {"sinks": [0.0, 0.0]}, "sinks"),
        ("merge", {"sinks": torch.zeros(2).double()}, "sinks"),
        ("merge", {"sinks": torch.zeros(2).requires_grad_()}, "sinks"),
        ("merge", {"out": 5}, "out"),
        ("merge", {"out": torch.ones(3, 2, 16).int()}, "out"),
        ("merge", {"out": torch.ones(3, 2, 16).requires_grad_()}, "out"),
        ("merge", {"out": torch.ones(3, 1, 16).expand(3, 2, 16)}, "out"),
        ("merge", {"out": torch.ones(3, 2, 1).expand(3, 2, 16)}, "out"),
    ],
)
def test_arguments_that_do_not_fit(call, change, argument):
    function, arguments = CALLS[call]
    given = arguments(**change)
    with pytest.raises(pageant.ArgumentError) as caught:
        function(**given)
    assert caught.value.argument == (argument or "page_size")
    assert "\n" not in str(caught.value)


def test_merging_into_a_tensor_of_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(3, 2, 16)
        ops.merge_states(**merged(out=out))
    with pytest.raises(pageant.ArgumentError, match="inference") as caught:
        ops.merge_states(**merged(out=out))
    assert caught.value.argument == "out"


def test_merging_into_any_strides():
    want, _ = ops.merge_states(**merged(outs=[torch.ones(3, 2, 16), 3 * torch.ones(3, 2, 16)]))
    for strides in ((1, 3, 6), (16, 48, 1), (32, 1, 2)):
        out = torch.zeros(200).as_strided((3, 2, 16), strides)
        outs = [torch.ones(3, 2, 16), 3 * torch.ones(3, 2, 16)]
        got, _ = ops.merge_states(**merged(outs=outs, out=out))
        assert got is out
        assert torch.equal(out, want)


# Pages without attention


def test_page_indices_with_and_without_room_of_their_own():
    lens, table = ints([6, 0, 4]), ints([[7, 0], [3, 3], [5, -1]])
    made = ops.page_indices(lens, table, 4)
    assert [x.tolist() for x in made] == [[0, 2, 2, 3], [7, 0, 5, 0, 0, 0], [2, 0, 4]]
    assert all(x.dtype == torch.int32 for x in made)
    out = tuple(torch.full((size,), 9, dtype=torch.int32) for size in (4, 8, 3))
    assert ops.page_indices(lens, table, 4, out=out) is out
    assert [x.tolist() for x in out] == [[0, 2, 2, 3], [7, 0, 5, 9, 9, 9, 9, 9], [2, 0, 4]]


ROOM = ints([0] * 8)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seq_lens": ints([6, 9])}, "seq_lens[1]"),
        ({"seq_lens": ints([-1, 0])}, "seq_lens[0]"),
        ({"seq_lens": ints([6])}, "page_table"),
        ({"seq_lens": torch.tensor([6, 4])}, "seq_lens"),
        ({"seq_lens": [6, 4]}, "seq_lens"),
        ({"page_table": ints([1, 2])}, "page_table"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 4.0}, "page_size"),
        ({"out": 3}, "out"),
        ({"out": (ints([0] * 3), ints([0] * 4))}, "out"),
        ({"out": (ints([0] * 3), ints([0] * 3), ints([0] * 2))}, "out: indices"),
        ({"out": (ints([0] * 4), ints([0] * 4), ints([0] * 2))}, "out: indptr"),
        ({"out": (ints([0] * 3), ints([0] * 4), torch.zeros(2))}, "out: last_page_len"),
        ({"out": (ROOM[:3], ROOM[2:6], ROOM[6:])}, "out: indices"),
        ({"out": (ROOM[:3], ROOM[3:4].expand(4), ROOM[6:])}, "out: indices"),
        ({"out": (ROOM[:3], ROOM[3:7], ROOM[6:])}, "out: last_page_len"),
        ({"seq_lens": ROOM[:2], "out": (ROOM[1:4], ROOM[4:], ints([0, 0]))}, "out: indptr"),
    ],
)
def test_pages_that_cannot_be_listed(change, name):
    given = {"seq_lens": ints([6, 4]), "page_table": ints([[7, 0], [5, -1]]), "page_size": 4}
    with pytest.raises(ArgumentError) as caught:
        ops.page_indices(**{**given, **change})
    assert caught.value.argument == name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_attention_over_pages_made_plain_is_that_over_the_pages(layout, format):
    """With the layer's scales in them, they need none."""
    problem = build(case(dtype=torch.float32, format=format, scales=True, memory=layout))
    layer, batch = problem.layer, problem.batch
    plain, table = ops.dequantize_pages(
        problem.cache,
        batch.page_table,
        batch.seq_lens,
        dtype=torch.float32,
        scales=(layer.k_scale, layer.v_scale),
        layout=layout,
    )
    assert plain.k.dtype == torch.float32
    assert table.tolist() == torch.arange(table.numel()).view(batch.page_table.shape).tolist()
    assert plain.k.isfinite().all()  # slots past the end are poisoned, and not copied
    out = ops.paged_attention(
        problem.q, plain.k, plain.v, batch.query_start_loc, batch.seq_lens, table, layer=layer
    )
    assert_close(out, problem.expected_out, 1e-5)


def fp8_pages(**others):
    pages = torch.zeros(3, 4, 1, 16, dtype=torch.float8_e4m3fn)
    return {
        "cache": pageant.LayerCache(pages, pages.clone(), FORMATS["fp8_e4m3"]),
        "page_table": ints([[2, 0], [1, -1]]),
        "seq_lens": ints([6, 4]),
        **others,
    }


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"cache": torch.zeros(3, 4, 1, 16)}, "cache"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": "float16"}, "dtype"),
        ({"scales": 1.0}, "scales"),
        ({"scales": (0.0, 1.0)}, "k_scale"),
        ({"layout": "NHD"}, "layout"),
        ({"seq_lens": ints([6, 5])}, "page_table[1, 1]"),
        ({"page_table": ints([[2, 3], [1, 0]])}, "page_table[0, 1]"),
        ({"seq_lens": ints([9, 4])}, "seq_lens[0]"),
        ({"page_table": torch.zeros(2, 2)}, "page_table"),
    ],
)
def test_pages_that_cannot_be_made_plain(change, name):
    ops.dequantize_pages(**fp8_pages())
    with pytest.raises(ArgumentError) as caught:
        ops.dequantize_pages(**fp8_pages(**change))
    assert caught.value.argument == name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_has_a_kernel_on_every_device(device):
    for name in STEPS:
        kernel = load_step(name, torch.device(device))
        assert ("triton" in kernel.__module__) == (device == "cuda")
