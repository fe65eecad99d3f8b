"""Run one step: turn scheduled work into a batch, and the batch into logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pageant.api import Attention
from pageant.cache.pages import PagedCache
from pageant.engine.scheduler import Work
from pageant.integrations.transformers import Step
from pageant.plan.batch import Batch
from pageant.ranks import ALONE, ContextParallel
from pageant.types import Layer


class Runner:
    """A model, and the attention and cache its layers use.

    Args:
        model: a transformers model prepared by ``integrations.transformers.layers_of``.
        attention, cache: built for the model's shape and layers.
        layers: one Layer for each layer of the model.

    Attributes:
        shared_pages: pages whose keys the latest step computed once for several requests.
    """

    shared_pages = 0

    def __init__(
        self,
        model: Any,
        attention: Attention,
        cache: PagedCache,
        layers: list[Layer],
    ) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.layers = layers
        self.shard = attention.options.context_parallel or ALONE
        self.device: torch.device = model.device

    def run(self, works: list[Work]) -> torch.Tensor:
        """Compute a step in batch order.

        Returns:
            Logits [S, V] in the model's dtype: of each work that samples, in order, the row of its
            last token, then one for each of its drafts.
        """
        inputs = StepInputs(works, self.attention.cache.page_size, self.shard)
        plan = self.attention.plan(inputs.batch(self.device))
        self.shared_pages = max(
            sum(len(prefix.pages) for prefix in prefixes) for prefixes in plan.shared.values()
        )
        output = self.model(
            input_ids=self._put(inputs.token_ids)[None],
            position_ids=self._put(inputs.positions)[None],
            use_cache=False,
            logits_to_keep=self._put(inputs.sampling_rows),
            pageant_step=Step(self.attention, plan, self.cache, self.layers),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _put(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class StepInputs:
    """A step as arrays on the host; R requests, T tokens.

    Page i of a request holds its tokens from i * page_size * world on, `page_size` of them here.

    Attributes:
        token_ids, positions: int64 [T].
        slots: int64 [T], -1 for tokens of other ranks.
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        page_table: int32 [R, W], W just wide enough.
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
        query_start_loc = torch.from_numpy(self.query_start_loc)
        seq_lens = torch.from_numpy(self.seq_lens)
        return Batch(
            query_start_loc=query_start_loc.to(device),
            seq_lens=seq_lens.to(device),
            page_table=torch.from_numpy(self.page_table).to(device),
            slot_mapping=torch.from_numpy(self.slots).to(device),
            num_requests=len(self.seq_lens),
            num_tokens=len(self.token_ids),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc_cpu=query_start_loc,
            seq_lens_cpu=seq_lens,
        )
