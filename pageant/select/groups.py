"""A model whose layers differ: kernels are chosen for each cache group, a host needs one answer.

A group is the layers that share a pool of pages. Layers of two head sizes, or layers kept
unquantised beside fp8 ones, are groups of their own, each with its own kernels:

>>> from pageant.select.built import never_missing
>>> wide = Group(shape=Shape(num_q_heads=16, num_kv_heads=2, head_dim=512))
>>> narrow = Group(shape=Shape(num_q_heads=16, num_kv_heads=8, head_dim=256))
>>> options = Options(kernels="flashinfer", speculative_tokens=3)
>>> answer = explain_groups([wide, narrow], options, "sm90", missing=never_missing)
>>> [group.rows["decode"].name for group in answer.groups]
['flashinfer.native', 'flashinfer.xqa']
>>> [group.decode_threshold for group in answer.groups], answer.decode_threshold
([1, 4], 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pageant.device import Device
from pageant.select.built import missing_here
from pageant.select.choose import Missing
from pageant.select.explain import Explanation, explain
from pageant.select.row import GRAPH_LEVELS, GraphLevel
from pageant.types import CacheSpec, Features, Options, Shape, Support, bad


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share pages.

    Attributes:
        shape: head counts and sizes of these layers, not of the model.
        cache: how they store keys and values; "auto" for layers that are not quantised.
        features: what these layers ask for.
        on_ranks: whether their sequences are shared among ranks, where the model's are.
    """

    shape: Shape
    cache: CacheSpec = field(default_factory=CacheSpec)
    features: Features = field(default_factory=Features)
    on_ranks: bool = True


@dataclass(frozen=True)
class GroupsExplanation:
    """The answer for each group, and what holds for all of them."""

    groups: tuple[Explanation, ...]

    @property
    def support(self) -> Support:
        """Whether every group can run; if not, why the first that cannot does not."""
        for number, group in enumerate(self.groups):
            if not group.support.ok:
                reason = f"group {number}: {group.support.reason}"
                return Support(False, reason, group.support.argument)
        return Support(True)

    @property
    def decode_threshold(self) -> int:
        """New tokens a request may bring and be a decode in every group."""
        return min(group.decode_threshold for group in self.groups)

    @property
    def cuda_graph(self) -> GraphLevel:
        """Which batches a CUDA graph over all groups can capture."""
        return min((group.cuda_graph for group in self.groups), key=GRAPH_LEVELS.index)

    @property
    def varlen_graph_max_q(self) -> int | None:
        """Most new tokens a decode may bring to a full graph; None: decodes of one length."""
        longest = [group.varlen_graph_max_q for group in self.groups]
        return None if None in longest else min(length for length in longest if length)

    @property
    def lens_mismatch(self) -> bool:
        """Whether query lengths on the device may differ from the host's in every group."""
        return all(group.lens_mismatch for group in self.groups)

    @property
    def draft_reuse(self) -> bool:
        """Whether one plan a group serves all fused draft steps."""
        return all(group.draft_reuse for group in self.groups)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.groups))


def explain_groups(
    groups: Sequence[Group],
    options: Options | None = None,
    device: Device | torch.device | str = "cpu",
    *,
    cubins: bool = True,
    missing: Missing = missing_here,
) -> GroupsExplanation:
    """Choose kernels for each group.

    Args:
        groups: one or more.
        options, device, cubins, missing: as for ``explain``.
    """
    if not groups:
        raise bad("groups", list(groups), "one or more")
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise bad("options", options, "a pageant.Options")
    alone = replace(options, context_parallel=None)
    return GroupsExplanation(
        tuple(
            explain(
                group.shape,
                group.cache,
                group.features,
                options if group.on_ranks else alone,
                device,
                cubins=cubins,
                missing=missing,
            )
            for group in groups
        )
    )
