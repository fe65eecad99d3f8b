"""The cases are those that were measured before: their sizes explain the figures of that day."""

from __future__ import annotations

import pytest

from pageant.bench.cases import BEST, Case
from pageant.bench.gpu.cases import (
    BEFORE_BEST,
    CASES,
    CLAIMS,
    DECODE_CASES,
    PREFILL_CASES,
    RATES,
    before_ms,
    known_ms,
)
from pageant.bench.gpu.measure import contenders
from pageant.bench.results import BEFORE

BY_NAME = {case.name: case for case in (*DECODE_CASES, *PREFILL_CASES)}

# GB/s of K+V or TFLOP/s that the best peer reached, from the same table as its time.
REACHED = {
    "dec b1 4k": 1269.1,
    "dec b1 128k": 3478.6,
    "dec b16 1k": 2903.6,
    "dec b16 8k": 4002.2,
    "dec b64 4k": 4253.6,
    "dec b128 1k": 3811.7,
    "dec b256 2k": 4328.1,
    "dec b64 ragged": 4146.7,
    "dec b64 4k hd64 64/8": 2295.7,
    "dec b64 4k hd256 16/8": 4276.8,
    "dec b64 4k MHA32": 4493.8,
    "dec b64 8k fp8": 3458.9,
    "dec b1 128k fp8": 2222.1,
    "dec b64 4k spec4": 4210.9,
    "pre 1x1k": 249.0,
    "pre 1x4k": 549.6,
    "pre 1x16k": 647.6,
    "pre 8x2k": 541.4,
    "pre 16x512": 329.7,
    "pre chunk 2k@32k": 643.9,
    "pre 1x16k noncausal": 625.6,
    "pre 1x16k win4k": 567.9,
    "pre 1x16k hd64": 471.1,
    "pre 1x16k hd256": 692.4,
    "pre 1x16k cap30": 70.2,
}


@pytest.mark.parametrize("case", BY_NAME.values(), ids=lambda case: case.name)
def test_sizes_explain_what_was_measured(case: Case) -> None:
    before = before_ms(case)
    if before is None:
        assert case.name in {f"dec b64 4k {name}" for name in ("fp8", "int8", "nvfp4")}
        return
    if case.name.startswith("dec"):
        assert case.kv_bytes / before / 1e6 == pytest.approx(REACHED[case.name], rel=1e-3)
    else:
        assert case.flops / before / 1e9 == pytest.approx(REACHED[case.name], rel=2e-3)


def test_names_are_unique_and_all_of_the_table_is_there() -> None:
    assert len(BY_NAME) == len(DECODE_CASES) + len(PREFILL_CASES)
    assert list(BEFORE_BEST) == list(REACHED)
    assert set(BEFORE_BEST) <= set(BY_NAME)
    assert all(case.is_decode for case in DECODE_CASES)
    assert not any(case.is_decode for case in PREFILL_CASES)


def test_ragged_lengths_are_spread_and_always_the_same() -> None:
    lengths = [n for _, n in BY_NAME["dec b64 ragged"].lengths]
    assert len(set(lengths)) > 60
    assert 256 <= min(lengths) < 1000
    assert 15000 < max(lengths) <= 16384
    assert sum(lengths) * 4096 == BY_NAME["dec b64 ragged"].kv_bytes


def test_claims_name_cases_and_contenders() -> None:
    for bench, claims in CLAIMS.items():
        names = {case.name: case for case in CASES[bench]}
        for claim in claims:
            assert claim.ours in contenders(bench, names[claim.case])
            assert claim.other == BEST or claim.other in RATES


def test_what_is_known_without_measuring() -> None:
    known = known_ms((BY_NAME["pre 1x16k"],))
    assert known["pre 1x16k", BEFORE] == pytest.approx(3.39603)
    assert known["pre 1x16k", "350 TFLOP/s"] == pytest.approx(6.283, rel=1e-3)
