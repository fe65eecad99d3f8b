"""One case on a device: what all contenders are given, and what they should compute from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from pageant.bench.cases import Case
from pageant.bench.problem import Problem
from pageant.bench.timing import Call
from pageant.cache.formats import FORMATS
from pageant.cache.quantize import Stored, dequantize, encode
from pageant.kernels.reference import EXACT, attend, visible
from pageant.plan.inputs import LayerParams
from pageant.types import Layer

L2_BYTES = 120e6  # twice an H200's: keys read in one round must not be there in the next
MOST_COPIES = 8
TRUE_ROWS = 64  # about as many rows of a case are compared with the truth


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
        run: computes out [T, Hq, D] from a copy of the cache, by its number.
        plan: what must run before, once a step; None if nothing must.
        plans_on_host: whether that is done by the host, and cannot be captured.
    """

    run: Callable[[int], torch.Tensor]
    plan: Call | None = None
    plans_on_host: bool = False


@dataclass(frozen=True)
class Setting:
    """A problem, and its caches as peers take them.

    Attributes:
        problem: the numbers.
        copies: how many caches of the same contents there are.
    """

    problem: Problem
    copies: int

    @classmethod
    def of(cls, case: Case, device: torch.device) -> Setting:
        """Enough copies that none lies in the L2 cache still when its turn comes again."""
        copies = min(MOST_COPIES, max(2, -(-int(L2_BYTES) // case.kv_bytes)))
        return cls(Problem.of(case, device=device), copies)

    @property
    def case(self) -> Case:
        """What is computed."""
        return self.problem.case

    @cached_property
    def layer(self) -> Layer:
        """Window, soft cap, and the scales of the case's format."""
        return self.problem.layer(self.case.own_format)

    @cached_property
    def stores(self) -> list[tuple[Stored, Stored]]:
        """Keys and values of each copy: elements [P, N, Hkv, D], and scales, or None."""
        fmt = FORMATS[self.case.own_format]
        scales = self.layer.k_scale, self.layer.v_scale
        k, v = (
            encode(pool, fmt, scale)
            for pool, scale in zip(self.problem.pools(), scales, strict=True)
        )
        first = k, v
        return [first, *((_copied(k), _copied(v)) for _ in range(self.copies - 1))]

    @cached_property
    def page_table(self) -> torch.Tensor:
        """int32 [R, W]; zeros past the end of shorter rows."""
        width = max(map(len, self.problem.page_table))
        rows = [[*row, *[0] * (width - len(row))] for row in self.problem.page_table]
        return torch.tensor(rows, dtype=torch.int32, device=self.problem.q.device)

    @cached_property
    def key_lens(self) -> torch.Tensor:
        """int32 [R]."""
        lens = [n for _, n in self.case.lengths]
        return torch.tensor(lens, dtype=torch.int32, device=self.problem.q.device)

    @cached_property
    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows, int64 [S], and float64 attention of them [S, Hq, D] over what is stored."""
        problem, case, each = self.problem, self.case, TRUE_ROWS // len(self.case.lengths)
        fmt, layer = FORMATS[case.own_format], self.layer
        params = LayerParams(score_scale=case.head_dim**-0.5, soft_cap=case.soft_cap)
        first, rows, outs = 0, [], []
        for (m, n), keys, values in zip(case.lengths, problem.keys, problem.values, strict=True):
            some = torch.linspace(0, m - 1, min(m, max(4, each))).long()
            k, v = (
                dequantize(*encode(x, fmt, scale), fmt.name, scale).to(EXACT)
                for x, scale in ((keys, layer.k_scale), (values, layer.v_scale))
            )
            mask = visible(m, n, causal=case.causal, window=case.window, draft=None)[some]
            q = problem.q[first + some.to(problem.q.device)].to(EXACT)
            outs.append(attend(q, k, v, mask, params)[0])
            rows.append(first + some)
            first += m
        return torch.cat(rows).to(problem.q.device), torch.cat(outs)

    def error(self, out: torch.Tensor) -> float:
        """Relative Frobenius error of out [T, Hq, D], in the rows that are compared."""
        rows, truth = self.truth
        return float((out[rows].to(EXACT) - truth).norm() / truth.norm())

    def pageant(self) -> Contender:
        """Pageant, as it chooses by itself."""
        ready = self.problem.prepared(self.case.own_format, self.copies)
        return Contender(ready.run, lambda: ready.attention.update(ready.plan))


def _copied(stored: Stored) -> Stored:
    elements, scales = stored
    return elements.clone(), None if scales is None else scales.clone()
