"""Fused draft steps: one plan, updated after its batch's tensors changed in place, again and again.

Each step's answer is that of a new plan, bit for bit, and the reference's over the same pages.
"""

from dataclasses import replace

import pytest
import torch

import pageant
from pageant import Layer
from tests.inputs import assert_close
from tests.reports.scene import each_kernel, each_phase

PAGE, PAGES, TOKENS, REQUESTS = 4, 64, 16, 3
LAYERS = (Layer(k_scale=0.5, v_scale=2.0), Layer(window=6, soft_cap=3.0))
# Of each step: new tokens and keys of every request.
STEPS = (
    ((3, 1, 2), (9, 30, 2)),
    ((1, 4, 0), (10, 34, 2)),
    ((4, 4, 4), (14, 38, 6)),
    ((0, 0, 1), (14, 38, 7)),
    ((1, 1, 1), (15, 39, 8)),
    ((4, 3, 1), (40, 3, 1)),  # requests end and others take their place
)


def attention(kernels, phase, format="fp8_e4m3", **options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE, format=format),
        pageant.Limits(max_requests=REQUESTS, max_tokens=TOKENS, max_seq_len=40),
        pageant.Features.of(LAYERS, lse=True, draft_masks=True, non_causal=True),
        pageant.Options(
            kernels=kernels, speculative_tokens=3 if phase == "decode" else 0, **options
        ),
    )


def pool(attn, seed=5):
    kv = attn.new_cache(num_layers=1, num_pages=PAGES)[0]
    rng = torch.Generator().manual_seed(seed)
    slots = torch.arange(PAGES * PAGE)
    k, v = (torch.randn(len(slots), 2, 16, generator=rng) for _ in range(2))
    scales = {"k_scales": kv.k_scales, "v_scales": kv.v_scales}
    pageant.ops.write_pages(k, v, kv.k, kv.v, slots, format=kv.format.name, **scales)
    return kv


def empty(drafts):
    """A batch of the largest size, to be filled in place."""
    others = {
        "chain": {},
        "parents": {"draft_parents": torch.full((TOKENS,), -1, dtype=torch.int32)},
        "mask": {"draft_mask": torch.zeros(TOKENS, 4, dtype=torch.bool)},
        "causal": {"causal": torch.ones(REQUESTS, dtype=torch.bool)},
    }[drafts]
    return pageant.Batch(
        query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32),
        seq_lens=torch.zeros(REQUESTS, dtype=torch.int32),
        page_table=torch.zeros(REQUESTS, 10, dtype=torch.int32),
        slot_mapping=torch.full((TOKENS,), -1),
        num_requests=REQUESTS,
        num_tokens=TOKENS,
        max_query_len=4,
        max_seq_len=40,
        **others,
    )


def change(batch, turn):
    """The next step, in the batch's own memory: every tensor differs from the step before."""
    rng = torch.Generator().manual_seed(turn)
    lens, keys = STEPS[turn]
    batch.query_start_loc[1:] = torch.tensor(lens).cumsum(0)
    batch.seq_lens[:] = torch.tensor(keys)
    batch.page_table[:] = torch.randperm(PAGES, generator=rng)[: 10 * REQUESTS].view(REQUESTS, 10)
    batch.slot_mapping.fill_(-1)
    row = 0
    for r, (m, n) in enumerate(zip(lens, keys, strict=True)):
        for i in range(m):
            page = batch.page_table[r, (n - m + i) // PAGE]
            batch.slot_mapping[row] = int(page) * PAGE + (n - m + i) % PAGE
            if batch.draft_parents is not None:
                batch.draft_parents[row] = (
                    int(torch.randint(-1, i, (1,), generator=rng)) if i else -1
                )
            row += 1
    if batch.draft_mask is not None:
        batch.draft_mask[:] = torch.rand(TOKENS, 4, generator=rng) < 0.5
    if isinstance(batch.causal, torch.Tensor):
        batch.causal[:] = torch.rand(REQUESTS, generator=rng) < 0.5
    return row


def copied(batch):
    """The batch as it is now, in memory of its own."""
    tensors = {name: x.clone() for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    return replace(batch, **tensors)


def written_and_read(attn, plan, kv, turn):
    """Write the new tokens' rows, then run both layers."""
    rng = torch.Generator().manual_seed(100 + turn)
    rows = torch.randn(2, TOKENS, 2, 16, generator=rng)
    q = torch.randn(TOKENS, 4, 16, generator=rng)
    attn.write(plan, kv, rows[0], rows[1], LAYERS[0])
    return [attn.run(plan, q, kv, layer, return_lse=True) for layer in LAYERS]


@each_kernel
@each_phase
@pytest.mark.parametrize(
    ("drafts", "format", "slots"),
    [
        ("chain", "fp32", 1),
        ("parents", "fp8_e4m3", 2),
        ("parents", "nvfp4", 1),
        ("mask", "int8", 2),
        ("mask", "fp8_e4m3", 1),
        ("causal", "nvfp4", 2),
    ],
)
def test_every_step_is_a_plan_of_its_own(kernels, phase, drafts, format, slots):
    attn, fresh = (attention(kernels, phase, format, plan_slots=slots) for _ in range(2))
    exact = attention("reference", phase, format)
    caches = [pool(a) for a in (attn, fresh, exact)]
    batch = empty(drafts)
    plan = attn.plan(batch)
    if slots == 2:
        attn.plan(empty(drafts))  # the other slot's plan stays what it is
    for turn in range(len(STEPS)):
        tokens = change(batch, turn)
        attn.update(plan)
        got = written_and_read(attn, plan, caches[0], turn)
        step = copied(batch)
        new = written_and_read(fresh, fresh.plan(step), caches[1], turn)
        want = written_and_read(exact, exact.plan(step), caches[2], turn)
        for (out, lse), answer, truth in zip(got, new, want, strict=True):
            assert torch.equal(out[:tokens], answer[0][:tokens])
            assert torch.equal(lse[:tokens], answer[1][:tokens])
            assert_close(out[:tokens], truth[0][:tokens], 1e-5)
            assert_close(lse[:tokens], truth[1][:tokens], 1e-5)


@each_kernel
@each_phase
@pytest.mark.parametrize("format", ["fp32", "nvfp4"])
def test_a_non_causal_drafter(kernels, phase, format):
    """Its draft tokens see each other, step after step; a window still hides what lies before."""
    attn = attention(kernels, phase, format, non_causal_drafts=True)
    exact = attention("reference", phase, format)
    assert attn.explain().draft_reuse
    caches = pool(attn), pool(exact)
    batch = replace(empty("chain"), causal=False)
    plan = attn.plan(batch)
    for turn in range(len(STEPS)):
        tokens = change(batch, turn)
        attn.update(plan)
        got = written_and_read(attn, plan, caches[0], turn)
        want = written_and_read(exact, exact.plan(copied(batch)), caches[1], turn)
        causal = exact.plan(replace(copied(batch), causal=True))
        chain = written_and_read(exact, causal, caches[1], turn)
        for (out, lse), truth, other in zip(got, want, chain, strict=True):
            assert_close(out[:tokens], truth[0][:tokens], 1e-5)
            assert_close(lse[:tokens], truth[1][:tokens], 1e-5)
            if max(STEPS[turn][0]) > 1:
                assert not torch.allclose(lse[:tokens], other[1][:tokens])


@each_kernel
@each_phase
def test_a_step_with_a_mistake_leaves_the_plan(kernels, phase):
    """Every field may be wrong at a later step: one error, and the step before runs as it did."""
    attn = attention(kernels, phase)
    kv, batch = pool(attn), empty("parents")
    plan = attn.plan(batch)
    change(batch, 0)
    attn.update(plan)
    want = written_and_read(attn, plan, kv, 0)
    for name, value in (
        ("query_start_loc", -1),
        ("seq_lens", 41),
        ("page_table", -2),
        ("draft_parents", 1),
    ):
        tensor = getattr(batch, name)
        old = tensor.clone()
        tensor.view(-1)[1] = value
        with pytest.raises(pageant.ArgumentError) as caught:
            attn.update(plan)
        assert caught.value.argument.startswith(f"batch.{name}")
        for got, expected in zip(written_and_read(attn, plan, kv, 0), want, strict=True):
            assert torch.equal(got[0], expected[0])
        tensor.copy_(old)
    attn.update(plan)
