"""What is timed, and how the times should compare: data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.cache.formats import FORMATS, OF_DTYPE

BEST = "best peer"
LARGEST = 2**62


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of one layer.

    Attributes:
        name: what ``--case`` calls it.
        lengths: (new tokens m, keys n) of each request.
        q_heads, kv_heads, head_dim, dtype: of the layer.
        page_size: tokens a page; pages lie shuffled.
        shared: first tokens that all requests have in common, in the same pages: whole ones.
        format: the cache's, where a case is about one; None leaves it to the benchmark.
        causal, window, soft_cap: what the layer and the batch ask for.
        drafts: draft tokens that a decode verifies besides its own.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    shared: int = 0
    format: str | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    drafts: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether every request brings one new token, and its drafts."""
        return all(m == 1 + self.drafts for m, _ in self.lengths)

    @property
    def own_format(self) -> str:
        """Name of the cache format: the case's, or that of the model's dtype."""
        return self.format or OF_DTYPE[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the stored keys and values, scales included, that some row sees.

        >>> Case(name="x", lengths=((1, 1000),), window=10).kv_bytes == 10 * 2 * 8 * 128 * 2
        True
        """
        fmt = FORMATS[self.own_format]
        row = fmt.data_bytes(self.head_dim) + fmt.scale_bytes(self.head_dim)
        window = LARGEST if self.window is None else self.window
        seen = sum(min(n, window + m - 1) for m, n in self.lengths)
        return 2 * seen * self.kv_heads * row

    @property
    def num_bytes(self) -> int:
        """The same, and those of queries and outputs."""
        tokens = sum(m for m, _ in self.lengths)
        return self.kv_bytes + 2 * tokens * self.q_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, of visible pairs alone.

        Rows 1, 2 and 3 of three new tokens after one cached see 2, 3 and 4 keys:

        >>> Case(name="x", lengths=((3, 4),), q_heads=1, head_dim=16).flops == 4 * 9 * 16
        True
        """
        pairs = 0
        for m, n in self.lengths:
            visible = range(n - m + 1, n + 1) if self.causal else [n] * m
            window = LARGEST if self.window is None else self.window
            pairs += sum(min(count, window) for count in visible)
        return 4 * pairs * self.q_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How long one contender should take on a case, as a multiple of another's time.

    Attributes:
        case: the case's name.
        ours, other: names of contenders; `BEST` stands for the fastest that is not Pageant's.
        most: the largest ratio of their times that keeps the claim.
    """

    case: str
    ours: str
    other: str
    most: float


CPU_CASES = (
    Case(name="decode 16x1k", lengths=((1, 1024),) * 16),
    Case(name="decode 1x4k", lengths=((1, 4096),)),
    Case(name="decode ragged", lengths=tuple((1, 64 + 160 * i) for i in range(12))),
    Case(
        name="decode 8x512 SmolLM2",
        lengths=((1, 512),) * 8,
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        dtype=torch.float32,
    ),
    Case(
        name="decode 32 samples SmolLM2",
        lengths=tuple((1, 1000 + 2 * i) for i in range(32)),
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        dtype=torch.float32,
        shared=992,
    ),
    Case(name="prefill 4x512", lengths=((512, 512),) * 4),
    Case(name="prefill 1x1k", lengths=((1024, 1024),)),
    Case(name="prefill 256 after 3840", lengths=((256, 4096),)),
)

CPU_CLAIMS = (
    Claim(case="decode 16x1k", ours="pageant bf16", other="sdpa", most=1.0),
    Claim(case="decode 16x1k", ours="pageant bf16", other="gather + sdpa", most=1 / 1.5),
    Claim(case="decode 16x1k", ours="pageant fp8_e4m3", other="pageant bf16", most=1.0),
    Claim(case="decode 16x1k", ours="pageant int8", other="pageant bf16", most=1.0),
    Claim(case="decode 16x1k", ours="pageant nvfp4", other="pageant bf16", most=1.5),
    Claim(
        case="decode 32 samples SmolLM2",
        ours="pageant fp32",
        other="pageant fp32 without sharing",
        most=0.5,
    ),
)
