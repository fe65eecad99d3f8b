"""R26: a request's bits changed with its batch, with chunking, and with what was cached before.

One request's tokens are computed in many ways: alone, among others, whole, in pieces, one by one,
over pages of other sizes. In invariant mode every row has the same bits each time, output and lse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pageant
from pageant.cache.formats import FORMATS
from tests.inputs import BOUNDS, MEMORIES

LENGTH = 200  # tokens of the request


@dataclass(frozen=True)
class Request:
    """The tokens of one request, each [tokens, heads, size]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(cls, shape: pageant.Shape, length: int, seed: int) -> Request:
        rng = torch.Generator().manual_seed(seed)
        sizes = (
            (shape.num_q_heads, shape.head_dim),
            (shape.num_kv_heads, shape.head_dim),
            (shape.num_kv_heads, shape.value_dim),
        )
        drawn = (torch.randn(length, *size, generator=rng).to(shape.dtype) for size in sizes)
        return cls(*drawn)


@dataclass(frozen=True)
class Way:
    """How the request is computed.

    Attributes:
        pieces: its tokens are computed in steps that end here.
        before, after: (new tokens, keys) of the requests that stand around it.
        page_size, layout: of the cache.
        speculative: draft tokens that count as a decode.
        padding: rows at the end of the batch.
    """

    pieces: tuple[int, ...] = (LENGTH,)
    before: tuple[tuple[int, int], ...] = ()
    after: tuple[tuple[int, int], ...] = ()
    page_size: int = 16
    layout: str = "LBHNC"
    speculative: int = 0
    padding: int = 0


@dataclass(frozen=True)
class Setting:
    """What is computed, however it is."""

    shape: pageant.Shape
    layer: pageant.Layer
    format: str = "auto"

    def compute(self, way: Way, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse of all tokens."""
        attn = pageant.Attention(
            self.shape,
            pageant.CacheSpec(format=self.format, page_size=way.page_size, layout=way.layout),
            pageant.Limits(max_requests=80, max_tokens=1024, max_seq_len=1024),
            pageant.Features.of([self.layer], lse=True),
            pageant.Options(invariant=True, speculative_tokens=way.speculative),
        )
        assert {row.name for row in attn.explain().rows.values()} == {"cpu.invariant"}
        target = Request.random(self.shape, LENGTH, seed)
        others = [
            Request.random(self.shape, n, seed + 1 + i)
            for i, (_, n) in enumerate((*way.before, *way.after))
        ]
        requests = [*others[: len(way.before)], target, *others[len(way.before) :]]
        place = len(way.before)
        width = -(-max(LENGTH, *(n for _, n in (*way.before, *way.after, (0, 1)))) // way.page_size)
        order = torch.randperm(len(requests) * width, generator=torch.Generator().manual_seed(seed))
        table = order.view(len(requests), width).int()
        cache = attn.new_cache(num_layers=1, num_pages=len(order))[0]
        steps = zip((0, *way.pieces), way.pieces, strict=False)
        outs, lses = [], []
        for begin, end in steps:
            lens = [*way.before, (end - begin, end), *way.after]
            rows = [r.q[n - m : n] for r, (m, n) in zip(requests, lens, strict=True)]
            starts = torch.tensor([0, *(m for m, _ in lens)]).cumsum(0)
            self._fill(attn, cache, table, requests, lens)
            tokens = int(starts[-1])
            plan = attn.plan(
                pageant.Batch(
                    query_start_loc=starts.int(),
                    seq_lens=torch.tensor([n for _, n in lens], dtype=torch.int32),
                    page_table=table,
                    slot_mapping=torch.full((tokens + way.padding,), -1),
                    num_requests=len(lens),
                    num_tokens=tokens + way.padding,
                    max_query_len=max(m for m, _ in lens),
                    max_seq_len=max(n for _, n in lens),
                )
            )
            q = torch.cat([*rows, torch.full((way.padding, *target.q.shape[1:]), torch.nan)])
            out, lse = attn.run(plan, q.to(self.shape.dtype), cache, self.layer, return_lse=True)
            mine = slice(int(starts[place]), int(starts[place + 1]))
            outs.append(out[mine])
            lses.append(lse[mine])
        return torch.cat(outs), torch.cat(lses)

    def _fill(
        self,
        attn: pageant.Attention,
        cache: pageant.LayerCache,
        table: torch.Tensor,
        requests: list[Request],
        lens: list[tuple[int, int]],
    ) -> None:
        """Keys and values of all tokens the requests have by now."""
        for row, request, (_, n) in zip(table.long(), requests, lens, strict=True):
            at = torch.arange(n)
            slots = row[at // attn.cache.page_size] * attn.cache.page_size
            pageant.ops.write_pages(
                request.k[:n],
                request.v[:n],
                cache.k,
                cache.v,
                slots + at % attn.cache.page_size,
                k_scales=cache.k_scales,
                v_scales=cache.v_scales,
                format=cache.format.name,
                scales=(self.layer.k_scale, self.layer.v_scale),
            )


def shape(**sizes: Any) -> pageant.Shape:
    base = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
    return pageant.Shape(**{**base, **sizes})


CROWD = ((1, 1), (1, 300), (3, 90), (1, 64), (40, 129), (0, 10), (1, 17))
WAYS = (
    Way(after=CROWD),  # first of eight
    Way(before=CROWD * 9),  # last of sixty-four
    Way(before=CROWD[:2], after=CROWD[2:], padding=7),
    Way(pieces=(50, 100, 150, 200)),
    Way(pieces=(1, *range(2, LENGTH + 1)), after=((1, 500),)),  # a decode each time
    Way(pieces=(3, 10, 14, 141, 143, 200), speculative=3, before=((2, 64),)),
    Way(page_size=1),
    Way(page_size=48, layout="LBNHC", pieces=(63, 64, 65, 128, 200)),
    Way(page_size=256, layout="BHLNC"),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_the_same_bits(way, dtype):
    setting = Setting(shape(dtype=dtype), pageant.Layer(sinks=torch.linspace(-1, 1, 6)))
    assert_same_bits(setting.compute(way), setting.compute(Way()))


@pytest.mark.parametrize("format", list(FORMATS))
def test_the_same_bits_with_every_format(format):
    setting = Setting(shape(num_q_heads=3, num_kv_heads=1), pageant.Layer(window=70), format)
    alone = setting.compute(Way())
    for way in WAYS[1::2]:
        assert_same_bits(setting.compute(way), alone)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_with_any_number_of_threads(threads, monkeypatch):
    setting = Setting(shape(num_kv_heads=6), pageant.Layer())
    alone = setting.compute(Way())
    monkeypatch.setattr("pageant.kernels.cpu.attention.THREAD_READS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert_same_bits(setting.compute(Way(after=CROWD, pieces=(100, 130, 200))), alone)


@st.composite
def ways(draw: Any) -> Way:
    others = st.lists(st.tuples(st.integers(0, 20), st.integers(20, 150)), max_size=4).map(tuple)
    ends = draw(st.sets(st.integers(1, LENGTH - 1), max_size=4))
    return Way(
        pieces=(*sorted(ends), LENGTH),
        before=draw(others),
        after=draw(others),
        page_size=draw(st.sampled_from((1, 3, 16, 64, 100))),
        layout=draw(st.sampled_from(MEMORIES[:6])),
        speculative=draw(st.integers(0, 8)),
        padding=draw(st.integers(0, 3)),
    )


@st.composite
def settings(draw: Any) -> Setting:
    heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    sizes = st.sampled_from((16, 24, 40, 64, 128))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    maybe = st.booleans()
    return Setting(
        shape(
            num_q_heads=heads * group,
            num_kv_heads=heads,
            head_dim=draw(sizes),
            v_head_dim=draw(sizes),
            dtype=draw(st.sampled_from(list(BOUNDS))),
        ),
        pageant.Layer(
            window=draw(st.one_of(st.none(), st.integers(1, 150))),
            soft_cap=draw(st.sampled_from((None, 2.0))),
            sinks=torch.randn(heads * group, generator=random) if draw(maybe) else None,
            alibi_slopes=torch.rand(heads * group, generator=random) if draw(maybe) else None,
            k_scale=0.7,
            v_scale=1.3,
        ),
        draw(st.sampled_from(list(FORMATS))),
    )


@given(settings(), ways(), ways())
def test_the_same_bits_in_any_combination(setting, one, other):
    assert_same_bits(setting.compute(one), setting.compute(other))


def assert_same_bits(got: Any, want: Any) -> None:
    for part, expected in zip(got, want, strict=True):
        assert part.shape == expected.shape
        assert torch.equal(part, expected)
