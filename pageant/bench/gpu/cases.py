"""What is timed on a GPU, how the times should compare, and what peers took before: data only."""

from __future__ import annotations

import random
from typing import Any

from pageant.bench.cases import BEST, Case, Claim
from pageant.bench.results import BEFORE


def _ragged(count: int, least: int, most: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(0)
    return tuple((1, rng.randint(least, most)) for _ in range(count))


def _decode(name: str, requests: int, keys: int, **others: Any) -> Case:
    lengths = ((1 + others.get("drafts", 0), keys),) * requests
    return Case(name=f"dec {name}", lengths=lengths, **others)


def _prefill(name: str, requests: int, new: int, keys: int | None = None, **others: Any) -> Case:
    return Case(name=f"pre {name}", lengths=((new, keys or new),) * requests, **others)


DECODE_CASES = (
    _decode("b1 4k", 1, 4096),
    _decode("b1 128k", 1, 131072),
    _decode("b16 1k", 16, 1024),
    _decode("b16 8k", 16, 8192),
    _decode("b64 4k", 64, 4096),
    _decode("b128 1k", 128, 1024),
    _decode("b256 2k", 256, 2048),
    Case(name="dec b64 ragged", lengths=_ragged(64, 256, 16384)),
    _decode("b64 4k hd64 64/8", 64, 4096, q_heads=64, head_dim=64),
    _decode("b64 4k hd256 16/8", 64, 4096, q_heads=16, head_dim=256),
    _decode("b64 4k MHA32", 64, 4096, kv_heads=32),
    _decode("b64 8k fp8", 64, 8192, format="fp8_e4m3"),
    _decode("b1 128k fp8", 1, 131072, format="fp8_e4m3"),
    _decode("b64 4k spec4", 64, 4096, drafts=3),
    _decode("b64 4k fp8", 64, 4096, format="fp8_e4m3"),
    _decode("b64 4k int8", 64, 4096, format="int8"),
    _decode("b64 4k nvfp4", 64, 4096, format="nvfp4"),
)

PREFILL_CASES = (
    _prefill("1x1k", 1, 1024),
    _prefill("1x4k", 1, 4096),
    _prefill("1x16k", 1, 16384),
    _prefill("8x2k", 8, 2048),
    _prefill("16x512", 16, 512),
    _prefill("chunk 2k@32k", 1, 2048, 32768),
    _prefill("1x16k noncausal", 1, 16384, causal=False),
    _prefill("1x16k win4k", 1, 16384, window=4096),
    _prefill("1x16k hd64", 1, 16384, q_heads=64, head_dim=64),
    _prefill("1x16k hd256", 1, 16384, q_heads=16, head_dim=256),
    _prefill("1x16k cap30", 1, 16384, soft_cap=30.0),
)

CASES = {"decode": DECODE_CASES, "prefill": PREFILL_CASES}

RATES = {"350 TFLOP/s": 350e12}  # what a claim may name instead of a contender

CLAIMS = {
    "decode": tuple(
        Claim(case=f"dec {name}", ours="pageant bf16", other=BEST, most=1 / 0.85)
        for name in ("b16 8k", "b64 4k", "b128 1k", "b256 2k", "b64 ragged")
    ),
    "prefill": (Claim(case="pre 1x16k", ours="pageant bf16", other="350 TFLOP/s", most=1.0),),
}

# The best peer on an H200 (driver 580, CUDA 13.0, torch 2.11.0) on the day below, microseconds:
# FlashAttention-3, FlashInfer 0.6.18.post1, torch's cuDNN attention, vLLM 0.33.0. Lengths of the
# ragged case were others then: its time is scaled to today's bytes.
BEFORE_DATE = "2026-12-01"
BEFORE_BEST: dict[str, tuple[str, float]] = {
    "dec b1 4k": ("flashinfer-xqa", 13.22),
    "dec b1 128k": ("flashinfer-xqa", 154.34),
    "dec b16 1k": ("flashinfer-xqa", 23.11),
    "dec b16 8k": ("flashinfer-decode-tc", 134.14),
    "dec b64 4k": ("flashinfer-decode-tc", 252.43),
    "dec b128 1k": ("flashinfer-decode-tc", 140.85),
    "dec b256 2k": ("flashinfer-decode-tc", 496.18),
    "dec b64 ragged": ("fa3", 507.26),
    "dec b64 4k hd64 64/8": ("fa3", 233.86),
    "dec b64 4k hd256 16/8": ("fa3", 502.13),
    "dec b64 4k MHA32": ("flashinfer-decode-tc", 955.74),
    "dec b64 8k fp8": ("flashinfer-xqa", 310.43),
    "dec b1 128k fp8": ("flashinfer-decode-tc", 120.8),
    "dec b64 4k spec4": ("flashinfer-fa2", 254.99),
    "pre 1x1k": ("fa3", 34.53),
    "pre 1x4k": ("fa3", 250.14),
    "pre 1x16k": ("fa3", 3396.03),
    "pre 8x2k": ("sdpa-cudnn", 507.94),
    "pre 16x512": ("sdpa-cudnn", 104.42),
    "pre chunk 2k@32k": ("fa3", 1654.27),
    "pre 1x16k noncausal": ("sdpa-cudnn", 7029.6),
    "pre 1x16k win4k": ("fa3", 1694.18),
    "pre 1x16k hd64": ("fa3", 4668.16),
    "pre 1x16k hd256": ("sdpa-cudnn", 3176.35),
    "pre 1x16k cap30": ("vllm-triton", 31314.8),
}
BEFORE_BYTES = {"dec b64 ragged": 2_103_454_000}  # 507.26 us at 4,146.7 GB/s


def before_ms(case: Case) -> float | None:
    """What the best peer took before, in milliseconds; None where nothing was measured."""
    if case.name not in BEFORE_BEST:
        return None
    factor = case.kv_bytes / BEFORE_BYTES.get(case.name, case.kv_bytes)
    return BEFORE_BEST[case.name][1] * factor / 1e3


def known_ms(cases: tuple[Case, ...]) -> dict[tuple[str, str], float]:
    """Milliseconds of each case that claims may be judged by without measuring."""
    known = {}
    for case in cases:
        before = before_ms(case)
        if before is not None:
            known[case.name, BEFORE] = before
        known |= {(case.name, name): 1e3 * case.flops / rate for name, rate in RATES.items()}
    return known
