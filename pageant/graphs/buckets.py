"""Graphs of several sizes, and which of them a batch takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pageant.graphs.graph import Graph, Step, bucket_of, capture, check_capturable, memory_of
from pageant.plan.batch import Batch
from pageant.plan.static import Drafts
from pageant.types import bad

if TYPE_CHECKING:
    from pageant.api import Attention


class Buckets:
    """Graphs of several sizes; each is captured when a batch first needs it.

    Args:
        attn, fn, mixed, drafts, shares: as for ``capture``.
        sizes: tokens of each graph; None: powers of 2 up to all that the limits allow.

    Attributes:
        sizes: ascending.
    """

    def __init__(
        self,
        attn: Attention,
        fn: Step,
        *,
        sizes: Sequence[int] | None = None,
        mixed: bool = False,
        drafts: Drafts | None = None,
        shares: bool = False,
    ) -> None:
        check_capturable(attn)
        self._attn, self._fn = attn, fn
        self._kind: dict[str, Any] = {"mixed": mixed, "drafts": drafts, "shares": shares}
        self.sizes = default_sizes(attn, mixed=mixed) if sizes is None else sorted(set(sizes))
        if not self.sizes:
            raise bad("sizes", sizes, "at least one number of tokens")
        for size in self.sizes:
            bucket_of(attn, size, None, **self._kind)
        self._graphs: dict[int, Graph] = {}

    def replay(self, batch: Batch) -> Any:
        """Replay the smallest graph that holds a batch; see ``Graph.replay``."""
        memory_of(self._attn).planner.check(batch)
        return self.graph_for(batch).launch(batch)

    def graph_for(self, batch: Batch) -> Graph:
        """The smallest graph that holds a batch, captured now if need be."""
        size = smallest(self.sizes, batch)
        if size not in self._graphs:
            self._graphs[size] = capture(self._attn, self._fn, tokens=size, **self._kind)
        return self._graphs[size]


def default_sizes(attn: Attention, *, mixed: bool) -> list[int]:
    """Powers of 2, up to the most tokens a batch may have, or a batch of decodes."""
    most = attn.limits.max_tokens
    if not mixed:
        most = min(most, attn.limits.max_requests * attn.explain().decode_threshold)
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def smallest(sizes: Sequence[int], batch: Batch) -> int:
    """The first of ascending sizes with room for a batch's tokens, requests and longest query.

    >>> batch = Batch.from_lengths([1, 0, 1], [3, 0, 2], [[0], [], [1]], page_size=4)
    >>> smallest([1, 2, 4, 8], batch)
    4
    """
    needs = {name: getattr(batch, name) for name in ("num_tokens", "num_requests", "max_query_len")}
    name, need = max(needs.items(), key=lambda each: each[1])
    place = bisect_left(sizes, need)
    if place == len(sizes):
        raise bad(f"batch.{name}", need, f"at most {sizes[-1]}, as the largest graph holds")
    return sizes[place]
