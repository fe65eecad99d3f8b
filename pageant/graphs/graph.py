"""A step captured in a CUDA graph, and what all graphs of one Attention share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pageant.plan.batch import Batch
from pageant.plan.buffers import PlanBuffers
from pageant.plan.build import Plan
from pageant.plan.static import DRAFT_FIELDS, BatchRoom, Bucket, Drafts, copy_in
from pageant.select.bounds import is_whole
from pageant.types import bad

if TYPE_CHECKING:
    from pageant.api import Attention
    from pageant.plan.device_plan import DevicePlanner

Step = Callable[[Plan], Any]


class Recorded(Protocol):
    """What a graph replays: a ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Launch everything once more."""


class GraphMemory:
    """What all graphs of one Attention share; made with the first, see ``memory_of``.

    Args:
        planner: the Attention's.
    """

    def __init__(self, planner: DevicePlanner) -> None:
        self.planner = planner
        self._slot = planner.new_slot()
        self._room = BatchRoom(planner.limits, planner.features, planner.page_size, planner.device)
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def open(self, bucket: Bucket, fn: Step) -> tuple[Batch, Callable[[], Any]]:
        """The bucket's batch, all padding, and a step that plans it and gives the plan to `fn`."""
        batch = self._room.batch(bucket)
        # The arrays are shared; trees, which grow with the bucket, are not.
        buffers = PlanBuffers(dict(self._slot.work), replace(self._slot.memory, tree=None))

        def step() -> Any:
            try:
                return fn(self.planner.plan_apart(buffers, batch))
            finally:
                buffers.generation += 1  # outside of the step the plan means nothing

        return batch, step

    def record(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Run a step once to warm up, then capture it; what it returned while captured."""
        device = self.planner.device
        with torch.cuda.device(device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            stream, graph = self._stream, torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                result = step()
        return graph, result


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured step. Made by ``capture``.

    Attributes:
        bucket: which batches it takes.
        result: what `fn` returned when captured; each replay writes its tensors again.
        batch: the static batch it plans.
        memory: what it shares with the Attention's other graphs.
        recorded: the CUDA graph.
    """

    bucket: Bucket
    result: Any
    batch: Batch
    memory: GraphMemory
    recorded: Recorded

    def replay(self, batch: Batch) -> Any:
        """Run the step for a batch: no host synchronisation, no allocation.

        Rows past the batch's tokens, requests past its own and their pages are neither read nor
        written by Pageant: outputs given to ``run`` keep them, slots of -1 are not written.

        Args:
            batch: on the Attention's device; at most what the bucket holds.

        Returns:
            `result`.

        Raises:
            ArgumentError: a mistake in the batch, or more than the bucket holds; nothing changed.
        """
        self.memory.planner.check(batch)
        return self.launch(batch)

    def launch(self, batch: Batch) -> Any:
        """``replay`` for a batch that has no mistake but, perhaps, its size."""
        self.bucket.check(batch)
        copy_in(self.batch, batch)
        self.recorded.replay()
        return self.result


def capture(
    attn: Attention,
    fn: Step,
    *,
    tokens: int,
    requests: int | None = None,
    mixed: bool = False,
    drafts: Drafts | None = None,
    shares: bool = False,
) -> Graph:
    """Capture a step for batches of up to `tokens` tokens.

    `fn` runs twice, on a batch that is all padding: once to warm up, once to be captured. It may
    not synchronise, and what it reads must stay where it is: see the module's example.

    Args:
        attn: on a CUDA device, with kernels that are planned there.
        fn: given the plan, launches the step.
        tokens: padding included.
        requests: None: as many as there are tokens, or as the limits allow.
        mixed: take any batch; otherwise decodes alone, which a smaller graph serves.
        drafts: "mask" or "parents" where every batch brings a draft mask or draft parents.
        shares: look in every batch for keys that decodes share, to compute those once.

    Raises:
        ArgumentError: `attn` cannot be captured, or an argument is beyond its limits.

    >>> from pageant import Attention, Shape
    >>> attn = Attention(Shape(num_q_heads=2, num_kv_heads=1, head_dim=16), device="cpu")
    >>> capture(attn, print, tokens=8)
    Traceback (most recent call last):
    pageant.types.ArgumentError: attn.device is 'cpu'; allowed: a CUDA device, where CUDA graphs are
    """
    check_capturable(attn)
    bucket = bucket_of(attn, tokens, requests, mixed=mixed, drafts=drafts, shares=shares)
    memory = memory_of(attn)
    batch, step = memory.open(bucket, fn)
    recorded, result = memory.record(step)
    return Graph(bucket, result, batch, memory, recorded)


def memory_of(attn: Attention) -> GraphMemory:
    """What an Attention's graphs share, made now if need be."""
    if attn.graph_memory is None:
        planner: Any = attn._planner  # ``check_capturable`` saw that it plans on the device
        attn.graph_memory = GraphMemory(planner)
    return attn.graph_memory


def check_capturable(attn: Attention) -> None:
    """Raise unless an Attention's steps can be captured."""
    if attn.device.type != "cuda":
        raise bad("attn.device", str(attn.device), "a CUDA device, where CUDA graphs are")
    answer, ranks = attn.explain(), attn.options.context_parallel
    if answer.cuda_graph != "ALWAYS":
        names = ", ".join(row.name for row in answer.rows.values())
        raise bad("attn", f"served by {names}", "kernels that are planned on the device")
    if ranks is not None and ranks.group is not None:
        raise bad("options.context_parallel.group", "given", "None: collectives are not captured")


def bucket_of(
    attn: Attention,
    tokens: int,
    requests: int | None,
    *,
    mixed: bool,
    drafts: Drafts | None,
    shares: bool = False,
) -> Bucket:
    """The bucket that the arguments of ``capture`` mean."""
    limits = attn.limits
    if not is_whole(tokens, 1) or tokens > limits.max_tokens:
        raise bad("tokens", tokens, f"1 to {limits.max_tokens}, as the limits say")
    if requests is None:
        requests = min(tokens, limits.max_requests)
    if not is_whole(requests, 1) or requests > limits.max_requests:
        raise bad("requests", requests, f"1 to {limits.max_requests}, as the limits say")
    if not isinstance(mixed, bool):
        raise bad("mixed", mixed, "True or False")
    if not isinstance(shares, bool) or shares > attn.explain().shares_prefixes:
        raise bad("shares", shares, "False, unless explain().shares_prefixes")
    if drafts is not None and drafts not in DRAFT_FIELDS:
        raise bad("drafts", drafts, "None, 'mask' or 'parents'")
    if drafts is not None and not attn.features.draft_masks:
        raise bad("drafts", drafts, "None, unless Features(draft_masks=True) is declared")
    most = tokens if mixed else min(tokens, attn.explain().decode_threshold)
    size = {"tokens": tokens, "requests": requests, "max_query_len": most}
    return Bucket(**size, drafts=drafts, shares=shares)
