"""CUDA graphs that replay a step with other lengths, pages and drafts.

A graph holds planning and whatever `fn` launches: one replay is a whole step. `fn` is given the
plan; all else it reads lies in static tensors of the caller's, who fills them before a replay:

    hidden = torch.zeros(limits.max_tokens, 4096, device="cuda")    # the caller's own
    result = torch.zeros_like(hidden)

    def step(plan):
        rows = hidden[: plan.batch.num_tokens]                      # as many as the bucket has
        for layer in layers:
            rows = layer(rows, attn, plan)                          # calls attn.write, attn.run
        result[: plan.batch.num_tokens] = rows

    decodes = graphs.Buckets(attn, step)                            # captured when first needed
    hidden[: batch.num_tokens] = embed(tokens)
    decodes.replay(batch)

All graphs of one Attention share a memory pool, the tensors batches are copied into, and the plan's
work lists, none of which is a slot that `attn.plan` takes. So a graph costs what `fn` keeps alive,
and they replay one at a time, on the stream the caller is on.
"""

from pageant.graphs.buckets import Buckets
from pageant.graphs.graph import Graph, GraphMemory, capture

__all__ = ["Buckets", "Graph", "GraphMemory", "capture"]
