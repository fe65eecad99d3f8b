"""What compute-sanitizer watches: ``python -m tests.gpu.memcheck FORMAT``, or ``planted``.

The lengths fill no page and no tile, and end where memory ends.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl

from tests.inputs import BOUNDS, Case, Problem, assert_close, build

LENGTHS = ((1, 33), (1, 260), (0, 0), (3, 3), (37, 41))


def check(name: str) -> None:
    """Plan, run and write a format, with all features."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    case = Case(
        seed=5,
        lengths=LENGTHS,
        dtype=dtype,
        format=name,
        head_dim=40,
        v_head_dim=72,
        page_size=5,
        window=100,
        soft_cap=20.0,
        alibi=True,
        sinks=True,
        scales=True,
        drafts="parents",
        speculative=3,
    )
    problem = build(case).on("cuda")
    out, lse = problem.run()
    assert_close(out, problem.expected_out, BOUNDS[dtype])
    assert_close(lse, problem.expected_lse, BOUNDS[dtype])
    write(problem)
    torch.cuda.synchronize()


def write(problem: Problem) -> None:
    """Store the new tokens in the last slots of the pool."""
    shape, cache, count = problem.attn.shape, problem.cache, problem.q.shape[0]
    slots = torch.arange(cache.num_pages * cache.page_size, device="cuda")
    plan = problem.attn.plan(replace(problem.batch, slot_mapping=slots[-count:]))
    sizes = (shape.head_dim, shape.value_dim)
    k, v = (
        torch.ones(count, shape.num_kv_heads, size, dtype=shape.dtype, device="cuda")
        for size in sizes
    )
    problem.attn.write(plan, cache, k, v, problem.layer)


@triton.jit
def _past_the_end(x, size):
    tl.store(x + size, 1.0)


def planted() -> None:
    """A store one page behind a tensor's end."""
    x = torch.zeros(1024, device="cuda")
    _past_the_end[(1,)](x, 1 << 20)
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "planted":
        planted()
    else:
        check(sys.argv[1])
