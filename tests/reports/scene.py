"""A small attention whose answers can be worked out by hand.

A zero query makes every score zero, so a row's output is the plain mean of the values it sees and
its lse the log of how many there are. Value j is the number j in every element, keys are random,
pages are shuffled, and slots no token lies in hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import pageant
from pageant.kernels import reference
from tests.inputs import BOUNDS, assert_close

KERNELS = ("reference", "auto")
PHASES = ("decode", "prefill")
PLAIN = pageant.Layer()

each_kernel = pytest.mark.parametrize("kernels", KERNELS)
each_phase = pytest.mark.parametrize("phase", PHASES)
each_dtype = pytest.mark.parametrize("dtype", tuple(BOUNDS))


@dataclass(frozen=True)
class Scene:
    """An Attention, one layer's filled cache and a batch over it.

    Attributes:
        front: tokens of the request put before the others to make all of them prefills.
        phase: what the requests must be planned as.
    """

    attn: pageant.Attention
    cache: pageant.LayerCache
    batch: pageant.Batch
    front: int
    phase: str

    def plan(self) -> pageant.Plan:
        plan = self.attn.plan(self.batch)
        prefills = self.batch.num_requests if self.phase == "prefill" else 0
        assert plan.split.num_prefills == prefills
        return plan

    def run(
        self, q: torch.Tensor | None = None, layer: pageant.Layer | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse of the requests asked for; no query is a zero query."""
        shape = self.attn.shape
        rows = torch.zeros(
            self.batch.num_tokens, shape.num_q_heads, shape.head_dim, dtype=shape.dtype
        )
        if q is not None:
            rows[self.front :] = q
        out, lse = self.attn.run(self.plan(), rows, self.cache, layer, return_lse=True)
        return out[self.front :], lse[self.front :]

    def means(self, layer: pageant.Layer | None = None) -> torch.Tensor:
        """One number a token: what a zero query makes of the values."""
        out, _ = self.run(None, layer)
        assert (out == out[:, :1, :1]).all(), "heads or elements differ where all values agree"
        return out[:, 0, 0]


def scene(
    kernels: str,
    phase: str,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    cache: dict[str, Any] | None = None,
    layers: Sequence[pageant.Layer] = (PLAIN,),
    features: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    values: Callable[[int], torch.Tensor] = torch.arange,
    **batch_fields: Any,
) -> Scene:
    """A Scene; `seq_lens` are the encoder's where batch_fields say encoder_seq_lens=True."""
    spec = pageant.CacheSpec(**{"page_size": 4, **(cache or {})})
    front = 0
    query_lens, seq_lens = list(query_lens), list(seq_lens)
    if phase == "prefill":
        front = 2
        query_lens, seq_lens = [2, *query_lens], [2, *seq_lens]
        if isinstance(batch_fields.get("causal"), torch.Tensor):
            batch_fields["causal"] = torch.cat([torch.tensor([True]), batch_fields["causal"]])
        if "draft_parents" in batch_fields:
            first = torch.tensor([-1, 0], dtype=torch.int32)
            batch_fields["draft_parents"] = torch.cat([first, batch_fields["draft_parents"]])
    attn = pageant.Attention(
        pageant.Shape(
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=dims[0],
            v_head_dim=dims[1],
            dtype=dtype,
        ),
        spec,
        pageant.Limits(max_requests=16, max_tokens=256, max_seq_len=4096),
        pageant.Features.of(layers, lse=True, **(features or {})),
        pageant.Options(
            kernels=kernels,
            speculative_tokens=max([1, *query_lens]) - 1 if phase == "decode" else 0,
            **(options or {}),
        ),
    )
    rng = torch.Generator().manual_seed(20)
    page = spec.page_size
    counts = [-(-n // page) for n in seq_lens]
    order = torch.Generator().manual_seed(sum(counts))
    ids = torch.randperm(sum(counts) + 2, generator=order).tolist()
    table = [[ids.pop() for _ in range(count)] for count in counts]
    pages = attn.new_cache(num_layers=1, num_pages=sum(counts) + 2)[0]
    poison(pages)
    for n, row in zip(seq_lens, table, strict=True):
        at = torch.arange(n)
        slots = torch.tensor(row, dtype=torch.int64)[at // page] * page + at % page
        k = torch.randn(n, heads[1], dims[0], generator=rng)
        v = values(n).float().reshape(n, 1, 1).expand(n, heads[1], dims[1])
        reference.write_pages(k, v, pages, slots)
    if batch_fields.pop("encoder_seq_lens", False):
        batch_fields["encoder_seq_lens"] = torch.tensor(seq_lens, dtype=torch.int32)
    batch = pageant.Batch.from_lengths(query_lens, seq_lens, table, page, **batch_fields)
    return Scene(attn, pages, batch, front, phase)


def poison(cache: pageant.LayerCache) -> None:
    """Every slot reads as NaN: elements where the format has one, scales where it stores those."""
    for side in cache.sides:
        poisoned = side.elements if side.scales is None else side.scales
        poisoned[:] = torch.tensor(torch.nan).to(poisoned.dtype)


def assert_means(got: torch.Tensor, want: Sequence[float]) -> None:
    """Each token's mean, to the accuracy of its dtype."""
    assert_close(got[:, None, None], torch.tensor(want)[:, None, None], BOUNDS[got.dtype])
