"""The split into decodes and prefills: the rule of the engines that order their batches so."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant.plan.split import Split, split_decodes_and_prefills


def split(query_lens, threshold=1, num_tokens=None, max_query_len=None, **options):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int64)
    return split_decodes_and_prefills(
        starts,
        int(starts[-1]) if num_tokens is None else num_tokens,
        max(query_lens, default=0) if max_query_len is None else max_query_len,
        threshold,
        **options,
    )


UNIFORM = {"require_uniform": True}
APART = {"treat_short_extends_as_decodes": False}


@pytest.mark.parametrize(
    ("query_lens", "options", "want"),
    [
        pytest.param([1, 1, 1], {}, (3, 0, 3, 0), id="all decode"),
        pytest.param([5, 7], {}, (0, 2, 0, 12), id="all prefill"),
        pytest.param([1, 1, 5, 7], {}, (2, 2, 2, 12), id="mixed"),
        pytest.param([1, 5, 1], {}, (1, 2, 1, 6), id="after the cut all prefill"),
        pytest.param([1, 2, 3, 4], {"threshold": 3}, (3, 1, 6, 4), id="short ones decode"),
        pytest.param([2, 2, 2, 2], {"threshold": 2, **UNIFORM}, (4, 0, 8, 0), id="uniform"),
        pytest.param(
            [2, 2, 2, 0],
            {"threshold": 2, "num_tokens": 8, **UNIFORM},
            (4, 0, 8, 0),
            id="uniform, padded",
        ),
        pytest.param(
            [2, 1, 2], {"threshold": 2, **UNIFORM}, (1, 2, 2, 3), id="uniform, one is shorter"
        ),
        pytest.param(
            [1, 2, 5], {"threshold": 3, **UNIFORM}, (1, 2, 1, 7), id="uniform is the first's length"
        ),
        pytest.param(
            [2, 2, 0, 5], {"threshold": 2, **UNIFORM}, (3, 1, 4, 5), id="uniform, empties between"
        ),
        pytest.param([1, 1, 0], {"num_tokens": 4}, (3, 0, 4, 0), id="padding decodes"),
        pytest.param([1, 5], {"num_tokens": 9}, (1, 1, 1, 8), id="padding prefills"),
        pytest.param(
            [1, 2, 1, 5],
            {"threshold": 2, "is_prefilling": [False, True, False, True], **APART},
            (1, 3, 1, 8),
            id="short extends apart",
        ),
        pytest.param(
            [1, 2, 1],
            {"threshold": 2, "is_prefilling": [False, False, False], **APART},
            (3, 0, 4, 0),
            id="apart, but nobody prefills",
        ),
        pytest.param(
            [1, 1],
            {"is_prefilling": [True, False], **APART},
            (0, 2, 0, 2),
            id="a prompt of one token",
        ),
        pytest.param(
            [2, 2],
            {"threshold": 2, "is_prefilling": [False, True], **APART, **UNIFORM},
            (1, 1, 2, 2),
            id="uniform, short extends apart",
        ),
        pytest.param(
            [1, 1], {"is_prefilling": [True, True]}, (2, 0, 2, 0), id="treated as decodes"
        ),
        pytest.param([1, 1, 3], {"max_query_len": 1}, (3, 0, 5, 0), id="the host's bound decides"),
        pytest.param([1, 1], {"max_query_len": 9}, (2, 0, 2, 0), id="a loose bound"),
        pytest.param([], {}, (0, 0, 0, 0), id="no request"),
        pytest.param([], {"num_tokens": 3, "max_query_len": 5}, (0, 0, 3, 0), id="only padding"),
        pytest.param([0, 0], {}, (2, 0, 0, 0), id="no token"),
        pytest.param([0, 5, 1], {}, (1, 2, 0, 6), id="an empty one first"),
    ],
)
def test_cases(query_lens, options, want):
    options = dict(options)
    if "is_prefilling" in options:
        options["is_prefilling"] = np.array(options["is_prefilling"])
    assert split(query_lens, **options) == Split(*want)


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_decodes_come_first_and_everything_is_counted(query_lens, threshold, padding):
    tokens = sum(query_lens) + padding
    got = split(query_lens, threshold, tokens)
    assert got.num_decodes + got.num_prefills == len(query_lens)
    assert got.num_decode_tokens + got.num_prefill_tokens == tokens
    assert all(m <= threshold for m in query_lens[: got.num_decodes])
    if got.num_prefills:
        assert query_lens[got.num_decodes] > threshold
        assert got.num_decode_tokens == sum(query_lens[: got.num_decodes])


@given(st.lists(st.integers(0, 6), max_size=12), st.integers(1, 4))
def test_uniform_decodes_have_one_length(query_lens, threshold):
    got = split(query_lens, threshold, require_uniform=True)
    lens = {m for m in query_lens[: got.num_decodes] if m}
    if threshold > 1 and query_lens and query_lens[0] > 0:
        assert len(lens) <= 1
    assert all(m <= threshold for m in lens)


@pytest.mark.parametrize("spec", [0, 1, 3])
def test_a_plan_says_its_split(spec):
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16),
        limits=pageant.Limits(max_requests=8, max_tokens=32),
        options=pageant.Options(speculative_tokens=spec),
    )
    lens = [1, 2, 4, 5, 1]
    table = [[r] for r in range(5)]
    plan = attn.plan(pageant.Batch.from_lengths(lens, lens, table, page_size=16, num_tokens=15))
    assert plan.split == split(lens, 1 + spec, 15)
    assert plan.split.num_decodes == {0: 1, 1: 2, 3: 3}[spec]
