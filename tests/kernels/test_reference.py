"""The reference: numbers worked out by hand, one function at a time, and torch's own attention."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.cache.pages import LayerCache
from pageant.cache.quantize import encode
from pageant.kernels import reference
from pageant.kernels.call import AttentionCall
from pageant.plan.buffers import Workspace
from pageant.plan.inputs import LayerParams
from pageant.plan.work import WorkList

INF, NAN, LN2 = math.inf, math.nan, math.log(2)


def column(*values):
    """float64 [n, 1, 1]: one head of size one."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def exact(values):
    return torch.tensor(values, dtype=torch.float64)


def all_see(m, n):
    return torch.ones(m, n, dtype=torch.bool)


def params(**others):
    return LayerParams(**{"score_scale": 1.0, **others})


def rows(mask):
    return [[int(seen) for seen in row] for row in mask]


# visible


def test_causal_hangs_from_the_last_key():
    assert rows(reference.visible(2, 4, causal=True, window=None, draft=None)) == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]


def test_more_rows_than_keys():
    """Rows at positions -2, -1 and 0."""
    assert rows(reference.visible(3, 1, causal=True, window=None, draft=None)) == [[0], [0], [1]]
    assert rows(reference.visible(3, 1, causal=False, window=None, draft=None)) == [[1], [1], [1]]


@pytest.mark.parametrize(
    ("window", "want"), [(1, [[0, 0, 1, 0], [0, 0, 0, 1]]), (2, [[0, 1, 1, 0], [0, 0, 1, 1]])]
)
def test_a_window_counts_the_row_itself(window, want):
    assert rows(reference.visible(2, 4, causal=True, window=window, draft=None)) == want


def test_a_window_without_causality_is_open_to_the_right():
    assert rows(reference.visible(2, 4, causal=False, window=2, draft=None)) == [
        [0, 1, 1, 1],
        [0, 0, 1, 1],
    ]


def test_a_draft_mask_rules_the_new_tokens_only():
    draft = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()
    for causal in (True, False):
        assert rows(reference.visible(3, 5, causal=causal, window=None, draft=draft)) == [
            [1, 1, 1, 0, 0],
            [1, 1, 0, 1, 0],
            [1, 1, 1, 0, 1],
        ]


def test_a_draft_mask_and_a_window():
    draft = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    assert rows(reference.visible(3, 5, causal=True, window=2, draft=draft)) == [
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_a_draft_mask_with_more_rows_than_keys():
    """Three new tokens and two keys: column 0 lies before the first key."""
    draft = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1]]).bool()
    assert rows(reference.visible(3, 2, causal=True, window=None, draft=draft)) == [
        [1, 1],
        [1, 0],
        [0, 1],
    ]


def test_a_draft_mask_wider_than_the_request():
    draft = torch.ones(2, 7, dtype=torch.bool)
    draft[0, 1] = False
    assert rows(reference.visible(2, 3, causal=True, window=None, draft=draft)) == [
        [1, 1, 0],
        [1, 1, 1],
    ]


@given(
    st.integers(0, 9), st.integers(0, 12), st.booleans(), st.one_of(st.none(), st.integers(1, 9))
)
def test_visible_is_its_definition(m, n, causal, window):
    want = [
        [
            int((not causal or j <= n - m + i) and (window is None or j > n - m + i - window))
            for j in range(n)
        ]
        for i in range(m)
    ]
    assert rows(reference.visible(m, n, causal=causal, window=window, draft=None)) == want


# scored


def test_scores_by_hand():
    """q.k = 6 and 8, halved; the cap at 2; slope 3 times the distance to position 1."""
    q = exact([[[1.0, 2.0]]])
    k = exact([[[2.0, 2.0]], [[4.0, 2.0]]])

    def scores(**others):
        p = params(score_scale=0.5, **others)
        return reference.scored(q, k, all_see(1, 2), p)[0, 0].tolist()

    assert scores() == [3.0, 4.0]
    capped = [2 * math.tanh(1.5), 2 * math.tanh(2.0)]
    assert scores(soft_cap=2.0) == pytest.approx(capped, rel=1e-15)
    slopes = torch.tensor([3.0])
    assert scores(alibi_slopes=slopes) == [0.0, 4.0]
    assert scores(soft_cap=2.0, alibi_slopes=slopes) == pytest.approx(
        [capped[0] - 3.0, capped[1]], rel=1e-15
    )


def test_alibi_counts_from_each_rows_own_position():
    zero = torch.zeros(2, 1, 1).double(), torch.zeros(3, 1, 1).double()
    got = reference.scored(*zero, all_see(2, 3), params(alibi_slopes=torch.tensor([1.0])))
    assert got.tolist() == [[[-1.0, 0.0, 1.0], [-2.0, -1.0, 0.0]]]


def test_hidden_keys_score_minus_infinity():
    got = reference.scored(column(1.0), column(5.0, NAN), torch.tensor([[True, False]]), params())
    assert got.tolist() == [[[5.0, -INF]]]


def test_query_heads_share_keys_in_order():
    """Four query heads over two key heads: 0 and 1 read the first, 2 and 3 the second."""
    q = torch.ones(1, 4, 1).double()
    k = exact([[[1.0], [10.0]]])
    assert reference.scored(q, k, all_see(1, 1), params()).flatten().tolist() == [1, 1, 10, 10]


# attend


def test_attention_by_hand():
    """Scores ln 1, ln 2 and ln 5: weights 1/8, 2/8 and 5/8."""
    k, v = column(0.0, LN2, math.log(5)), column(8.0, 16.0, 0.0)
    out, lse = reference.attend(column(1.0), k, v, all_see(1, 3), params())
    assert out.item() == pytest.approx(1.0 + 4.0, rel=1e-15)
    assert lse.item() == pytest.approx(math.log(8), rel=1e-15)
    out, lse = reference.attend(column(1.0), k, v, all_see(1, 3), params(value_scale=3.0))
    assert out.item() == pytest.approx(15.0, rel=1e-15)
    assert lse.item() == pytest.approx(math.log(8), rel=1e-15)


@pytest.mark.parametrize(("sink", "want"), [(0.0, 0.75), (math.log(5), 0.375), (-INF, 1.0)])
def test_sinks_by_hand(sink, want):
    """Three keys of score 0 and value 1: 3 / (3 + e^sink)."""
    p = params(sinks=torch.tensor([sink]))
    out, lse = reference.attend(column(0.0), column(1, 2, 3), column(1, 1, 1), all_see(1, 3), p)
    assert out.item() == pytest.approx(want, rel=1e-7)
    assert lse.item() == pytest.approx(math.log(3), rel=1e-15)


def test_a_sink_is_neither_scaled_nor_capped():
    p = params(score_scale=100.0, soft_cap=0.5, sinks=exact([LN2]))
    out, _ = reference.attend(column(0.0), column(1.0), column(1.0), all_see(1, 1), p)
    assert out.item() == pytest.approx(1 / 3, rel=1e-15)


@pytest.mark.parametrize("sinks", [None, torch.tensor([100.0])])
def test_rows_without_keys(sinks):
    mask = torch.tensor([[False, False], [True, False]])
    out, lse = reference.attend(
        column(1.0, 1.0), column(1.0, 1.0), column(4.0, 5.0), mask, params(sinks=sinks)
    )
    assert out[0].item() == 0.0
    assert lse[0].item() == -INF
    assert lse[1].item() == 1.0
    out, lse = reference.attend(
        column(1.0), column()[:0], column()[:0], all_see(1, 0), params(sinks=sinks)
    )
    assert (out.item(), lse.item()) == (0.0, -INF)


def test_large_scores_do_not_overflow():
    out, lse = reference.attend(
        column(1.0), column(5000.0, 4000.0), column(1.0, 2.0), all_see(1, 2), params()
    )
    assert (out.item(), lse.item()) == (1.0, 5000.0)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)])
@pytest.mark.parametrize("lens", [(1, 9), (5, 5), (4, 13), (3, 200)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_plain_attention_equals_torch(heads, lens, dims):
    rng = torch.Generator().manual_seed(sum(lens))
    (hq, hkv), (m, n) = heads, lens
    q = torch.randn(m, hq, dims[0], generator=rng).double()
    k = torch.randn(n, hkv, dims[0], generator=rng).double()
    v = torch.randn(n, hkv, dims[1], generator=rng).double()
    for window in (None, 3):
        mask = reference.visible(m, n, causal=True, window=window, draft=None)
        square = torch.ones(n, n, dtype=torch.bool).tril()[n - m :]
        assert torch.equal(mask, square if window is None else square.triu(n - m - 2))
        out, lse = reference.attend(q, k, v, mask, params(score_scale=0.3))
        each = [x.transpose(0, 1) for x in (q, k, v)]
        each[1:] = [x.repeat_interleave(hq // hkv, 0) for x in each[1:]]
        want = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=mask, scale=0.3)
        torch.testing.assert_close(out.transpose(0, 1), want, rtol=1e-12, atol=1e-13)
        scores = (each[0] @ each[1].mT * 0.3).masked_fill(~mask, -INF)
        torch.testing.assert_close(lse.t(), scores.exp().sum(-1).log(), rtol=1e-12, atol=1e-13)


# with_sinks and merge_states


def test_with_sinks():
    out = torch.full((1, 2, 3), 6.0).double()
    lse = exact([[math.log(4), -INF]])
    assert reference.with_sinks(out, lse, None) is out
    got = reference.with_sinks(out, lse, exact([LN2, LN2]))
    assert got[0, 0].tolist() == pytest.approx([4.0] * 3, rel=1e-15)
    assert got[0, 1].tolist() == [0.0] * 3


def test_merge_by_hand():
    """Parts of 1 and 3 keys with means 8 and 4: the mean of all four is 5."""
    out, lse = reference.merge_states(
        [column(8.0), column(4.0)], [torch.zeros(1, 1), exact([[math.log(3)]])]
    )
    assert out.dtype == lse.dtype == torch.float64
    assert out.item() == pytest.approx(5.0, rel=1e-15)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-15)
    out, lse = reference.merge_states(
        [column(8.0), column(4.0)],
        [torch.zeros(1, 1), exact([[math.log(3)]])],
        exact([math.log(4)]),
    )
    assert out.item() == pytest.approx(2.5, rel=1e-15)
    assert lse.item() == pytest.approx(math.log(4), rel=1e-15)


@pytest.mark.parametrize("nothing", [-INF, INF])
def test_merge_leaves_empty_parts_out(nothing):
    empty = column(NAN), torch.tensor([[nothing]])
    out, lse = reference.merge_states([empty[0], column(3.0)], [empty[1], torch.ones(1, 1)])
    assert (out.item(), lse.item()) == (3.0, 1.0)
    out, lse = reference.merge_states([empty[0]] * 2, [empty[1]] * 2, torch.zeros(1))
    assert (out.item(), lse.item()) == (0.0, -INF)


# gather, write_pages and run


def pages(name="fp32", count=4, size=2, heads=1, dim=2):
    fmt = FORMATS[name]
    stored = [encode(torch.zeros(count, size, heads, dim), fmt) for _ in "kv"]
    (k, v), scales = zip(*stored, strict=True)
    return LayerCache(k, v, fmt, *scales)


@pytest.mark.parametrize("name", FORMATS)
def test_gather_reads_what_somebody_sees(name):
    """Five keys in pages 3, 0 and one that does not exist; rows see keys 1, 2 and 3."""
    cache = pages(name)
    poison = cache.k if cache.k_scales is None else cache.k_scales
    poison[:] = torch.tensor(NAN).to(poison.dtype)
    for page, row, value in ((3, 1, 1.5), (0, 0, 3.0), (0, 1, 6.0)):
        codes, scale = encode(torch.full((1, 2), value), cache.format)
        cache.k[page, row] = codes
        if scale is not None:
            cache.k_scales[page, row] = scale
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]).bool()
    got = reference.gather(cache.sides[0], cache.format, torch.tensor([3, 0, 99]), mask)
    assert got.dtype == torch.float64
    assert got.shape == (5, 1, 2)
    want = torch.tensor([0.0, 1.5, 3, 6, 0])[:, None].expand(5, 2).double()
    # A row's scale is rounded to float32; that of a block is exact here.
    has_row_scales = cache.k_scales is not None and cache.k_scales.dtype == torch.float32
    torch.testing.assert_close(got[:, 0], want, rtol=1e-7 if has_row_scales else 0, atol=0)


def test_write_pages_by_hand():
    cache = pages("fp8_e4m3")
    k = torch.tensor([1000.0, 3.0, -465.0])[:, None, None].expand(3, 1, 2)
    v = torch.tensor([8.0, 9.0, 1.0625])[:, None, None].expand(3, 1, 2)
    reference.write_pages(k, v, cache, torch.tensor([5, -1, 0]), (1.0, torch.tensor([2.0])))
    want_k, want_v = torch.zeros(4, 2), torch.zeros(4, 2)
    want_k[2, 1], want_k[0, 0] = 448.0, -448.0
    want_v[2, 1], want_v[0, 0] = 4.0, 0.53125
    want_v[0, 0] = 0.5  # 0.53125 lies midway between 0.5 and 0.5625: the even one
    assert torch.equal(cache.k.float()[..., 0, 0], want_k)
    assert torch.equal(cache.v.float()[..., 0, 1], want_v)


def call(lens, *, listed, cache, table, **others):
    """A call over `listed` requests, queries zero, out and lse poisoned."""
    starts = torch.tensor([0, *torch.tensor([m for m, _ in lens]).cumsum(0)]).int()
    work = WorkList.empty(8, 1)
    work.items[: len(listed), 0] = listed
    work.counts[0] = len(listed)
    total = int(starts[-1]) + 1
    fields = {
        "q": torch.zeros(total, 1, 2),
        "cache": cache,
        "out": torch.full((total, 1, 2), 77.0),
        "lse": torch.full((total, 1), 77.0),
        "query_start_loc": starts,
        "key_lens": torch.tensor([n for _, n in lens]).int(),
        "page_table": torch.tensor(table).int(),
        "causal": True,
        "draft_mask": None,
        "params": params(),
        "work": work,
        "workspace": Workspace(torch.zeros(0), torch.zeros(0)),
    }
    return AttentionCall(**{**fields, **others})


def numbered():
    """Value of slot s is the number s."""
    cache = pages()
    cache.v[:] = torch.arange(8.0).reshape(4, 2, 1, 1)
    return cache


def test_run_by_hand():
    """Two requests: slots 6, 7, 0 for the first, 2 and 3 for the second; padding stays."""
    step = call([(2, 3), (1, 2)], listed=[0, 1], cache=numbered(), table=[[3, 0], [1, -1]])
    reference.run(step)
    assert step.out[:, 0, 0].tolist() == pytest.approx([6.5, 13 / 3, 2.5, 77.0], rel=1e-6)
    assert step.lse[:, 0].tolist() == pytest.approx([LN2, math.log(3), LN2, 77.0], rel=1e-6)


def test_run_serves_the_requests_listed_and_no_other():
    step = call([(2, 3), (1, 2)], listed=[1, 1], cache=numbered(), table=[[99, 99], [1, -1]])
    reference.run(step)
    assert step.out[:, 0, 0].tolist() == [77.0, 77.0, 2.5, 77.0]


def test_run_takes_causality_and_masks_of_each_request():
    tables = {"cache": numbered(), "table": [[3, 0], [1, 0]]}
    step = call([(2, 2), (2, 2)], listed=[0, 1], causal=torch.tensor([True, False]), **tables)
    reference.run(step)
    assert step.out[:4, 0, 0].tolist() == [6.0, 6.5, 2.5, 2.5]
    mask = torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0]]).bool()
    step = call([(2, 2), (2, 2)], listed=[0, 1], draft_mask=mask, **tables)
    reference.run(step)
    assert step.out[:4, 0, 0].tolist() == [6.0, 7.0, 3.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_run_rounds_once(dtype):
    """One third of slot 0 + 1 + 2, from float64 into the model's dtype; lse may be absent."""
    step = call(
        [(1, 3)],
        listed=[0],
        cache=numbered(),
        table=[[0, 1]],
        params=params(value_scale=1 / 3),
        q=torch.zeros(2, 1, 2, dtype=dtype),
        out=torch.zeros(2, 1, 2, dtype=dtype),
        lse=None,
    )
    reference.run(step)
    assert step.out[0, 0, 0].item() == torch.tensor(np.float64(1 / 3)).to(dtype).item()
