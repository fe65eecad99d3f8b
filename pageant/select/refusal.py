"""Why a row does not serve a phase: in words, and how close it came."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pageant.device import FAMILIES
from pageant.select.needs import ONE_RANK, Need
from pageant.select.row import Phase, Row
from pageant.select.words import reluctance


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why one row does not serve one phase.

    Attributes:
        kernel: the row's name.
        phase: "prefill" or "decode".
        why: what it lacks and what would make it run.
        arguments: the user's arguments that stand in the way; never empty.
        kind: whether it lacks something asked for, serves all of it but is missing itself, or is
            for another place: other devices, or several ranks.
        num_families: how many device families the kernel serves.
    """

    kernel: str
    phase: Phase
    why: str
    arguments: tuple[str, ...]
    kind: Literal["lacks", "missing", "elsewhere"]
    num_families: int

    @property
    def argument(self) -> str:
        """The first argument in the way."""
        return self.arguments[0]


# Refusals that say least about a configuration come last.
KINDS = ("lacks", "missing", "elsewhere")


def distance(refusal: Refusal) -> tuple[int, list[int], int, int]:
    """How far a row is from serving: its kind, what would have to be given up, and for how few."""
    losses = [reluctance(argument) for argument in refusal.arguments]
    kind = KINDS.index(refusal.kind)
    return kind, sorted(losses, reverse=True), losses[0], -refusal.num_families


@lru_cache(maxsize=1 << 14)
def refuse(row: Row, lacking: tuple[Need, ...], phase: Phase, rows: tuple[Row, ...]) -> Refusal:
    """The refusal of a row that lacks something; `rows` is the whole table."""
    lacks, cures = zip(*[_lack(need, row, phase, rows) for need in lacking], strict=True)
    return Refusal(
        kernel=row.name,
        phase=phase,
        why=f"serves no {' and no '.join(lacks)}; would run {' and '.join(dict.fromkeys(cures))}",
        arguments=tuple(dict.fromkeys(need.words.argument for need in lacking)),
        kind="elsewhere" if any(map(_is_place, lacking)) else "lacks",
        num_families=len(_families(row, phase, rows)),
    )


@lru_cache(maxsize=1 << 12)
def _lack(need: Need, row: Row, phase: Phase, rows: tuple[Row, ...]) -> tuple[str, str]:
    """What the row lacks and the cure; where that is the device, any row of its kernel will do."""
    if need.field != "families":
        return need.refusal(row)
    return need.refusal(row, _families(row, phase, rows))


def _is_place(need: Need) -> bool:
    """Whether it is about where to run: the device, or one rank where a row is for several."""
    return need.field == "families" or need == Need("ranks", ONE_RANK)


def miss(row: Row, phase: Phase, why: str, rows: tuple[Row, ...]) -> Refusal:
    """The refusal of a row that serves everything, but cannot be had."""
    return Refusal(
        kernel=row.name,
        phase=phase,
        why=why,
        arguments=("kernels",),
        kind="missing",
        num_families=len(_families(row, phase, rows)),
    )


@lru_cache(maxsize=1 << 8)
def _families(row: Row, phase: Phase, rows: tuple[Row, ...]) -> tuple[str, ...]:
    """The families of all rows of a kernel, in the order of FAMILIES."""
    served = {f for r in rows if r.name == row.name and phase in r.phases for f in r.families}
    return tuple(family for family in FAMILIES if family in served)
