"""What a benchmark found of one contender, and whether what was claimed holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pageant.bench.cases import BEST, Claim

BEFORE = "measured before"  # stands in for the best peer where no peer ran


@dataclass(frozen=True, kw_only=True)
class Result:
    """One contender on one case.

    Attributes:
        case, contender: their names.
        median_ms, fastest_ms: of a call, over all rounds; None if it cannot run.
        spread_ms: between the quartiles of all rounds.
        planned_ms: median of a call with the planning it needs; None where that was not timed.
        error: relative Frobenius error against float64 attention over the same stored keys.
        why: why it cannot run; else None.
    """

    case: str
    contender: str
    median_ms: float | None = None
    fastest_ms: float | None = None
    spread_ms: float | None = None
    planned_ms: float | None = None
    error: float | None = None
    why: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is Pageant, in any variant."""
        return self.contender.startswith("pageant")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim, and what was measured.

    Attributes:
        claim: what should hold.
        ratio: median time of `claim.ours` over that of `claim.other`; None if one did not run.
        against: whose time that was; None if there was none.
    """

    claim: Claim
    ratio: float | None
    against: str | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the claim was kept; None if it was not measured."""
        return None if self.ratio is None else self.ratio <= self.claim.most


def best_peer(results: Iterable[Result], case: str) -> Result | None:
    """The fastest on a case that is not Pageant; None if no peer ran."""
    peers = [each for each in results if each.case == case and not each.is_ours]
    ran = [(each.median_ms, index) for index, each in enumerate(peers) if each.median_ms]
    return peers[min(ran)[1]] if ran else None


def judge(
    results: Iterable[Result],
    claims: Sequence[Claim],
    known: Mapping[tuple[str, str], float] | None = None,
) -> list[Verdict]:
    """The claims about cases that were measured, each with its ratio.

    Args:
        results: all that was measured.
        claims: what should hold.
        known: milliseconds of (case, name) that need no measuring: time at a given rate, or, under
            the name `BEFORE`, of the best peer of an earlier day.
    """
    results, known = list(results), known or {}
    medians = {(each.case, each.contender): each.median_ms for each in results}
    cases = {case for case, _ in medians}
    verdicts = []
    for claim in (claim for claim in claims if claim.case in cases):
        ours, against = medians.get((claim.case, claim.ours)), claim.other
        if against == BEST:
            best = best_peer(results, claim.case)
            against = BEFORE if best is None else best.contender
        at = claim.case, against
        other = medians.get(at) or known.get(at)
        ratio = None if ours is None or other is None else ours / other
        against_any = None if other is None else against
        verdicts.append(Verdict(claim=claim, ratio=ratio, against=against_any))
    return verdicts
