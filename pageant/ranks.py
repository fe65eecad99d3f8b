"""Which tokens of every sequence one rank of several holds, and where they stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# An int, or an array or tensor of whole numbers.
Number = Any


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """This rank's share of every sequence: token p lies on rank (p // interleave) % world.

    The rank's pages hold its tokens one after another: its token number l is row l % page_size of
    page page_table[l // page_size], and slots of other ranks' tokens are negative. Lengths and
    offsets of a batch are those of the whole sequences. Ranks share the keys; each computes the
    partial result of those it holds, over all heads.

    Attributes:
        rank, world: this rank, and how many there are.
        interleave: consecutive tokens that stay together.
        group: torch.distributed process group, whose ranks these are; ``run`` then returns the
            whole result, and every rank must plan the same batch. None: ``run(return_lse=True)``
            returns this rank's part, without sinks, for ``pageant.ops.merge_states``.
        comm: "ag_rs" (all-gather of lse, reduce-scatter of outputs) or "a2a" (one all-to-all, whose
            sums have one order: the only one in invariant mode).
        heads: "all": every rank is given the queries of all heads, and gets all of them back.
            "split": each rank has Hq heads of its own of world * Hq that share the kv heads, in the
            order of ranks; queries are gathered, and each gets its own heads back.
    """

    rank: int
    world: int
    interleave: int = 1
    group: Any = None
    comm: Literal["ag_rs", "a2a"] = "ag_rs"
    heads: Literal["all", "split"] = "all"

    def count(self, tokens: Number) -> Number:
        """How many of a sequence's first `tokens` (from 0 up) the rank holds.

        >>> ranks = ContextParallel(rank=1, world=2, interleave=3)
        >>> [ranks.count(tokens) for tokens in (0, 3, 5, 6, 13)]
        [0, 0, 2, 3, 6]
        """
        if self.world == 1:
            return tokens
        rounds = tokens // (self.interleave * self.world) * self.interleave
        rest = tokens - rounds * self.world - self.rank * self.interleave
        if isinstance(rest, int):
            return rounds + min(max(rest, 0), self.interleave)
        return rounds + rest.clip(0, self.interleave)

    def position(self, held: Number) -> Number:
        """Where in the sequence the rank's tokens stand.

        >>> ranks = ContextParallel(rank=1, world=2, interleave=3)
        >>> [ranks.position(held) for held in range(6)]
        [3, 4, 5, 9, 10, 11]
        """
        rounds = held // self.interleave * self.world + self.rank
        return rounds * self.interleave + held % self.interleave


ALONE = ContextParallel(rank=0, world=1)
