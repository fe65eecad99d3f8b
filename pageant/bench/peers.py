"""What Pageant is timed against on a CPU: torch's own attention, in its fastest form.

All peers take the query heads of a group as further query rows, [B, Hkv, G * m, D]: with one new
token that is several times faster than ``enable_gqa``, and never slower by much. Requests of one
length share a call; where lengths differ, each request has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from pageant.bench.problem import Problem, Run


class CannotRunError(Exception):
    """Why a peer cannot take a case, or not on this machine."""


@dataclass(frozen=True)
class Stack:
    """Requests of one length, as torch's attention takes them.

    Attributes:
        q: [B, Hkv, G * m, D].
        k, v: [B, Hkv, n, D], contiguous.
        mask: [G * m, n], 0 or -inf, model dtype; None for one new token, which sees all keys.
        page_table: int64 [B, W].
        lengths: m and n.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    page_table: torch.Tensor
    lengths: tuple[int, int]


def stacks(problem: Problem) -> list[Stack]:
    """The requests of a problem: all in one if they have one length, else one by one."""
    lengths = problem.case.lengths
    num_requests = len(lengths)
    size = num_requests if len(set(lengths)) == 1 else 1
    queries = problem.q.split([m for m, _ in lengths])
    return [
        _stack(problem, queries, range(first, first + size))
        for first in range(0, num_requests, size)
    ]


def _stack(problem: Problem, queries: tuple[torch.Tensor, ...], requests: range) -> Stack:
    case = problem.case
    m, n = case.lengths[requests[0]]
    group = case.q_heads // case.kv_heads
    q = torch.stack([queries[i].transpose(0, 1) for i in requests])
    mask = None
    if m > 1:
        hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
        mask = torch.zeros(m, n, dtype=case.dtype).masked_fill(hidden, -torch.inf)
        mask = mask.repeat(group, 1)
    k, v = (
        torch.stack([each[i].transpose(0, 1) for i in requests])
        for each in (problem.keys, problem.values)
    )
    table = torch.tensor([problem.page_table[i] for i in requests])
    return Stack(
        q.reshape(len(requests), case.kv_heads, -1, case.head_dim), k, v, mask, table, (m, n)
    )


def _unstack(outs: list[torch.Tensor], problem: Problem, parts: list[Stack]) -> torch.Tensor:
    """[T, Hq, D] of what the calls returned; only views, unless there are several."""
    case = problem.case
    rows = [
        out.reshape(out.shape[0], case.q_heads, part.lengths[0], case.head_dim)
        .transpose(1, 2)
        .reshape(-1, case.q_heads, case.head_dim)
        for out, part in zip(outs, parts, strict=True)
    ]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def sdpa(problem: Problem) -> Run:
    """scaled_dot_product_attention over keys that lie gathered already."""
    parts = stacks(problem)

    def run() -> torch.Tensor:
        outs = [
            scaled_dot_product_attention(part.q, part.k, part.v, attn_mask=part.mask)
            for part in parts
        ]
        return _unstack(outs, problem, parts)

    return run


def sdpa_causal(problem: Problem) -> Run:
    """The same with ``is_causal``, which can skip hidden keys but needs as many rows as keys."""
    parts, heads = stacks(problem), problem.case.q_heads
    if any(m != n or m == 1 for m, n in problem.case.lengths):
        raise CannotRunError("is_causal is another mask, unless all keys are new")

    def run() -> torch.Tensor:
        outs = []
        for part in parts:
            q = part.q.view(len(part.q), heads, part.lengths[0], -1)
            outs.append(
                scaled_dot_product_attention(q, part.k, part.v, is_causal=True, enable_gqa=True)
            )
        return _unstack(outs, problem, parts)

    return run


def gather_sdpa(problem: Problem) -> Run:
    """Copy each request's pages into one buffer, allocated once; then as ``sdpa``."""
    parts, pools = stacks(problem), problem.pools()
    shape = pools[0].shape
    widest = max(part.page_table.numel() for part in parts)
    buffers = [pool.new_empty(widest, *shape[1:]) for pool in pools]

    def gathered(pool: torch.Tensor, buffer: torch.Tensor, part: Stack) -> torch.Tensor:
        table = part.page_table
        rows = torch.index_select(pool, 0, table.view(-1), out=buffer[: table.numel()])
        return rows.view(len(table), -1, *shape[2:])[:, : part.lengths[1]].transpose(1, 2)

    def run() -> torch.Tensor:
        outs = []
        for part in parts:
            k, v = (gathered(*both, part) for both in zip(pools, buffers, strict=True))
            outs.append(scaled_dot_product_attention(part.q, k, v, attn_mask=part.mask))
        return _unstack(outs, problem, parts)

    return run


def flex(problem: Problem) -> Run:
    """Compiled flex_attention over gathered keys; compiling takes a C++ compiler and seconds."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    parts = stacks(problem)
    if len(parts) > 1:
        raise CannotRunError("lengths differ: it would be compiled for each request")
    (part,) = parts
    m, n = part.lengths
    torch.compiler.reset()  # past eight shapes of one function it would no longer compile
    compiled = torch.compile(flex_attention, dynamic=False)
    q, options = part.q, dict[str, Any]()
    if m > 1:
        q = part.q.view(len(part.q), problem.case.q_heads, m, -1)
        mask = create_block_mask(
            lambda b, h, row, key: key <= row + (n - m), None, None, m, n, device="cpu"
        )
        options = {"block_mask": mask, "enable_gqa": True}

    def run() -> torch.Tensor:
        return _unstack([compiled(q, part.k, part.v, **options)], problem, parts)

    try:
        run()
    except RuntimeError as error:  # what every failure of torch's compiler derives from
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise CannotRunError(lines[0] if lines else type(error).__name__) from error
    return run


PEERS: dict[str, Callable[[Problem], Run]] = {
    "sdpa": sdpa,
    "sdpa is_causal": sdpa_causal,
    "gather + sdpa": gather_sdpa,
    "flex_attention": flex,
}
