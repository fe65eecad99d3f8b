"""Decode steps of a model as CUDA graphs: one launch a step, whatever the model launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pageant.api import Attention
from pageant.engine.errors import EngineError
from pageant.graphs import Buckets, Graph
from pageant.plan.batch import Batch
from pageant.plan.build import Plan
from pageant.types import ArgumentError

# Logits [T, V] of a planned step's token ids and positions, int64 [T].
Forward = Callable[[Plan, torch.Tensor, torch.Tensor], torch.Tensor]

WITHOUT = "to run without CUDA graphs: --no-graphs, or EngineConfig(graphs=False)"


class DecodeGraphs:
    """Graphs of 1, 2, 4, 8, … tokens; each is captured when a step first needs it.

    Those of batches that bring shared_prefix_lens look for keys to compute once.

    Args:
        attention: on a CUDA device.
        forward: the model; it may not synchronise.

    Raises:
        EngineError: the attention's kernels cannot be captured.
    """

    def __init__(self, attention: Attention, forward: Forward) -> None:
        self._forward = forward
        self._longest = attention.explain().decode_threshold
        try:
            self._graphs = Buckets(attention, self._step)
            shares = attention.explain().shares_prefixes
            self._sharing = Buckets(attention, self._step, shares=True) if shares else None
        except ArgumentError as error:
            raise EngineError(f"{error}; {WITHOUT}") from error
        with torch.inference_mode(False):
            rows = torch.zeros(2, self._graphs.sizes[-1], dtype=torch.int64)
            self._token_ids, self._positions = rows.to(attention.device)
        self._logits: torch.Tensor | None = None

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one of decodes alone."""
        return batch.max_query_len <= self._longest

    def run(self, batch: Batch, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute a step of decodes.

        Args:
            batch: on the device.
            token_ids, positions: int64 [T], on the device.

        Returns:
            Logits [T, V], which the next step overwrites.

        Raises:
            EngineError: the model's step cannot be captured.
        """
        graph = self._graph_for(batch)
        count = batch.num_tokens
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        graph.replay(batch)
        assert self._logits is not None
        return self._logits[:count]

    def _graph_for(self, batch: Batch) -> Graph:
        graphs = self._graphs
        if batch.shared_prefix_lens is not None and self._sharing is not None:
            graphs = self._sharing
        try:
            return graphs.graph_for(batch)
        except RuntimeError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise EngineError(
                f"the model's decode step cannot be captured: {reason}; {WITHOUT}"
            ) from error

    def _step(self, plan: Plan) -> None:
        """What a graph holds; padding is computed too, from the ids of steps before."""
        count = plan.batch.num_tokens
        logits = self._forward(plan, self._token_ids[:count], self._positions[:count])
        if self._logits is None:  # in the warm-up, not in a graph: one for all of them
            self._logits = logits.new_empty(len(self._token_ids), logits.shape[-1])
        self._logits[:count] = logits
