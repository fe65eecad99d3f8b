"""Where a layer's output goes: tensors the caller gives, checked, or a new one."""

from __future__ import annotations

import torch

from pageant.cache.formats import FORMATS
from pageant.cache.out_scales import TILE_ROWS, OutScales, SwizzledScales, swizzled_columns
from pageant.cache.pages import LayerCache
from pageant.cache.tensors import (
    check_tensor,
    check_writable,
    overlaps_itself,
    rows_meet,
    same_memory,
    spans_meet,
)
from pageant.plan.inputs import LayerParams, check_rows
from pageant.select.bounds import is_whole
from pageant.types import Shape, bad

SCALE_DTYPES = (torch.float8_e4m3fn,)


def new_out(q: torch.Tensor, real_tokens: int, shape: Shape, params: LayerParams) -> torch.Tensor:
    """Room for the output of a query's rows; zeros past the real tokens."""
    size, dtype = _row(shape, params)
    out = q.new_empty(q.shape[0], shape.num_q_heads, size, dtype=dtype)
    out[real_tokens:] = 0
    return out


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """float32 [T, Hq] for a query's rows: -inf."""
    return q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)


def zeroed(
    out: torch.Tensor | None,
    out_scales: OutScales | None,
    q: torch.Tensor,
    shape: Shape,
    params: LayerParams,
) -> torch.Tensor:
    """The output of a run that attends to nothing: what was given, all of it 0, or a new one."""
    scales = check_output(out, out_scales, q, None, params, shape, 0)
    if scales is not None:
        scales.zero_()
    return new_out(q, 0, shape, params) if out is None else out.zero_()


def _row(shape: Shape, params: LayerParams) -> tuple[int, torch.dtype]:
    """Elements of `out` that hold one head of one token, and their type."""
    if params.out_format == "model":
        return shape.value_dim, shape.dtype
    fmt = FORMATS[params.out_format]
    return shape.value_dim // fmt.per_byte, fmt.element_dtype


def check_output(
    out: torch.Tensor | None,
    out_scales: OutScales | None,
    q: torch.Tensor,
    cache: LayerCache | None,
    params: LayerParams,
    shape: Shape,
    num_tokens: int,
) -> torch.Tensor | None:
    """Raise unless the output's tensors are of the layer's out_format and harm nothing.

    Writing them must change nothing that is still to be read, and write nothing twice. `out` may be
    q itself: same memory, same strides. Otherwise neither shares an element with q or the other,
    and both lie outside the memory from the first to the last byte of anything else. Returns the
    tensor of the block scales.
    """
    if out is not None:
        size, dtype = _row(shape, params)
        check_rows("out", out, (num_tokens, shape.num_q_heads, size), (dtype,), q.device)
        if out.stride(-1) != 1:
            raise bad("out", f"content stride {out.stride(-1)}", "content stride 1")
        _check_memory("out", out, cache, params)
        if not same_memory(out, q) and rows_meet(out, q):
            raise bad("out", "a part of q's memory", "q itself, or memory of its own")
    scales = _check_scales(out_scales, q.device, params, shape, num_tokens)
    if scales is not None:
        _check_memory("out_scales", scales, cache, params)
        for name, x in (("q", q), ("out", out)):
            if x is not None and rows_meet(scales, x):
                raise bad("out_scales", f"a part of {name}'s memory", "memory of its own")
    return scales


def _check_memory(
    name: str, x: torch.Tensor, cache: LayerCache | None, params: LayerParams
) -> None:
    check_writable(name, x)
    if overlaps_itself(x):
        raise bad(name, f"a tensor of strides {x.stride()}", "rows that do not overlap")
    pages = () if cache is None else cache.tensors
    others = {"cache": pages, "layer": (params.sinks, params.alibi_slopes)}
    for owner, tensors in others.items():
        if any(other is not None and spans_meet(x, other) for other in tensors):
            raise bad(name, f"inside the {owner}'s memory", "memory of its own")


def _check_scales(
    given: OutScales | None,
    device: torch.device,
    params: LayerParams,
    shape: Shape,
    num_tokens: int,
) -> torch.Tensor | None:
    """The tensor of the block scales; None for formats that have none."""
    block = 0 if params.out_format == "model" else FORMATS[params.out_format].scale_block
    if not block:
        if given is not None:
            raise bad("out_scales", "given", f"None for out_format {params.out_format!r}")
        return None
    blocks = shape.num_q_heads * shape.value_dim // block
    if isinstance(given, SwizzledScales):
        _check_swizzled(given, device, blocks, num_tokens)
        return given.scales
    linear = f"[at least {num_tokens}, {blocks}], or a pageant.SwizzledScales"
    if given is None:
        raise bad("out_scales", None, f"float8_e4m3fn {linear}, for {params.out_format} output")
    check_tensor("out_scales", given, SCALE_DTYPES, dims=2, device=device)
    if given.shape[0] < num_tokens or given.shape[1] != blocks:
        raise bad("out_scales", list(given.shape), linear)
    if blocks > 1 and given.stride(1) != 1:
        raise bad("out_scales", f"content stride {given.stride(1)}", "content stride 1")
    return given


def _check_swizzled(
    given: SwizzledScales, device: torch.device, blocks: int, num_tokens: int
) -> None:
    scales, start = given.scales, given.start_row
    check_tensor("out_scales", scales, SCALE_DTYPES, dims=2, device=device)
    columns = swizzled_columns(blocks)
    if scales.shape[0] % TILE_ROWS or scales.shape[1] != columns:
        allowed = f"[a multiple of {TILE_ROWS}, {columns}] for scales that are swizzled"
        raise bad("out_scales", list(scales.shape), allowed)
    if not scales.is_contiguous():
        raise bad("out_scales", f"a tensor of strides {scales.stride()}", "a contiguous one")
    last = scales.shape[0] - num_tokens
    if not is_whole(start, 0) or start > last:
        raise bad(
            "out_scales",
            f"{scales.shape[0]} rows from start_row {start!r}",
            f"room for {num_tokens} tokens from a start_row of 0 or more",
        )
