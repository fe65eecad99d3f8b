"""R19: a replayed step read old lengths or page ids, padded rows touched live pages, and a batch
larger than what was captured was taken. Here without graphs: what a replay stands on.

One set of buffers at fixed addresses serves every batch within the limits; a larger one is an error
that changes nothing.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Layer
from tests.reports.scene import each_kernel, each_phase

PAGE, ROOM, LONGEST = 16, 8, 5000
WINDOWED = Layer(window=100)
NOWHERE = 2**31 - 1


def attention(kernels="auto", phase="decode", draft_tokens=0):
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=ROOM, max_tokens=ROOM, max_seq_len=LONGEST),
        pageant.Features.of([Layer(), WINDOWED], lse=True),
        pageant.Options(
            kernels=kernels, speculative_tokens=7 if phase == "decode" else draft_tokens
        ),
    )


def pool(attn, num_pages=400):
    kv = attn.new_cache(num_layers=1, num_pages=num_pages)[0]
    rng = torch.Generator().manual_seed(19)
    for view in (kv.k, kv.v):
        view.copy_(torch.randn(view.shape, generator=rng))
    return kv


def capture(lens, query_lens=None):
    """A batch as wide as the limits; requests past those given are padding, of no tokens."""
    step = pageant.Batch(
        query_start_loc=torch.zeros(ROOM + 1, dtype=torch.int32),
        seq_lens=torch.zeros(ROOM, dtype=torch.int32),
        page_table=torch.full((ROOM, -(-LONGEST // PAGE)), NOWHERE, dtype=torch.int32),
        slot_mapping=torch.full((ROOM,), -1),
        num_requests=ROOM,
        num_tokens=ROOM,
        max_query_len=ROOM,
        max_seq_len=LONGEST,
    )
    change(step, lens, query_lens)
    return step


def change(step, lens, query_lens=None, first_page=0):
    """Write other requests into the batch's own tensors."""
    query_lens = query_lens or [1] * len(lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    step.query_start_loc[:] = starts[-1]
    step.query_start_loc[: len(starts)] = starts
    step.seq_lens.zero_()
    step.page_table.fill_(NOWHERE)
    page = first_page
    for r, n in enumerate(lens):
        count = -(-n // PAGE)
        step.seq_lens[r] = n
        step.page_table[r, :count] = torch.arange(page, page + count).flip(0)
        page += count
    return page


def alone(attn, step, q, kv, layer, real):
    """The real requests planned on their own, in a batch without padding."""
    tokens = int(step.query_start_loc[real])
    batch = replace(
        step,
        query_start_loc=step.query_start_loc[: real + 1].clone(),
        seq_lens=step.seq_lens[:real].clone(),
        page_table=step.page_table[:real].clone(),
        slot_mapping=step.slot_mapping[:tokens],
        num_requests=real,
        num_tokens=tokens,
    )
    return attn.run(attn.plan(batch), q[:tokens], kv, layer, return_lse=True)


@each_kernel
@each_phase
@pytest.mark.parametrize("layer", [Layer(), WINDOWED], ids=["plain", "window"])
def test_replay_with_other_lengths_and_pages(kernels, phase, layer):
    """Planned for eight requests of one key; then five of 1 to 5,000, elsewhere, and so on."""
    attn, other = attention(kernels, phase), attention(kernels, phase)
    kv, q = pool(attn), torch.randn(ROOM, 4, 16, generator=torch.Generator().manual_seed(1))
    step = capture([1] * ROOM)
    plan = attn.plan(step)
    for lens, query_lens in (
        ([1, 5000, 99, 100, 101], None),
        ([3, 700], [3, 2]),
        ([], None),
        ([17] * ROOM, None),
    ):
        change(step, lens, query_lens, first_page=20)
        attn.update(plan)
        tokens = int(step.query_start_loc[-1])
        rows = q.clone()
        rows[tokens:] = torch.nan
        out = torch.full_like(q, 77.0)
        _, lse = attn.run(plan, rows, kv, layer, out=out, return_lse=True)
        want, want_lse = alone(other, step, q, kv, layer, len(lens))
        assert torch.equal(out[:tokens], want)
        assert torch.equal(lse[:tokens], want_lse)
        assert (out[tokens:] == 77.0).all()


@each_kernel
@each_phase
def test_padding_writes_and_reads_no_page(kernels, phase):
    """Requests of no tokens may name any page and any length; slots below 0 are not written."""
    attn = attention(kernels, phase)
    kv = pool(attn)
    step = capture([40, 5])
    step.seq_lens[2:] = LONGEST  # told, but without a token to see them
    step.slot_mapping[:2] = torch.tensor([int(step.page_table[0, 2]) * PAGE + 7, -1])
    plan = attn.plan(step)
    before = kv.k.clone(), kv.v.clone()
    rows = torch.full((ROOM, 2, 16), 9.0)
    attn.write(plan, kv, rows, rows)
    for view, old in zip((kv.k, kv.v), before, strict=True):
        changed = (view != old).any(-1).any(-1).nonzero().tolist()
        assert changed == [[int(step.page_table[0, 2]), 7]]


@each_kernel
@each_phase
@pytest.mark.parametrize(
    ("field", "value", "limit"), [("num_requests", 9, 8), ("num_tokens", 9, 8)]
)
def test_a_batch_above_the_bound_is_an_error(kernels, phase, field, value, limit):
    attn = attention(kernels, phase)
    kv, q = pool(attn), torch.ones(ROOM, 4, 16)
    plan = attn.plan(capture([30, 20]))
    want = attn.run(plan, q, kv)
    with pytest.raises(pageant.ArgumentError, match=f"{value}.*at most {limit}") as caught:
        attn.plan(replace(capture([1] * ROOM), **{field: value}))
    assert caught.value.argument == f"batch.{field}"
    assert torch.equal(attn.run(plan, q, kv), want)  # the older plan still holds


@each_kernel
@each_phase
@pytest.mark.parametrize("where", ["seq_lens", "query_start_loc", "page_table"])
def test_an_update_beyond_the_bounds_changes_nothing(kernels, phase, where):
    attn = attention(kernels, phase)
    kv, q = pool(attn), torch.ones(ROOM, 4, 16)
    step = capture([30, 20])
    plan = attn.plan(step)
    want = attn.run(plan, q, kv)
    getattr(step, where)[1] = {"seq_lens": LONGEST + 1, "query_start_loc": 9, "page_table": -1}[
        where
    ]
    with pytest.raises(pageant.ArgumentError) as caught:
        attn.update(plan)
    assert caught.value.argument.startswith(f"batch.{where}")
    assert torch.equal(attn.run(plan, q, kv), want)


@each_kernel
def test_one_set_of_buffers_for_all_sizes(kernels):
    attn, seen = attention(kernels), set()
    for lens in ([1] * ROOM, [5000], [], [5000] * ROOM):
        plan = attn.plan(capture(lens))
        buffers, works = plan.buffers, plan.buffers.work
        arrays = [a for key in sorted(works, key=str) for a in vars(works[key]).values()]
        tensors = [buffers.batch.query_start_loc, buffers.batch.key_lens]
        tensors += [buffers.batch.page_table, attn._planner.workspace.partial_out]
        seen.add(
            (*(a.ctypes.data for a in arrays), *(x.untyped_storage().data_ptr() for x in tensors))
        )
    assert len(seen) == 1
