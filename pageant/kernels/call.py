"""What one kernel launch is given: every kernel of every language takes an AttentionCall."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pageant.cache.out_scales import OutScales
from pageant.cache.pages import LayerCache
from pageant.plan.buffers import Workspace
from pageant.plan.inputs import LayerParams
from pageant.ranks import ALONE, ContextParallel


@dataclass(kw_only=True, slots=True, eq=False)
class AttentionCall:
    """One phase of one layer. Rows past the real tokens are never touched.

    Attributes:
        q: [>= T, Hq, D], model dtype, any strides with unit content stride.
        cache: the layer's pages.
        out: [>= T, Hq, Dv], model dtype, or float32 where the rows are quantised afterwards;
            written at the rows the work list names. Kernels whose planner says that they quantise
            outputs get what the layer's out_format says, nvfp4 as uint8 [>= T, Hq, Dv / 2].
        lse: float32 [>= T, Hq], natural log, or None.
        query_start_loc: int32 [R + 1], first token of each request.
        key_lens: int32 [R], keys of each request (n), on all ranks together.
        page_table: int32 [R, W].
        shard: which of a request's keys the pages hold; the work list counts those alone.
        causal: for all requests, or bool [R].
        draft_mask: bool [T, M]; column c is key n - m + c of the row's request; or None.
        params: scale, window, cap, sinks, slopes.
        work: which rows and keys, in which shares: a WorkList, or on a GPU a DeviceWork; for
            kernels of another library a HostWork.
        workspace: room for partial results.
        out_scales: block scales of an nvfp4 `out`.
        kept: of the caller, what kernels want to find again when a call comes with the same cache
            and parameters, and tensors of the same types, sizes and strides.
    """

    q: torch.Tensor
    cache: LayerCache
    out: torch.Tensor
    lse: torch.Tensor | None
    query_start_loc: torch.Tensor
    key_lens: torch.Tensor
    page_table: torch.Tensor
    causal: bool | torch.Tensor
    draft_mask: torch.Tensor | None
    params: LayerParams
    work: Any
    workspace: Workspace
    shard: ContextParallel = ALONE
    out_scales: OutScales | None = None
    kept: dict[Any, Any] = field(default_factory=dict)
