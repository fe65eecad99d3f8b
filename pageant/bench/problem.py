"""A case with its numbers: queries, each request's keys and values, and where their pages lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from pageant.api import Attention
from pageant.bench.cases import Case
from pageant.cache.calibrate import calibrate
from pageant.cache.pages import PagedCache
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.types import CacheSpec, Features, Layer, Limits, Options, Shape

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
    def of(cls, case: Case, seed: int = 0, device: torch.device | str = "cpu") -> Problem:
        """The numbers that this case and seed stand for on a device."""
        rng = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, heads: int) -> torch.Tensor:
            size = (rows, heads, case.head_dim)
            return torch.randn(size, generator=rng, device=device).to(case.dtype)

        common = case.shared // case.page_size
        widths = [-(-n // case.page_size) - common for _, n in case.lengths]
        pool = torch.randperm(common + sum(widths), generator=rng, device=device)
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

    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys, and all values, in pages as the table says: [P, N, Hkv, D]; zeros elsewhere."""
        case = self.case
        shape = (self.num_pages, case.page_size, case.kv_heads, case.head_dim)
        pools = self.q.new_zeros(shape), self.q.new_zeros(shape)
        for pool, each in zip(pools, (self.keys, self.values), strict=True):
            for pages, rows in zip(self.page_table, each, strict=True):
                full = rows.new_zeros(len(pages) * case.page_size, *rows.shape[1:])
                full[: len(rows)] = rows
                pool[pages] = full.view(len(pages), *shape[1:])
        return pools

    def layer(self, format: str) -> Layer:
        """The layer, with the scales that a cache of this format wants for these numbers."""
        scales = calibrate(list(zip(self.keys, self.values, strict=True)), format)
        return scales.apply(Layer(window=self.case.window, soft_cap=self.case.soft_cap))

    def prepared(self, format: str, copies: int = 1, **options: Any) -> Prepared:
        """Pageant over caches of this format that hold the keys and values.

        Args:
            format: of the cache.
            copies: caches of the same contents.
            **options: fields of ``Options``.
        """
        case, device, layer = self.case, self.q.device, self.layer(format)
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
            Features.of([layer], non_causal=not case.causal),
            Options(speculative_tokens=case.drafts, **options),
            device,
        )
        caches = attention.new_cache(num_layers=copies, num_pages=self.num_pages)
        k, v = torch.cat(self.keys), torch.cat(self.values)
        fill = Batch.from_lengths(key_lens, key_lens, self.page_table, case.page_size)
        plan = attention.plan(_moved(fill, device))
        for copy in range(copies):
            attention.write(plan, caches[copy], k, v, layer=layer)
        batch = Batch.from_lengths(
            query_lens, key_lens, self.page_table, case.page_size, causal=case.causal
        )
        plan = attention.plan(_moved(batch, device))
        return Prepared(attention, plan, caches, layer, self.q, torch.empty_like(self.q))

    def attention(self, format: str, **options: Any) -> Run:
        """A call that computes Pageant's out [T, Hq, D] anew, always in the same memory.

        Args:
            format: of the cache.
            **options: fields of ``Options``.
        """
        return self.prepared(format, **options).run


@dataclass(frozen=True)
class Prepared:
    """Pageant, ready to run a problem.

    Attributes:
        attention, plan, layer: what it runs with.
        caches: copies of the same contents.
        q, out: [T, Hq, D].
    """

    attention: Attention
    plan: Plan
    caches: PagedCache
    layer: Layer
    q: torch.Tensor
    out: torch.Tensor

    def run(self, copy: int = 0) -> torch.Tensor:
        """Compute `out` from one of the copies."""
        self.attention.run(self.plan, self.q, self.caches[copy], self.layer, out=self.out)
        return self.out


def _moved(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""
    tensors: dict[str, Any] = {
        field.name: value.to(device)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **tensors)
