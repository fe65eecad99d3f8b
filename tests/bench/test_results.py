"""Claims against the best peer, against an earlier day's where none ran, and against a rate."""

from __future__ import annotations

from pageant.bench.cases import BEST, Claim
from pageant.bench.results import BEFORE, Result, best_peer, judge

RESULTS = [
    Result(case="x", contender="pageant bf16", median_ms=1.0),
    Result(case="x", contender="pageant bf16 invariant", median_ms=0.1),
    Result(case="x", contender="slow", median_ms=3.0),
    Result(case="x", contender="fast", median_ms=0.8),
    Result(case="x", contender="absent", why="not installed"),
    Result(case="y", contender="pageant bf16", median_ms=1.0),
    Result(case="y", contender="absent", why="not installed"),
]
KNOWN = {("y", BEFORE): 2.0, ("x", BEFORE): 9.0, ("y", "5 TFLOP/s"): 0.5}


def claim(case: str, other: str = BEST, most: float = 1.0) -> Claim:
    return Claim(case=case, ours="pageant bf16", other=other, most=most)


def test_the_best_peer_is_never_ours_and_ran() -> None:
    assert best_peer(RESULTS, "x") == RESULTS[3]
    assert best_peer(RESULTS, "y") is None


def test_against_the_best_peer_else_the_earlier_one_else_nothing() -> None:
    one, two = judge(RESULTS, [claim("x", most=1.25), claim("y")], KNOWN)
    assert (one.ratio, one.against, one.holds) == (1.25, "fast", True)
    assert (two.ratio, two.against, two.holds) == (0.5, BEFORE, True)
    (none,) = judge(RESULTS, [claim("y")])
    assert (none.ratio, none.against, none.holds) == (None, None, None)


def test_against_a_rate() -> None:
    (verdict,) = judge(RESULTS, [claim("y", "5 TFLOP/s")], KNOWN)
    assert (verdict.ratio, verdict.against, verdict.holds) == (2.0, "5 TFLOP/s", False)
