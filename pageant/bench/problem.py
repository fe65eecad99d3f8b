"""A case with its numbers: queries, each request's keys and values, and where their pages lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pageant.api import Attention
from pageant.bench.cases import Case
from pageant.cache.calibrate import calibrate
from pageant.plan.batch import Batch
from pageant.types import CacheSpec, Limits, Options, Shape

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """Normal random numbers of a case.

    Attributes:
        case: the sizes.
        q: [T, Hq, D].
        keys, values: one [n, Hkv, D] a request.
        page_table: page ids of each request, shuffled over one pool of just as many pages; those
            of shared tokens are the same for all.
    """

    case: Case
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    page_table: list[list[int]]

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Problem:
        """The numbers that this case and seed stand for."""
        rng = torch.Generator().manual_seed(seed)

        def normal(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, case.head_dim, generator=rng).to(case.dtype)

        common = case.shared // case.page_size
        widths = [-(-n // case.page_size) - common for _, n in case.lengths]
        pool = torch.randperm(common + sum(widths), generator=rng)
        first, *others = pool.split([common, *widths])
        q = normal(sum(m for m, _ in case.lengths), case.q_heads)
        keys, values = ([normal(n, case.kv_heads) for _, n in case.lengths] for _ in range(2))
        for rows in (keys, values):
            for one in rows:
                one[: case.shared] = rows[0][: case.shared]
        return cls(
            case=case,
            q=q,
            keys=keys,
            values=values,
            page_table=[first.tolist() + part.tolist() for part in others],
        )

    @property
    def num_pages(self) -> int:
        """How many pages the table names."""
        return 1 + max(map(max, self.page_table))

    def widened(self) -> Problem:
        """The same numbers in float32."""
        return Problem(
            case=replace(self.case, dtype=torch.float32),
            q=self.q.float(),
            keys=[k.float() for k in self.keys],
            values=[v.float() for v in self.values],
            page_table=self.page_table,
        )

    def attention(self, format: str, **options: Any) -> Run:
        """Pageant over a cache of this format that holds the keys and values.

        Args:
            format: of the cache.
            **options: fields of ``Options``.

        Returns:
            A call that computes out [T, Hq, D] anew, always in the same memory.
        """
        case = self.case
        shape = Shape(
            num_q_heads=case.q_heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            dtype=case.dtype,
        )
        query_lens, key_lens = ([pair[i] for pair in case.lengths] for i in (0, 1))
        attention = Attention(
            shape,
            CacheSpec(format=format, page_size=case.page_size),
            Limits(
                max_requests=len(case.lengths),
                max_tokens=sum(key_lens),
                max_seq_len=max(key_lens),
            ),
            options=Options(**options),
        )
        cache = attention.new_cache(num_layers=1, num_pages=self.num_pages)[0]
        k, v = torch.cat(self.keys), torch.cat(self.values)
        layer = calibrate([(k, v)], format).apply()
        fill = Batch.from_lengths(key_lens, key_lens, self.page_table, case.page_size)
        attention.write(attention.plan(fill), cache, k, v, layer=layer)
        batch = Batch.from_lengths(query_lens, key_lens, self.page_table, case.page_size)
        plan = attention.plan(batch)
        out = torch.empty_like(self.q)

        def run() -> torch.Tensor:
            attention.run(plan, self.q, cache, layer, out=out)
            return out

        return run
