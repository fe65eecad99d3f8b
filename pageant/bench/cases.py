"""What is timed, and how the times should compare: data only."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch of one layer.

    Attributes:
        name: what ``--case`` calls it.
        lengths: (new tokens m, keys n) of each request.
        q_heads, kv_heads, head_dim, dtype: of the layer.
        page_size: tokens a page; pages lie shuffled.
        shared: first tokens that all requests have in common, in the same pages: whole ones.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    shared: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether every request brings one new token."""
        return all(m == 1 for m, _ in self.lengths)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How long one contender should take on a case, as a multiple of another's time.

    Attributes:
        case: the case's name.
        ours, other: names of contenders.
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
