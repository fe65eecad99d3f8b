"""Plans: one at a time in fixed buffers, planned again in place, fast for very many requests."""

import time
from dataclasses import FrozenInstanceError

import pytest
import torch

import pageant
from pageant import Batch

PAGE = 4


def attention(limits=None, features=None, **options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        limits or pageant.Limits(max_requests=4, max_tokens=16, max_seq_len=64),
        features or pageant.Features(windows=(None, 3)),
        pageant.Options(**options),
    )


def filled(attn):
    """Pages 0 to 7; the value at slot s is the number s."""
    kv = attn.new_cache(num_layers=1, num_pages=8)[0]
    kv.v[:] = torch.arange(32.0).view(8, 4, 1, 1)
    return kv


def decode(*seq_lens):
    """One new token a request; lengths may grow to the two pages that each has."""
    table = [[2 * r, 2 * r + 1] for r in range(len(seq_lens))]
    others = {"slot_mapping": None, "max_seq_len": 2 * PAGE}
    return Batch.from_lengths([1] * len(seq_lens), seq_lens, table, PAGE, **others)


def means(attn, plan, kv, layer=None):
    q = torch.zeros(plan.batch.num_tokens, 2, 16)
    return pytest.approx(attn.run(plan, q, kv, layer)[:, 0, 0].tolist(), rel=1e-5)


def addresses(plan):
    return [
        array.ctypes.data
        for work in plan.buffers.work.values()
        for array in (work.items, work.share_start, work.groups, work.counts)
    ]


def test_an_older_plan_raises():
    attn = attention()
    kv = filled(attn)
    old = attn.plan(decode(3))
    new = attn.plan(decode(5, 7))
    row = torch.zeros(1, 1, 16)
    for use in (
        lambda: attn.run(old, torch.zeros(1, 2, 16), kv),
        lambda: attn.write(old, kv, row, row),
        lambda: attn.update(old),
        old.check,
    ):
        with pytest.raises(pageant.ArgumentError, match="plan 1, replaced by plan 2") as caught:
            use()
        assert caught.value.argument == "plan"
    assert means(attn, new, kv) == [2.0, 11.0]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_as_many_plans_as_slots(slots):
    attn = attention(plan_slots=slots)
    kv = filled(attn)
    plans = [attn.plan(decode(n)) for n in range(1, 6)]
    for n, plan in enumerate(plans, start=1):
        if n <= 5 - slots:
            with pytest.raises(pageant.ArgumentError):
                means(attn, plan, kv)
        else:
            assert means(attn, plan, kv) == [(n - 1) / 2]
            attn.update(plan)
            assert means(attn, plan, kv) == [(n - 1) / 2]
    assert len({tuple(addresses(plan)) for plan in plans}) == slots


def test_a_failed_plan_takes_no_slot():
    attn = attention(plan_slots=2)
    kv = filled(attn)
    first, second = attn.plan(decode(3)), attn.plan(decode(5))
    for _ in range(3):
        with pytest.raises(pageant.ArgumentError):
            attn.plan(decode(65))
    assert means(attn, first, kv) == [1.0]
    assert means(attn, second, kv) == [2.0]


def test_buffers_keep_their_addresses():
    attn = attention()
    first = addresses(attn.plan(decode(3)))
    workspace = attn._planner.workspace.partial_out.data_ptr()
    size = attn.workspace_bytes
    for lens in ([1], [8, 8, 8, 8], [], [0, 0]):
        assert addresses(attn.plan(decode(*lens))) == first
    assert attn._planner.workspace.partial_out.data_ptr() == workspace
    assert attn.workspace_bytes == size


def test_update_sees_what_changed_in_place():
    attn = attention()
    kv = filled(attn)
    batch = decode(3, 6)
    plan = attn.plan(batch)
    before = addresses(plan)
    windowed = pageant.Layer(window=3)
    assert means(attn, plan, kv) == [1.0, 10.5]
    for step in range(1, 3):
        batch.seq_lens.add_(1)
        attn.update(plan)
        assert means(attn, plan, kv) == [1.0 + step / 2, 10.5 + step / 2]
        assert means(attn, plan, kv, windowed) == [1.0 + step, 12.0 + step]
    batch.page_table[1] = torch.tensor([5, 6])
    attn.update(plan)
    assert means(attn, plan, kv) == [2.0, 23.5]
    assert addresses(plan) == before


def test_update_sees_slots_and_offsets():
    attn = attention()
    kv = filled(attn)
    batch = Batch.from_lengths([2, 1], [4, 6], [[0, 1], [2, 3]], PAGE)
    plan = attn.plan(batch)
    assert means(attn, plan, kv) == [1.0, 1.5, 10.5]
    batch.query_start_loc[:] = torch.tensor([0, 1, 3])
    batch.slot_mapping[:] = torch.tensor([30, -1, 31])
    attn.update(plan)
    assert means(attn, plan, kv) == [1.5, 10.0, 10.5]
    v = torch.tensor([7.0, 8.0, 9.0])[:, None, None].expand(3, 1, 16)
    attn.write(plan, kv, torch.zeros(3, 1, 16), v)
    assert kv.v[7, :, 0, 0].tolist() == [28.0, 29.0, 7.0, 9.0]


def test_a_failed_update_changes_nothing():
    attn = attention()
    kv = filled(attn)
    batch = decode(3, 6)
    plan = attn.plan(batch)
    batch.seq_lens[1] = 9
    with pytest.raises(pageant.ArgumentError) as caught:
        attn.update(plan)
    assert caught.value.argument == "batch.seq_lens[1]"
    batch.seq_lens[1] = 6
    assert means(attn, plan, kv) == [1.0, 10.5]


def test_a_plan_is_frozen():
    plan = attention().plan(decode(3))
    with pytest.raises(FrozenInstanceError):
        plan.generation = 7


def test_two_attentions_do_not_disturb_each_other():
    one, two = attention(), attention()
    kv = filled(one)
    plan = one.plan(decode(3))
    for n in range(1, 5):
        two.plan(decode(n))
    assert means(one, plan, kv) == [1.0]


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_very_many_requests(splits, rows):
    """66,000 requests are planned in under a second."""
    count = 66_000
    attn = attention(
        pageant.Limits(max_requests=count, max_tokens=rows * count, max_seq_len=64),
        debug_splits=splits,
    )
    lens = torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(0)).int()
    batch = Batch(
        query_start_loc=torch.arange(0, rows * count + 1, rows, dtype=torch.int32),
        seq_lens=lens,
        page_table=torch.arange(16 * count, dtype=torch.int32).view(count, 16),
        slot_mapping=torch.arange(rows * count),
        num_requests=count,
        num_tokens=rows * count,
        max_query_len=rows,
        max_seq_len=63,
    )
    attn.plan(batch)
    best = min(_seconds(attn, batch) for _ in range(3))
    assert best < 1.0, f"{best:.2f} s"


def _seconds(attn, batch):
    start = time.perf_counter()
    attn.plan(batch)
    return time.perf_counter() - start
