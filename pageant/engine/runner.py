"""Run one step: turn scheduled work into a batch, and the batch into logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pageant.api import Attention
from pageant.cache.pages import PagedCache
from pageant.engine.decode_graphs import DecodeGraphs
from pageant.engine.scheduler import Work
from pageant.integrations.transformers import Step
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.ranks import ALONE, ContextParallel
from pageant.types import Layer

SHARED_TOKENS = 256  # requests that begin with as many are told to the planner


class Runner:
    """A model, and the attention and cache its layers use.

    Args:
        model: a transformers model prepared by ``integrations.transformers.layers_of``.
        attention, cache: built for the model's shape and layers.
        layers: one Layer for each layer of the model.
        graphs: replay steps of decodes as CUDA graphs.

    Attributes:
        graphs: those graphs, or None.
        shared_pages: pages whose keys the latest step computed once for several requests.
    """

    shared_pages = 0

    def __init__(
        self,
        model: Any,
        attention: Attention,
        cache: PagedCache,
        layers: list[Layer],
        *,
        graphs: bool = False,
    ) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.layers = layers
        self.shard = attention.options.context_parallel or ALONE
        self.device: torch.device = model.device
        self.graphs = DecodeGraphs(attention, self._forward) if graphs else None

    def run(self, works: list[Work]) -> torch.Tensor:
        """Compute a step in batch order.

        Returns:
            Logits [S, V] in the model's dtype: of each work that samples, in order, the row of its
            last token, then one for each of its drafts.
        """
        inputs = StepInputs(works, self.attention.cache.page_size, self.shard)
        batch = inputs.batch(self.device)
        tokens = put(inputs.token_ids, self.device), put(inputs.positions, self.device)
        wanted = put(inputs.sampling_rows, self.device)
        if self.graphs is not None and self.graphs.takes(batch):
            self.shared_pages = 0
            return self.graphs.run(batch, *tokens)[wanted]
        plan = self.attention.plan(batch)
        self.shared_pages = max(
            sum(len(prefix.pages) for prefix in prefixes) for prefixes in plan.shared.values()
        )
        return self._forward(plan, *tokens, wanted)

    def _forward(
        self,
        plan: Plan,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """Logits [.., V] of the rows that are wanted; 0: of all."""
        output = self.model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            pageant_step=Step(self.attention, plan, self.cache, self.layers),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def put(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array on a device; on a GPU nothing waits for the copy.

    Its pinned memory is torch's, which hands it out again once the copy is done, never before.
    """
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class StepInputs:
    """A step as arrays on the host; R requests, T tokens.

    Page i of a request holds its tokens from i * page_size * world on, `page_size` of them here.

    Attributes:
        token_ids, positions: int64 [T].
        slots: int64 [T], -1 for tokens of other ranks.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        page_table: int32 [R, W], W just wide enough.
        shared_prefix_lens: int32 [R], SHARED_TOKENS or a little less where another request begins
            with the same pages, else 0; None if none does.
        sampling_rows: int64 [S], the tokens whose logits are wanted.
    """

    def __init__(self, works: list[Work], page_size: int, shard: ContextParallel = ALONE) -> None:
        starts = np.array([work.start for work in works], np.int32)
        query_lens = np.array([work.num_tokens + len(work.drafts) for work in works], np.int32)
        self.query_start_loc = np.zeros(len(works) + 1, np.int32)
        np.cumsum(query_lens, out=self.query_start_loc[1:])
        self.seq_lens = starts + query_lens
        self.max_query_len = int(query_lens.max())
        self.max_seq_len = int(self.seq_lens.max())

        width = -(-self.max_seq_len // (page_size * shard.world))
        self.page_table = np.zeros((len(works), width), np.int32)
        for row, work in zip(self.page_table, works, strict=True):
            row[: work.request.num_pages] = work.request.pages[: work.request.num_pages]

        self.shared_prefix_lens = _shared(self.page_table, self.seq_lens, page_size * shard.world)

        self.token_ids = np.concatenate([work.token_ids for work in works])
        first_positions = np.repeat(starts - self.query_start_loc[:-1], query_lens)
        self.positions = np.arange(len(self.token_ids)) + first_positions
        requests = np.repeat(np.arange(len(works)), query_lens)
        pages = self.page_table[requests, self.positions // (page_size * shard.world)]
        held = shard.count(self.positions)
        slots = pages.astype(np.int64) * page_size + held % page_size
        mine = self.positions // shard.interleave % shard.world == shard.rank
        self.slots = np.where(mine, slots, -1)

        wanted = [1 + len(work.drafts) if work.samples else 0 for work in works]
        first_wanted = np.repeat(self.query_start_loc[1:] - wanted, query_lens)
        self.sampling_rows = np.flatnonzero(np.arange(len(self.token_ids)) >= first_wanted)

    def batch(self, device: torch.device) -> Batch:
        """The step as Pageant plans it."""
        shared = self.shared_prefix_lens
        return Batch(
            query_start_loc=put(self.query_start_loc, device),
            seq_lens=put(self.seq_lens, device),
            page_table=put(self.page_table, device),
            slot_mapping=put(self.slots, device),
            num_requests=len(self.seq_lens),
            num_tokens=len(self.token_ids),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc_cpu=torch.from_numpy(self.query_start_loc),
            seq_lens_cpu=torch.from_numpy(self.seq_lens),
            shared_prefix_lens=None if shared is None else put(shared, device),
        )


def _shared(
    page_table: np.ndarray[Any, Any], seq_lens: np.ndarray[Any, Any], page_tokens: int
) -> np.ndarray[Any, Any] | None:
    """See ``StepInputs.shared_prefix_lens``: whoever shares a page shares those before it."""
    pages = max(1, SHARED_TOKENS // page_tokens)
    full = np.flatnonzero(seq_lens >= pages * page_tokens)
    if len(full) < 2:
        return None
    last = page_table[full, pages - 1]
    _, same, counts = np.unique(last, return_inverse=True, return_counts=True)
    sharing = full[counts[same] > 1]
    if not len(sharing):
        return None
    lens = np.zeros(len(seq_lens), np.int32)
    lens[sharing] = pages * page_tokens
    return lens
