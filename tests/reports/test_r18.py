"""R18: "buffer too small" in the middle of serving, while much memory was free.

The workspace is made once and bounds every batch within the limits; it is no larger than a tenth
more than what some batch really uses.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageant
from pageant.plan import prefix
from pageant.plan.work import FIRST_PARTIAL, NUM_PARTIALS, PARTIAL, QUERY_END
from tests.reports.scene import PLAIN

UNTOUCHED = 12345.0
REQUESTS, TOKENS, SPEC, LONGEST = 4, 16, 3, 4096
PAGE = 64


@pytest.fixture(params=[1, 2, 3, 5])
def workers(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _always_share(monkeypatch):
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=1, because="a test"),))


def attention(requests=REQUESTS, windows=(None,), out_formats=("model",), **options):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(
            max_requests=requests, max_tokens=requests * (SPEC + 1), max_seq_len=LONGEST
        ),
        pageant.Features(windows=windows, out_formats=out_formats),
        pageant.Options(**{"speculative_tokens": SPEC, **options}),
    )


def batch(lengths, shared_pages=None):
    """Lengths (m, n) a request; `shared_pages` of each are those of the one before it."""
    tables, free = [], iter(range(10**6))
    for (_, n), shared in zip(lengths, shared_pages or [0] * len(lengths), strict=True):
        count = -(-n // PAGE)
        common = tables[-1][: min(shared, count)] if tables else []
        tables.append(common + [next(free) for _ in range(count - len(common))])
    query_lens, seq_lens = zip(*lengths, strict=True) if lengths else ((), ())
    return pageant.Batch.from_lengths(list(query_lens), list(seq_lens), tables, PAGE)


def assert_fits(attn, plan):
    """Every partial result that the plan's kernels write and read has a slot, and rows enough."""
    room, works = attn._planner.workspace, []
    for (phase, window), work in plan.buffers.work.items():
        works.append((work, room))
        shared = plan.buffers.shared.get(window) if phase == "decode" else None
        if shared is not None:
            works.append((shared.work, room.shared))
            assert shared.slots.max(initial=-1) < room.partial_lse[..., 0].numel()
    for work, room in works:
        items, groups = work.items[: work.counts[0]], work.groups[: work.counts[1]]
        assert work.counts[0] <= len(work.items)
        slots, rows = room.partial_lse.shape[:2]
        cut = items[items[:, PARTIAL] >= 0]
        assert cut[:, PARTIAL].max(initial=-1) < slots
        assert cut[:, QUERY_END].max(initial=0) <= rows
        assert groups[:, [FIRST_PARTIAL, NUM_PARTIALS]].sum(1).max(initial=0) <= slots


def touched(attn, step, layer=PLAIN):
    """Bytes of the workspace that one step writes."""
    workspace = attn._planner.workspace
    parts = [workspace.partial_out, workspace.partial_lse, workspace.finished]
    if workspace.shared is not None:
        parts += [workspace.shared.partial_out, workspace.shared.partial_lse]
    for part in parts:
        part.fill_(UNTOUCHED)
    pages = max(step.page_table.flatten().tolist(), default=0) + 1
    kv = attn.new_cache(num_layers=1, num_pages=pages)[0]
    q = torch.ones(step.num_tokens, 2, 16)
    attn.run(attn.plan(step), q, kv, layer)
    return sum(int((part != UNTOUCHED).sum()) * part.element_size() for part in parts)


numbers = st.lists(
    st.tuples(st.integers(0, SPEC + 1), st.integers(0, LONGEST), st.integers(0, LONGEST // PAGE)),
    max_size=REQUESTS,
)


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("cascade", [True, False])
def test_random_batches_never_exceed_it(workers, splits, cascade):
    attn = attention(windows=(None, 100), debug_splits=splits, cascade=cascade)
    size = attn.workspace_bytes

    @settings(max_examples=100)
    @given(numbers)
    def fits(lengths):
        step = batch([(m, n) for m, n, _ in lengths], [shared for *_, shared in lengths])
        assert_fits(attn, attn.plan(step))
        assert attn.workspace_bytes == size

    fits()


@pytest.mark.parametrize("requests", [1, 2, 8])
def test_no_plain_batch_needs_a_tenth_less(workers, requests):
    """The worst: each cut goes through a request of its own, with all rows a decode may have."""
    attn = attention(requests=requests, cascade=False)
    cut = min(requests, max(workers - 1, 1))
    worst = touched(attn, batch([(SPEC + 1, LONGEST)] * cut))
    assert (worst > 0) == (workers > 1)
    assert worst <= attn.workspace_bytes <= 1.1 * worst


def test_no_batch_that_shares_needs_a_tenth_less(workers):
    """All begin alike, the halves and the quarters go on alike: three levels, and own keys."""
    attn = attention(requests=64)
    tables, free = [], iter(range(10**6))
    # Lengths such that no cut falls between two gathered requests.
    levels = [[next(free) for _ in range(pages)] for pages in (13, 11, 11, 8, 8, 8, 8)]
    for r in range(64):
        own = [next(free) for _ in range(LONGEST // PAGE - 32)]
        tables.append(levels[0] + levels[1 + r // 32] + levels[3 + r // 16] + own)
    step = pageant.Batch.from_lengths([SPEC + 1] * 64, [LONGEST] * 64, tables, PAGE)
    assert {group.level for group in attn.plan(step).shared[None]} == {0, 1, 2}
    worst = touched(attn, step)
    assert worst <= attn.workspace_bytes <= 1.1 * worst


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_no_forced_split_needs_a_tenth_less(splits):
    attn = attention(debug_splits=splits, cascade=False)
    worst = touched(attn, batch([(SPEC + 1, LONGEST)] * REQUESTS))
    if splits == 1:  # whole requests leave nothing
        assert worst == 0
    else:
        assert worst <= attn.workspace_bytes <= 1.1 * worst


def test_a_quantised_output_waits_in_it():
    attn = attention(out_formats=("model", "fp8_e4m3"), debug_splits=2, cascade=False)
    layer = replace(PLAIN, out_format="fp8_e4m3")
    worst = touched(attn, batch([(SPEC + 1, LONGEST)] * REQUESTS), layer)
    assert worst <= attn.workspace_bytes <= 1.1 * worst


def test_it_is_made_once_and_known_before():
    attn = attention()
    room = attn._planner.workspace
    before = [room.partial_out.data_ptr(), room.partial_lse.data_ptr()]
    for count in (REQUESTS, 0, 1, REQUESTS):
        touched(attn, batch([(SPEC + 1, LONGEST)] * count))
        assert attn._planner.workspace is room
        assert [room.partial_out.data_ptr(), room.partial_lse.data_ptr()] == before


def test_buffers_that_no_memory_holds_are_an_error_when_built():
    with pytest.raises(pageant.ArgumentError) as caught:
        attention(requests=2**20, debug_splits=2**10)
    assert caught.value.argument in ("limits", "debug_splits")
