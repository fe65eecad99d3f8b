"""Random paged batches as FlashInfer's callers hold them, and the right answers in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

LAYOUTS = ("NHD", "HND")
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


@dataclass
class Scene:
    """Requests of (new tokens, keys); pages are shuffled, unused slots hold NaN."""

    lengths: tuple[tuple[int, int], ...]
    page_size: int = 4
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self.value_dim = self.value_dim or self.dim
        counts = [-(-n // self.page_size) for _, n in self.lengths]
        self.num_pages = sum(counts) + 2
        self.indices = torch.randperm(self.num_pages, generator=self.rng)[: sum(counts)].int()
        self.indptr = i32(0, *torch.tensor(counts).cumsum(0).tolist())
        self.last = i32(*[(n - 1) % self.page_size + 1 if n else 0 for _, n in self.lengths])
        self.qo_indptr = i32(0, *torch.tensor([m for m, _ in self.lengths]).cumsum(0).tolist())
        tokens = int(self.qo_indptr[-1])
        self.q = self.randn(tokens, self.q_heads, self.dim)
        self.keys = [self.randn(n, self.kv_heads, self.dim) for _, n in self.lengths]
        self.values = [self.randn(n, self.kv_heads, self.value_dim) for _, n in self.lengths]

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.rng).to(self.dtype)

    def paged(self, rows: list[torch.Tensor], empty: float = math.nan) -> torch.Tensor:
        """[P, N, Hkv, ..] holding each request's rows."""
        like = rows[0]
        size = (self.num_pages, self.page_size, *like.shape[1:])
        pages = torch.full(size, empty).to(like.dtype)
        for request, x in enumerate(rows):
            first = int(self.indptr[request])
            for token in range(x.shape[0]):
                page = int(self.indices[first + token // self.page_size])
                pages[page, token % self.page_size] = x[token]
        return pages

    def cache(self, layout: str = "NHD", form: str = "tuple") -> Any:
        """The pages in a form FlashInfer takes: a tuple, one 5-D tensor, or strided halves."""
        k, v = self.paged(self.keys), self.paged(self.values)
        if layout == "HND":
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        if form == "5-D":
            return torch.stack([k, v], 1)
        if form == "strided":
            wide = [torch.zeros(*x.shape[:-1], 3 * x.shape[-1], dtype=x.dtype) for x in (k, v)]
            halves = tuple(w[..., : x.shape[-1]] for w, x in zip(wide, (k, v), strict=True))
            for half, x in zip(halves, (k, v), strict=True):
                half.copy_(x)
            return halves
        return k, v

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q_heads, self.kv_heads, self.dim

    def plan_decode(self, wrapper: Any, **options: Any) -> None:
        options = {"q_data_type": self.dtype, **options}
        wrapper.plan(self.indptr, self.indices, self.last, *self.heads, self.page_size, **options)

    def plan_prefill(self, wrapper: Any, **options: Any) -> None:
        options = {"q_data_type": self.dtype, "head_dim_vo": self.value_dim, **options}
        table = (self.indptr, self.indices, self.last)
        wrapper.plan(self.qo_indptr, *table, *self.heads, self.page_size, **options)

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and base-2 lse of every request; options as of `attend`, masks one a request."""
        masks = options.pop("masks", [None] * len(self.lengths))
        parts = [
            attend(self.q[a:b], k, v, mask=mask, **options)
            for a, b, k, v, mask in zip(
                self.qo_indptr[:-1], self.qo_indptr[1:], self.keys, self.values, masks, strict=True
            )
        ]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window_left: int = -1,
    cap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request by the definition, float64: out [m, Hq, Dv] and base-2 lse [m, Hq]."""
    (m, heads, dim), n = q.shape, k.shape[0]
    k, v = (x.double().repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    x = torch.einsum("ihd,jhd->hij", q.double(), k) * (dim**-0.5 if scale is None else scale)
    if cap:
        x = cap * torch.tanh(x / cap)
    row, key = torch.arange(m)[:, None] + n - m, torch.arange(n)
    if slopes is not None:
        x = x + slopes.double()[:, None, None] * (key - row)
    seen = torch.ones(m, n, dtype=torch.bool) if mask is None else mask
    if causal and mask is None:
        seen = seen & (key <= row)
    if window_left >= 0:
        seen = seen & (key >= row - window_left)
    weights = torch.exp(x) * seen
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.double())[:, None]
    share = weights / torch.where(total == 0, 1.0, total)[..., None]
    return torch.einsum("hij,jhd->ihd", share, v), torch.log2(total).T


def assert_near(got: Any, want: Any, bound: float | None = None) -> None:
    """Each pair's relative error within the bound of the dtype; infinities equal."""
    got, want = (x if isinstance(x, tuple | list) else (x,) for x in (got, want))
    for mine, theirs in zip(got, want, strict=False):
        limit = bound or BOUNDS.get(mine.dtype, 2e-5)
        assert mine.shape == theirs.shape
        finite = torch.isfinite(theirs)
        assert (mine[~finite].double() == theirs[~finite].double()).all()
        mine, theirs = mine[finite].double(), theirs[finite].double()
        assert torch.isfinite(mine).all()
        error = (mine - theirs).norm() / theirs.norm().clamp(min=1e-6)
        assert error < limit, f"relative error {error:.2e}, bound {limit:.0e}"
