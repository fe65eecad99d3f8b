"""What kernels read is the plan's own: tensors of the batch may change behind its back."""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Batch
from pageant.plan import copies
from tests.reports.scene import each_kernel, each_phase

PAGE, PAGES = 4, 12
MASK = torch.rand(10, 5, generator=torch.Generator().manual_seed(2)) < 0.5
PARENTS = torch.tensor([-1, 0, 0, 2, 1, -1, -1, -1, 0, 1], dtype=torch.int32)
CAUSAL = torch.tensor([True, False, True])
ENCODER = torch.tensor([7, 16, 2], dtype=torch.int32)
FIELDS = {
    "query_start_loc": {},
    "seq_lens": {},
    "page_table": {},
    "slot_mapping": {},
    "causal": {"causal": CAUSAL},
    "draft_mask": {"draft_mask": MASK},
    "draft_parents": {"draft_parents": PARENTS},
    "encoder_seq_lens": {"encoder_seq_lens": ENCODER},
}


def attention(kernels="auto", phase="decode", **limits):
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(**{"max_requests": 4, "max_tokens": 16, "max_seq_len": 40, **limits}),
        pageant.Features(windows=(None, 3), draft_masks=True, non_causal=True, lse=True),
        pageant.Options(kernels=kernels, speculative_tokens=7 if phase == "decode" else 0),
    )


def batch(**others):
    """Five, two and three new tokens; every tensor is this batch's alone."""
    step = Batch.from_lengths([5, 2, 3], [8, 14, 3], [[7, 2], [5, 0, 3, 9], [1]], PAGE)
    return replace(step, **{name: value.clone() for name, value in others.items()})


def spoil(tensor):
    """Numbers far outside everything: reading by them would read foreign memory."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(2**30)


def results(attn, plan, kv):
    """All that write and run make of a plan."""
    rng = torch.Generator().manual_seed(3)
    for view in (kv.k, kv.v):
        view.copy_(torch.randn(view.shape, generator=rng))
    rows = torch.randn(16, 8, 16, generator=rng)
    attn.write(plan, kv, rows[:, :2], rows[:, 2:4])
    layers = pageant.Layer(), pageant.Layer(window=3)
    answers = [attn.run(plan, rows[:10, 4:], kv, layer, return_lse=True) for layer in layers]
    return [kv.k.clone(), kv.v.clone(), *(tensor for answer in answers for tensor in answer)]


def updated(attn, plan, kv):
    attn.update(plan)
    return results(attn, plan, kv)


@pytest.mark.parametrize("field", FIELDS)
@each_phase
@each_kernel
def test_tensors_changed_after_planning(kernels, phase, field):
    attn = attention(kernels, phase)
    kv = attn.new_cache(num_layers=1, num_pages=PAGES)[0]
    step = batch(**FIELDS[field])
    plan = attn.plan(step)
    want = results(attn, plan, kv)
    spoil(getattr(step, field))
    for got, expected in zip(results(attn, plan, kv), want, strict=True):
        assert torch.equal(got, expected)
    if field not in ("causal", "draft_mask"):  # masks may hold anything
        with pytest.raises(pageant.ArgumentError) as caught:
            updated(attn, plan, kv)
        assert caught.value.argument.startswith(f"batch.{field}")


@pytest.mark.parametrize("others", FIELDS.values(), ids=FIELDS)
def test_a_plan_reads_none_of_the_batchs_memory(others):
    attn = attention()
    step = batch(**others)
    copy = attn.plan(step).buffers.batch
    index = copy.writes
    own = [copy.query_start_loc, copy.key_lens, copy.page_table, copy.causal, copy.draft_mask]
    own += [index.tokens, index.pages, index.rows]
    own = {x.untyped_storage().data_ptr() for x in own if isinstance(x, torch.Tensor)}
    theirs = {
        x.untyped_storage().data_ptr() for x in vars(step).values() if isinstance(x, torch.Tensor)
    }
    assert own
    assert not own & theirs


def test_addresses_stay():
    attn = attention()
    seen = []
    for lens in ([40, 40, 40, 40], [1], [5, 17]):
        tables = [list(range(10)) for _ in lens]
        copy = attn.plan(Batch.from_lengths([1] * len(lens), lens, tables, PAGE)).buffers.batch
        seen.append([x.data_ptr() for x in (copy.query_start_loc, copy.key_lens, copy.page_table)])
        assert copy.page_table.shape[1] >= -(-max(lens) // PAGE)
        for line, n in zip(copy.page_table.tolist(), lens, strict=True):
            used = -(-n // PAGE)
            assert line[:used] == list(range(used))
    assert seen[0] == seen[1] == seen[2]


def test_tables_too_large_to_make_in_advance_grow(monkeypatch):
    monkeypatch.setattr(copies, "MOST_PAGE_IDS", 2)
    attn = attention(kernels="reference")
    addresses = []
    for n in (40, 8, 40):
        plan = attn.plan(Batch.from_lengths([1], [n], [list(range(10))], PAGE))
        table = plan.buffers.batch.page_table
        assert table.tolist() == [list(range(-(-n // PAGE)))]
        addresses.append(table.data_ptr())
    assert addresses[0] == addresses[1] == addresses[2]


@pytest.mark.parametrize("planned_in", [True, False])
def test_inference_mode_may_come_and_go(planned_in):
    with torch.inference_mode(not planned_in):
        attn = attention()
    step = batch(causal=CAUSAL, draft_mask=MASK)
    for mode in (planned_in, not planned_in):
        with torch.inference_mode(mode):
            kv = attn.new_cache(num_layers=1, num_pages=PAGES)[0]
            plan = attn.plan(step)
            attn.update(plan)
            results(attn, plan, kv)
