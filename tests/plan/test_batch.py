"""Batches: each mistake gives one error that names it, and leaves the plan before it alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import pageant
from pageant import Batch

PAGE = 4
LIMITS = pageant.Limits(max_requests=4, max_tokens=12, max_seq_len=40, max_cached_tokens=60)


def attention(limits=LIMITS, **features):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        limits,
        pageant.Features(**{"draft_masks": True, "non_causal": True, **features}),
    )


def good(**others):
    """Two requests: one new token after five, and three after none."""
    return replace(Batch.from_lengths([1, 3], [6, 3], [[7, 2], [5, 0]], page_size=PAGE), **others)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def i64(*values):
    return torch.tensor(values, dtype=torch.int64)


MASK = torch.ones(4, 3, dtype=torch.bool)

# What is wrong, the field the error names, and what it must say of the value and what is allowed.
MISTAKES = [
    # Host bounds.
    ({"num_requests": -1}, "num_requests", "-1", "from 0 up"),
    ({"num_requests": 2.0}, "num_requests", "2.0", "a whole number"),
    ({"num_requests": True}, "num_requests", "True", "a whole number"),
    ({"num_requests": 5}, "num_requests", "5", "at most 4"),
    ({"num_requests": 1}, "query_start_loc", "[3]", "[2]"),
    ({"num_tokens": -1}, "num_tokens", "-1", "from 0 up"),
    ({"num_tokens": 13}, "num_tokens", "13", "at most 12"),
    ({"num_tokens": 3}, "query_start_loc[-1]", "4", "at most num_tokens, 3"),
    ({"num_tokens": None}, "num_tokens", "None", "a whole number"),
    ({"max_query_len": -2}, "max_query_len", "-2", "from 0 up"),
    ({"max_query_len": 2}, "query_start_loc[2]", "4", "max_query_len, 2"),
    ({"max_seq_len": -1}, "max_seq_len", "-1", "from 0 up"),
    ({"max_seq_len": 41}, "max_seq_len", "41", "at most 40"),
    ({"max_seq_len": 5}, "seq_lens[0]", "6", "5"),
    # Types and shapes.
    ({"query_start_loc": i64(0, 1, 4)}, "query_start_loc", "int64", "torch.int32"),
    ({"query_start_loc": [0, 1, 4]}, "query_start_loc", "[0, 1, 4]", "a tensor"),
    ({"query_start_loc": i32(0, 1)}, "query_start_loc", "[2]", "[3]"),
    ({"query_start_loc": i32(0, 1, 4)[None]}, "query_start_loc", "[1, 3]", "[3]"),
    ({"query_start_loc": i32(0, 9, 1, 9, 4)[::2]}, "query_start_loc", "stride 2", "stride 1"),
    ({"query_start_loc": i32(0, 1, 4).to("meta")}, "query_start_loc", "meta", "cpu"),
    ({"query_start_loc": None}, "query_start_loc", "None", "a tensor"),
    ({"seq_lens": i64(6, 3)}, "seq_lens", "int64", "torch.int32"),
    ({"seq_lens": i32(6, 3, 1)}, "seq_lens", "[3]", "[2]"),
    ({"seq_lens": None}, "seq_lens", "None", "a tensor"),
    ({"page_table": i64(7, 2, 5, 0).view(2, 2)}, "page_table", "int64", "torch.int32"),
    ({"page_table": i32(7, 2)}, "page_table", "[2]", "[2, any]"),
    ({"page_table": i32(7, 2)[None]}, "page_table", "[1, 2]", "[2, any]"),
    ({"page_table": i32(7, 5, 2, 0).view(2, 2).T}, "page_table", "stride 2", "stride 1"),
    ({"slot_mapping": i32(0, 1, 2, 3)}, "slot_mapping", "int32", "torch.int64"),
    ({"slot_mapping": i64(0, 1, 2, 3)[None]}, "slot_mapping", "[1, 4]", "[any]"),
    ({"slot_mapping": i64(0, 1, 2)}, "slot_mapping", "3 rows", "4"),
    ({"slot_mapping": i64(0, 1, 2, 3, 4)}, "slot_mapping", "5 rows", "4"),
    ({"query_start_loc_cpu": i64(0, 1, 4)}, "query_start_loc_cpu", "int64", "torch.int32"),
    ({"seq_lens_cpu": i32(6)}, "seq_lens_cpu", "[1]", "[2]"),
    ({"shared_prefix_lens": i32(6)}, "shared_prefix_lens", "[1]", "[2]"),
    ({"causal": None}, "causal", "None", "a bool"),
    ({"causal": 1}, "causal", "1", "a bool"),
    ({"causal": torch.ones(3, dtype=torch.bool)}, "causal", "[3]", "[2]"),
    ({"causal": i32(1, 1)}, "causal", "int32", "torch.bool"),
    # Values that contradict each other.
    ({"query_start_loc": i32(1, 2, 4)}, "query_start_loc[0]", "1", "0"),
    ({"query_start_loc": i32(0, 3, 1)}, "query_start_loc[2]", "1", "not below"),
    ({"query_start_loc": i32(0, -1, 2)}, "query_start_loc[1]", "-1", "not below"),
    ({"query_start_loc": i32(0, 1, 9)}, "query_start_loc[-1]", "9", "at most num_tokens, 4"),
    ({"seq_lens": i32(6, -1)}, "seq_lens[1]", "-1", "0 to"),
    ({"seq_lens": i32(9, 3), "max_seq_len": 9}, "seq_lens[0]", "9", "at most 8"),
    ({"page_table": i32(7, 5).view(2, 1)}, "seq_lens[0]", "6", "at most 4"),
    ({"page_table": i32().view(2, 0)}, "seq_lens[0]", "6", "at most 0"),
    ({"page_table": i32(-1, 2, 5, 0).view(2, 2)}, "page_table[0, 0]", "-1", "from 0 up"),
    ({"page_table": i32(7, 2, -8, 0).view(2, 2)}, "page_table[1, 0]", "-8", "from 0 up"),
    ({"encoder_seq_lens": i32(-1, 3)}, "encoder_seq_lens[0]", "-1", "0 to"),
    ({"encoder_seq_lens": i32(8, 41)}, "encoder_seq_lens[1]", "41", "40"),
    ({"encoder_seq_lens": i32(8, 9)}, "encoder_seq_lens[1]", "9", "at most 8"),
    ({"encoder_seq_lens": i64(8, 8)}, "encoder_seq_lens", "int64", "torch.int32"),
    # Drafts.
    ({"draft_mask": MASK.int()}, "draft_mask", "int32", "torch.bool"),
    ({"draft_mask": MASK[:, :2]}, "draft_mask", "[4, 2]", "[4, 3]"),
    ({"draft_mask": MASK[:3]}, "draft_mask", "3 rows", "4"),
    ({"draft_mask": MASK[0]}, "draft_mask", "[3]", "3]"),
    ({"draft_mask": MASK.tolist()}, "draft_mask", "True", "a tensor"),
    ({"draft_mask": MASK.T.contiguous().T}, "draft_mask", "stride 4", "stride 1"),
    ({"draft_parents": i32(-1, -1, 0)}, "draft_parents", "3 rows", "4"),
    ({"draft_parents": i32(-1, -1, 0, 2)}, "draft_parents[3]", "2", "an earlier token"),
    ({"draft_parents": i32(-1, -1, 2, 0)}, "draft_parents[2]", "2", "an earlier token"),
    ({"draft_parents": i32(0, -1, 0, 0)}, "draft_parents[0]", "0", "an earlier token"),
    ({"draft_parents": i32(-1, -2, 0, 0)}, "draft_parents[1]", "-2", "-1, or"),
    ({"draft_parents": i64(-1, -1, 0, 0)}, "draft_parents", "int64", "torch.int32"),
    (
        {"draft_mask": MASK, "draft_parents": i32(-1, -1, 0, 1)},
        "draft_parents",
        "beside draft_mask",
        "one of the two",
    ),
]


def snapshot(plan):
    work = [
        (array.ctypes.data, array.copy())
        for lists in plan.buffers.work.values()
        for array in (lists.items, lists.share_start, lists.groups, lists.counts)
    ]
    rest = {name: value for name, value in vars(plan.buffers).items() if name != "work"}
    return work, rest


def unchanged(plan, before):
    work, rest = snapshot(plan)
    for (address, array), (old_address, old) in zip(work, before[0], strict=True):
        assert address == old_address
        assert np.array_equal(array, old)
    for name, value in rest.items():
        assert value is before[1][name] or value == before[1][name]


@pytest.mark.parametrize(
    ("change", "field", "value", "allowed"),
    MISTAKES,
    ids=[f"{field}={value}" for _, field, value, _ in MISTAKES],
)
def test_mistakes(change, field, value, allowed):
    attn = attention()
    kv = attn.new_cache(num_layers=1, num_pages=8)
    q = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1))
    plan = attn.plan(good())
    attn.write(plan, kv[0], q[:, :1], q[:, 1:])
    want, before = attn.run(plan, q, kv[0]), snapshot(plan)
    with pytest.raises(pageant.ArgumentError) as caught:
        attn.plan(good(**change))
    said = str(caught.value)
    assert caught.value.argument == f"batch.{field}"
    assert said.startswith(f"batch.{field} is ")
    named, _, may = said.partition("; allowed: ")
    assert value in named
    assert allowed in may
    unchanged(plan, before)
    assert torch.equal(attn.run(plan, q, kv[0]), want)


def test_pages_of_another_size_are_too_few():
    larger = Batch.from_lengths([1], [30], [[3, 4]], page_size=4 * PAGE)
    with pytest.raises(pageant.ArgumentError) as caught:
        attention().plan(larger)
    assert str(caught.value) == (
        "batch.seq_lens[0] is 30; allowed: at most 8, for page_table is 2 wide, "
        "and a page holds 4 tokens"
    )


def test_a_request_without_new_tokens_needs_no_pages():
    idle = Batch.from_lengths([0, 3], [30, 3], [[], [5]], page_size=PAGE)
    assert attention().plan(idle).split.num_prefill_tokens == 3


def test_all_keys_together():
    lens = [40, 21]
    table = [list(range(10)), list(range(10, 20))]
    with pytest.raises(pageant.ArgumentError, match="61") as caught:
        attention().plan(Batch.from_lengths([1, 1], lens, table, page_size=PAGE))
    assert caught.value.argument == "the sum of batch.seq_lens"
    assert attention().plan(Batch.from_lengths([1, 1], [40, 20], table, page_size=PAGE))


@pytest.mark.parametrize(
    ("declared", "change", "field"),
    [
        ("draft_masks", {"draft_mask": MASK}, "draft_mask"),
        ("draft_masks", {"draft_parents": i32(-1, -1, 0, 0)}, "draft_parents"),
        ("non_causal", {"causal": False}, "causal"),
        ("non_causal", {"causal": torch.tensor([True, False])}, "causal"),
    ],
)
def test_undeclared_features(declared, change, field):
    assert attention().plan(good(**change))
    with pytest.raises(pageant.ArgumentError, match=rf"{declared}=True") as caught:
        attention(**{declared: False}).plan(good(**change))
    assert caught.value.argument == f"batch.{field}"


def test_page_ids_beyond_the_cache():
    """The plan knows no cache yet: run says it."""
    attn = attention()
    kv = attn.new_cache(num_layers=2, num_pages=8)
    small = attn.new_cache(num_layers=1, num_pages=7)
    plan = attn.plan(good())
    attn.run(plan, torch.zeros(4, 2, 16), kv[0])
    with pytest.raises(pageant.ArgumentError, match=r"7.*below 7") as caught:
        attn.run(plan, torch.zeros(4, 2, 16), small[0])
    assert caught.value.argument == "batch.page_table[0]"
    attn.run(plan, torch.zeros(4, 2, 16), kv[1])


def test_slots_beyond_the_cache():
    attn = attention()
    kv = attn.new_cache(num_layers=1, num_pages=8)
    rows = torch.ones(4, 1, 16)
    plan = attn.plan(good(slot_mapping=i64(31, -1, 0, -7)))
    attn.write(plan, kv[0], rows, rows)
    before = kv.storage.clone()
    plan = attn.plan(good(slot_mapping=i64(0, 1, 32, -7)))
    with pytest.raises(pageant.ArgumentError, match=r"32.*up to 31") as caught:
        attn.write(plan, kv[0], 2 * rows, 2 * rows)
    assert caught.value.argument == "batch.slot_mapping"
    assert torch.equal(kv.storage, before)


def test_a_plan_without_slots_writes_nothing():
    attn = attention()
    kv = attn.new_cache(num_layers=1, num_pages=8)
    plan = attn.plan(good(slot_mapping=None))
    attn.run(plan, torch.zeros(4, 2, 16), kv[0])
    with pytest.raises(pageant.ArgumentError, match="slot_mapping is None") as caught:
        attn.write(plan, kv[0], torch.zeros(4, 1, 16), torch.zeros(4, 1, 16))
    assert caught.value.argument == "batch.slot_mapping"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_tokens": 6},
        {"max_query_len": 12, "max_seq_len": 40},
        {"slot_mapping": None},
        {"slot_mapping": i64(-1, -1, -1, -1)},
        {"page_table": i32(7, 2, 5, -3).view(2, 2)},
        {"page_table": i32(7, 2, -9, 5, 0, -9).view(2, 3)[:, :2]},
        {"causal": torch.tensor([True, False])},
        {"seq_lens": i32(6, 0)},
        {"draft_parents": i32(-1, -1, -1, 1)},
        {"draft_mask": MASK},
        {"draft_mask": torch.ones(5, 3, dtype=torch.bool), "num_tokens": 6},
        {"encoder_seq_lens": i32(8, 0)},
        {"query_start_loc_cpu": i32(0, 1, 4), "seq_lens_cpu": i32(6, 3)},
        {"shared_prefix_lens": i32(0, 0)},
        {"query_start_loc": i32(0, 1, 1)},
    ],
)
def test_what_is_no_mistake(change):
    attn = attention()
    plan = attn.plan(good(**change))
    plan.check()
    kv = attn.new_cache(num_layers=1, num_pages=8)
    assert torch.isfinite(attn.run(plan, torch.zeros(6, 2, 16), kv[0])).all()


def test_check_sees_tensors_changed_since():
    attn = attention()
    batch = good()
    plan = attn.plan(batch)
    batch.seq_lens[1] = -3
    with pytest.raises(pageant.ArgumentError) as caught:
        plan.check()
    assert caught.value.argument == "batch.seq_lens[1]"


def test_from_lengths():
    batch = Batch.from_lengths([2, 0, 3], [5, 9, 2], [[3, 1], [4, 5, 6], [9]], page_size=4)
    assert batch.query_start_loc.tolist() == [0, 2, 2, 5]
    assert batch.seq_lens.tolist() == [5, 9, 2]
    assert batch.page_table.tolist() == [[3, 1, 0], [4, 5, 6], [9, 0, 0]]
    # Three new tokens, two slots: the first stands before the first key and is not written.
    assert batch.slot_mapping.tolist() == [15, 4, -1, 36, 37]
    bounds = (batch.num_requests, batch.num_tokens, batch.max_query_len, batch.max_seq_len)
    assert bounds == (3, 5, 3, 9)
    assert Batch.from_lengths([1], [1], [[0]], 4, num_tokens=3, max_seq_len=8).num_tokens == 3


def test_from_lengths_with_slots_of_its_own():
    """Cross attention: the table holds the encoder's pages, fewer than the decoder has tokens."""
    lens = i32(3)
    batch = Batch.from_lengths([1], [50], [[2]], 4, encoder_seq_lens=lens, slot_mapping=None)
    assert batch.slot_mapping is None
    assert batch.key_lens is lens


@pytest.mark.parametrize(
    ("lists", "name"),
    [
        (([1, 1], [3], [[3], [4]]), "seq_lens"),
        (([1], [3], []), "page_table"),
        (([1, 1], [3, 9], [[3], [4]]), "page_table[1]"),
        ((None, [3], [[3]]), "query_lens"),
        ((1, [3], [[3]]), "query_lens"),
        (([1.0], [3], [[3]]), "query_lens[0]"),
        (([1, -1], [3, 3], [[3], [4]]), "query_lens[1]"),
        (([True], [3], [[3]]), "query_lens[0]"),
        (([1], "3", [[3]]), "seq_lens"),
        (([1], ["3"], [[3]]), "seq_lens[0]"),
        (([1], [2**31], [[3]]), "seq_lens[0]"),
        (([1], [3], 5), "page_table"),
        (([1], [3], [5]), "page_table[0]"),
        (([1], [3], [["5"]]), "page_table[0][0]"),
        (([1], [3], [[2**31]]), "page_table[0][0]"),
    ],
)
def test_lists_that_do_not_fit(lists, name):
    with pytest.raises(pageant.ArgumentError, match=r"allowed: ") as caught:
        Batch.from_lengths(*lists, page_size=4)
    assert caught.value.argument == name


@pytest.mark.parametrize("page_size", [0, -1, 1.0, None, "4", 2**31])
def test_lists_for_pages_of_no_size(page_size):
    with pytest.raises(pageant.ArgumentError) as caught:
        Batch.from_lengths([1], [3], [[3]], page_size)
    assert caught.value.argument == "page_size"


def test_fields_that_no_batch_has():
    with pytest.raises(pageant.ArgumentError) as caught:
        Batch.from_lengths([1], [3], [[3]], 4, colour=1)
    assert caught.value.argument == "colour"


def test_lists_of_other_kinds():
    lens, table = np.array([1, 2]), np.array([[3], [4]])
    batch = Batch.from_lengths(lens, (3, 4), [range(3, 4), (4,)], 4)
    assert batch.page_table.tolist() == table.tolist()
    assert Batch.from_lengths(lens, lens, table, 4).slot_mapping.tolist() == [12, 16, 17]
