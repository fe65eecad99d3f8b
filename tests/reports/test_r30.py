"""R30: windowed layers read all keys and masked most; one long request was left to one share.

A windowed layer reads its window: what lies before it may hold anything, and no work is planned
for it. Keys of all requests are cut into equal shares.
"""

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer
from pageant.plan.work import KEY_BEGIN, KEY_END, KEY_TILE, QUERY_BEGIN, QUERY_END, REQUEST
from tests.reports.scene import each_kernel, each_phase

PAGE, WINDOW, LONG = 16, 128, 131072
WINDOWED = Layer(window=WINDOW)


@pytest.fixture
def _four_workers():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(threads)


def attention(kernels="auto", phase="decode", layers=(WINDOWED,)):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(page_size=PAGE),
        pageant.Limits(max_requests=64, max_tokens=1024, max_seq_len=LONG),
        pageant.Features.of(layers, lse=True),
        pageant.Options(kernels=kernels, speculative_tokens=3 if phase == "decode" else 0),
    )


def tables(lens):
    """Every request's own pages."""
    ends = np.cumsum([-(-n // PAGE) for n in lens])
    return [
        list(range(end - -(-n // PAGE), end)) for n, end in zip(lens, ends.tolist(), strict=True)
    ]


def work_of(query_lens, lens, phase, window=WINDOW):
    attn = attention("auto", phase, (Layer(window=window),))
    plan = attn.plan(pageant.Batch.from_lengths(query_lens, lens, tables(lens), PAGE))
    return plan.buffers.work[phase, window]


@each_kernel
@each_phase
@pytest.mark.parametrize("query_len", [1, 4, 40])
def test_pages_before_the_window_may_hold_anything(kernels, phase, query_len):
    """At 131,072 keys: NaN in every page before the window, then page ids that do not exist."""
    if phase == "decode" and query_len > 4:
        query_len = 2
    attn = attention(kernels, phase)
    kv = attn.new_cache(num_layers=1, num_pages=LONG // PAGE)[0]
    rng = torch.Generator().manual_seed(30)
    for view in (kv.k, kv.v):
        view.copy_(torch.randn(view.shape, generator=rng))
    q = torch.randn(query_len, 2, 16, generator=rng)
    step = pageant.Batch.from_lengths([query_len], [LONG], tables([LONG]), PAGE)
    want = attn.run(attn.plan(step), q, kv, WINDOWED, return_lse=True)
    assert want[1].exp().isfinite().all()
    unseen = (LONG - query_len - WINDOW + 1) // PAGE
    kv.k[:unseen] = kv.v[:unseen] = torch.nan
    for _ in range(2):
        got = attn.run(attn.plan(step), q, kv, WINDOWED, return_lse=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        step.page_table[0, :unseen] = 2**31 - 1
    kv.k[unseen + 1] = torch.nan  # and the window is read
    assert attn.run(attn.plan(step), q, kv, WINDOWED).isnan().any()


@pytest.mark.usefixtures("_four_workers")
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_decodes_walk_the_window(query_len, count):
    """At most the window and two tiles of keys a request, however long it is."""
    lens = [LONG, *[n % 3000 + query_len for n in range(0, 977 * (count - 1), 977)]]
    work = work_of([query_len] * count, lens, "decode")
    items = work.items[: work.counts[0]]
    keys = np.bincount(items[:, REQUEST], items[:, KEY_END] - items[:, KEY_BEGIN], count)
    assert (keys <= WINDOW + 2 * KEY_TILE).all()
    assert (keys >= np.minimum(lens, WINDOW)).all()


@pytest.mark.parametrize("query_len", [5, 40, 700])
def test_prefills_walk_the_window(query_len):
    """A tile of rows walks its rows' windows and at most two tiles of keys more."""
    work = work_of([query_len], [LONG], "prefill")
    items = work.items[: work.counts[0]]
    rows = items[:, QUERY_END] - items[:, QUERY_BEGIN]
    keys = items[:, KEY_END] - items[:, KEY_BEGIN]
    assert rows.sum() == query_len
    assert (keys <= WINDOW + rows + 2 * KEY_TILE).all()
    assert (items[:, KEY_BEGIN] <= LONG - query_len + items[:, QUERY_BEGIN] - WINDOW + 1).all()
    assert (items[:, KEY_END] >= LONG - query_len + items[:, QUERY_END]).all()


@pytest.mark.usefixtures("_four_workers")
@pytest.mark.parametrize("count", [1, 8, 16, 64])
@pytest.mark.parametrize("rest", [64, 2000])
def test_one_long_request_is_shared_out(count, rest):
    """Four shares of keys that differ by a tile a cut, whatever the batch."""
    lens = [rest] * (count - 1)
    lens.insert(count // 2, LONG)
    work = work_of([1] * count, lens, "decode", window=None)
    items = work.items[: work.counts[0]]
    keys = items[:, KEY_END] - items[:, KEY_BEGIN]
    shares = [
        keys[low:high].sum()
        for low, high in zip(work.share_start[:-1], work.share_start[1:], strict=True)
    ]
    assert sum(shares) == sum(lens)
    most_rounded = KEY_TILE * (1 + count)  # a request's last tile counts as a whole one
    assert max(shares) - min(shares) <= most_rounded
