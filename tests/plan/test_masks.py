"""Draft masks in 16-bit words: their bits are the mask of the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant import Batch
from pageant.kernels import reference
from pageant.plan.masks import pack_mask, unpack_mask

PAGE = 4
LIMITS = pageant.Limits(max_requests=8, max_tokens=512, max_seq_len=256)


def attention(speculative=39, limits=LIMITS):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        limits,
        pageant.Features(draft_masks=True, non_causal=True),
        pageant.Options(speculative_tokens=speculative),
    )


def batch(*query_lens, cached=5, **others):
    lens = [m + cached for m in query_lens]
    table = [list(range(64)) for _ in lens]
    return Batch.from_lengths(query_lens, lens, table, PAGE, **{"slot_mapping": None, **others})


def words_of(row):
    """Words of one row, from the definition: 16 booleans each, the first the lowest bit."""
    row = [*row, *[False] * (-len(row) % 32)]
    return [
        sum(1 << bit for bit in range(16) if row[16 * word + bit]) for word in range(len(row) // 16)
    ]


@given(st.integers(0, 4), st.integers(0, 70), st.integers(0, 99))
def test_words_and_back(rows, width, seed):
    mask = torch.from_numpy(np.random.default_rng(seed).random((2, rows, width)) < 0.5)
    words = pack_mask(mask)
    assert words.dtype == torch.uint16
    assert words.shape == (2, rows, 2 * -(-width // 32))
    assert [words_of(row) for row in mask.flatten(0, 1).tolist()] == words.flatten(0, 1).tolist()
    assert torch.equal(unpack_mask(words, width), mask)


@pytest.mark.parametrize("m", [2, 15, 16, 17, 32, 33, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_uniform_masks_are_made_once(m, causal):
    attn = attention()
    plan = attn.plan(batch(m, m, m, causal=causal))
    packed = plan.packed_draft_mask
    assert packed.shape == (3, m, 2 * -(-m // 32))
    ones = torch.ones(m, m, dtype=torch.bool)
    want = ones.tril() if causal else ones
    assert torch.equal(unpack_mask(packed, m), want.expand(3, m, m))
    assert plan.packed_draft_mask is packed
    other = attn.plan(batch(m, m, causal=not causal)).packed_draft_mask
    assert not torch.equal(unpack_mask(other, m)[0], want)
    for count in (8, 1):
        again = attn.plan(batch(*[m] * count, causal=causal)).packed_draft_mask
        assert again.data_ptr() == packed.data_ptr()
        assert len(again) == count
    if m <= 32:  # a mixed batch: the prefill has no part in it
        mixed = attn.plan(batch(m, m, 50, num_tokens=2 * m + 60, causal=causal))
        assert mixed.split.num_prefills == 1
        assert torch.equal(mixed.packed_draft_mask, packed[:2])


LENGTHS = ((3, 1, 4), (1, 0, 2), (5, 5, 0), (0, 3), (33, 1, 17), (40, 0, 0), (1, 1, 3, 50))


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("kind", ["causal", "non-causal", "some causal", "mask", "parents"])
@pytest.mark.parametrize("padding", [0, 3])
def test_ragged_masks(lens, kind, padding):
    """Requests one after another at their offsets, bits beyond a request's own tokens zero."""
    tokens, longest, rng = sum(lens), max(lens), np.random.default_rng(7)
    causal, others = [kind != "non-causal"] * len(lens), {}
    if kind == "some causal":
        causal = [r % 2 == 0 for r in range(len(lens))]
        others["causal"] = torch.tensor(causal)
    elif kind == "non-causal":
        others["causal"] = False
    elif kind == "mask":  # columns past a request's tokens hold anything
        others["draft_mask"] = torch.from_numpy(rng.random((tokens + padding, longest)) < 0.5)
    elif kind == "parents":
        parents = [int(rng.integers(-1, i)) if i else -1 for m in lens for i in range(m)]
        others["draft_parents"] = torch.tensor(parents, dtype=torch.int32)
    plan = attention().plan(batch(*lens, num_tokens=tokens + padding, **others))
    want = []
    for r, m in enumerate(lens[: plan.split.num_decodes]):
        start, width = sum(lens[:r]), max(lens[: plan.split.num_decodes])
        draft = plan.buffers.batch.draft_mask
        own = None if draft is None else draft[start : start + m]
        seen = reference.visible(m, m, causal=causal[r], window=None, draft=own)
        want.append(torch.nn.functional.pad(seen, (0, width - m)))
    packed = plan.packed_draft_mask
    assert packed.shape == (sum(map(len, want)), 2 * -(-width // 32))
    assert torch.equal(unpack_mask(packed, width), torch.cat(want))


def test_none_where_no_decode_brings_drafts():
    attn = attention()
    for lens in ((1, 1, 1), (1, 0), (), (0, 0), (50, 3)):  # the last: prefills, in any order
        assert attn.plan(batch(*lens)).packed_draft_mask is None
    alone = attn.plan(batch(1, 1, draft_mask=torch.tensor([[True], [False]])))
    assert alone.packed_draft_mask.tolist() == [[1, 0], [0, 0]]
    for lens in ((), (0, 0), (50, 3)):
        mask = torch.ones(sum(lens), max(lens, default=0), dtype=torch.bool)
        assert attn.plan(batch(*lens, draft_mask=mask)).packed_draft_mask is None


def test_changes_in_place_are_seen():
    attn = attention()
    step = batch(3, 3, draft_mask=torch.ones(6, 3, dtype=torch.bool))
    plan = attn.plan(step)
    assert plan.packed_draft_mask.tolist() == [[7, 0]] * 6
    step.draft_mask[4, 1] = False
    assert plan.packed_draft_mask.tolist() == [[7, 0]] * 6
    attn.update(plan)
    assert plan.packed_draft_mask.tolist() == [[7, 0]] * 4 + [[5, 0], [7, 0]]
    step.query_start_loc[1] = 2
    with pytest.raises(pageant.ArgumentError):  # four tokens, and room for three
        attn.update(plan)
    step.query_start_loc[1:] = torch.tensor([2, 5])
    attn.update(plan)
    assert plan.packed_draft_mask.tolist() == [[3, 0], [3, 0], [7, 0], [7, 0], [5, 0]]


def test_an_older_plan_has_none():
    attn = attention()
    old = attn.plan(batch(2, 2))
    attn.plan(batch(3, 3))
    with pytest.raises(pageant.ArgumentError, match="replaced by plan 2"):
        _ = old.packed_draft_mask
