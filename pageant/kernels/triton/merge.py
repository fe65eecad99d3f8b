"""Join attention over disjoint sets of keys; see ``kernels/merge.py``.

Parts are folded in their order, in registers:

    p' = max(p, lse);  acc = acc e^(p - p') + out e^(lse - p');  t = t e^(p - p') + e^(lse - p')

and at the end out = acc / t, lse = p + ln t. A program takes a few rows, each one token of one
head, and has read all of a row before it writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pageant.cache.tensors import same_memory, spans_meet
from pageant.kernels.triton.common.encode import cast

PROGRAM = 2048  # elements
NUM_WARPS = 4
MOST_PARTS = 32  # of a launch: their pointers and strides fill half of what it may be given


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    outs,
    out_strides,
    lses,
    lse_strides,
    sinks,
    sinks_step,
    to,
    to_strides,
    lse_to,
    num_rows,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: ceil(T * HEADS / ROWS). Strides in elements, of tokens, heads and content.

    outs, lses and their strides are tuples of PARTS; sinks may be None; lse_to is contiguous;
    WIDTH is the next power of 2 of D.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    is_row = row < num_rows
    column = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    inside = is_row[:, None] & (column < D)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    tally = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(PARTS):
        at = token * lse_strides[i][0] + head * lse_strides[i][1]
        lse = tl.load(lses[i] + at, mask=is_row, other=0.0).to(tl.float32)
        lse = tl.where(lse == float("inf"), float("-inf"), lse)
        at = token * out_strides[i][0] + head * out_strides[i][1]
        out = tl.load(outs[i] + at[:, None] + column * out_strides[i][2], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - base)
        weight = tl.exp(lse - base)
        share = out.to(tl.float32) * weight[:, None]
        is_first = tl.broadcast_to((peak == float("-inf"))[:, None], share.shape)
        is_empty = tl.broadcast_to((lse == float("-inf"))[:, None], share.shape)
        # Nothing is added to nothing: the sum of 0.0 and a lone -0.0 would lose a sign.
        share = tl.where(is_first, share, acc * decay[:, None] + share)
        acc = tl.where(is_empty, acc, share)
        tally = tally * decay + weight
        peak = new_peak
    whole = tl.where(tally == 1.0, peak, peak + tl.log(tally))  # a lone -0.0 keeps its sign
    divisor = tl.broadcast_to(tally[:, None], acc.shape)
    joined = tl.div_rn(acc, tl.where(divisor == 0.0, 1.0, divisor))
    if sinks is not None:
        sink = tl.load(sinks + head * sinks_step, mask=is_row, other=0.0)
        joined = tl.div_rn(joined, tl.broadcast_to(1.0 + tl.exp(sink - whole)[:, None], acc.shape))
    joined = tl.where(divisor == 0.0, 0.0, joined)
    at = token * to_strides[0] + head * to_strides[1]
    place = to + at[:, None] + column * to_strides[2]
    tl.store(place, cast(joined, to.dtype.element_ty), mask=inside)
    tl.store(lse_to + row, whole, mask=is_row)


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write one state from several, in one launch for each `MOST_PARTS` of them.

    Args:
        outs, lses, sinks, out: as in ``pageant.ops.merge_states``, one part or more.
        lse: float32 [T, H], contiguous, written.
    """
    while len(outs) > MOST_PARTS:
        some, some_lse = out.new_empty(out.shape, dtype=torch.float32), torch.empty_like(lse)
        _launch(outs[:MOST_PARTS], lses[:MOST_PARTS], None, some, some_lse)
        outs, lses = [some, *outs[MOST_PARTS:]], [some_lse, *lses[MOST_PARTS:]]
    read = [*outs, *lses, *(() if sinks is None else (sinks,))]
    if all(same_memory(part, out) or not spans_meet(part, out) for part in read):
        _launch(outs, lses, sinks, out, lse)
    else:  # a row written could be another that is not read yet
        apart = torch.empty_like(out, memory_format=torch.contiguous_format)
        _launch(outs, lses, sinks, apart, lse)
        out.copy_(apart)


def _launch(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    tokens, heads, dim = out.shape
    if tokens * heads == 0:
        return
    width = triton.next_power_of_2(max(dim, 1))  # without values there is still an lse
    rows = max(PROGRAM // width, 1)
    merge_kernel[(-(-tokens * heads // rows),)](
        tuple(outs),
        tuple(part.stride() for part in outs),
        tuple(lses),
        tuple(part.stride() for part in lses),
        sinks,
        0 if sinks is None else sinks.stride(0),
        out,
        out.stride(),
        lse,
        tokens * heads,
        D=dim,
        HEADS=heads,
        PARTS=len(outs),
        ROWS=rows,
        WIDTH=width,
        num_warps=NUM_WARPS,
    )
