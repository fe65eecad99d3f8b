"""R30: one long request is shared out over the device; a windowed layer reads its window alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pageant
from pageant import Layer, graphs
from tests.gpu.scene import PAGE, attention, batch, noise, rows, seconds

pytestmark = pytest.mark.gpu

LONG = 131072
TOTAL = 2 * LONG
WINDOWED = Layer(window=128)
SHAPE = pageant.Shape(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def bandwidth() -> float:
    """Bytes a second that the device reads or copies, whichever is more."""
    x, y = (torch.zeros(1 << 28, dtype=torch.float32, device="cuda") for _ in range(2))
    reading = x.nbytes / seconds(x.sum, 10)
    return max(reading, 2 * x.nbytes / seconds(lambda: y.copy_(x), 10))


@pytest.mark.parametrize("count", [1, 8, 16, 64])
def test_decodes_take_what_their_bytes_take(count):
    """The same number of keys in all, half of them one request's where there are several."""
    layers = 2
    limits = pageant.Limits(max_requests=64, max_tokens=64, max_seq_len=TOTAL)
    attn = attention(limits, shape=SHAPE)
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("too little memory")
    kv = noise(attn, TOTAL // PAGE + 64, layers)
    rest = (TOTAL - LONG) // max(count - 1, 1)
    lens = [TOTAL] if count == 1 else [LONG, *[rest] * (count - 1)]
    q, out = rows(64, 32, 128), torch.empty(64, 32, 128, dtype=SHAPE.dtype, device="cuda")

    def step(plan):
        for index in range(layers):
            attn.run(plan, q, kv[index], out=out)

    graph = graphs.capture(attn, step, tokens=64)
    pages = np.random.default_rng(30).permutation(TOTAL // PAGE + 64)
    graph.replay(batch([1] * count, lens, pages, slot_mapping=None))
    took = seconds(graph.recorded.replay, 20) / layers
    fair = sum(lens) * 8 * 2 * 128 * 2 / bandwidth()
    assert took <= 1.3 * fair, f"{took * 1e6:.0f} us, {took / fair:.2f} of what the bytes take"


@pytest.mark.parametrize("query_len", [1, 4, 300])
@pytest.mark.parametrize("invariant", [False, True])
def test_pages_outside_the_window_may_hold_anything(query_len, invariant):
    """At 131,072 keys: NaN in every other page, then page ids that do not exist."""
    limits = pageant.Limits(max_requests=1, max_tokens=512, max_seq_len=LONG)
    attn = attention(limits, (WINDOWED,), invariant=invariant, speculative_tokens=3)
    kv = noise(attn, LONG // PAGE + 1)[0]
    q = rows(query_len, 8, 64)
    pages = np.random.default_rng(query_len).permutation(LONG // PAGE + 1)
    step = batch([query_len], [LONG], pages, slot_mapping=None)
    want = attn.run(attn.plan(step), q, kv, WINDOWED, return_lse=True)
    unseen = (LONG - query_len - WINDOWED.window + 1) // PAGE
    seen = step.page_table[0, unseen:].long()
    for view in (kv.k, kv.v):
        kept = view[seen].clone()
        view.fill_(torch.nan)
        view[seen] = kept
    for _ in range(2):
        got = attn.run(attn.plan(step), q, kv, WINDOWED, return_lse=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        step.page_table[0, :unseen] = 2**31 - 1
    kv.k[seen[1]] = torch.nan  # and the window is read
    assert attn.run(attn.plan(step), q, kv, WINDOWED).isnan().any()
