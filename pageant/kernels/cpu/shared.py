"""Keys that several requests share, on the CPU: once for all rows of the group.

A row's rows of partial results are later merged as

    lse = ln sum_s e^(lse_s);  out = sum_s e^(lse_s - lse) out_s

so what all parts have in common, the sink, is left out here. ALiBi's bias is slope * (j - p): a
gathered row stands elsewhere than its token, which moves all its scores, and so its lse, by one
number.

Rows are gathered and handed out by numpy, in this thread: torch's would spin on the cores that the
kernel uses next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from pageant.kernels.call import AttentionCall
from pageant.plan.shared import SharedWork
from pageant.ranks import ALONE

INTEGERS = {2: torch.int16, 4: torch.int32}


def run(kernel: Callable[..., None], shared: SharedWork, call: AttentionCall) -> None:
    """Compute the keys that requests share and those that each has alone, in one launch.

    Args:
        kernel: attends to requests: ``attention.run``.
        shared: the groups.
        call: of the requests themselves and their own keys.
    """
    codes = call.q.view(INTEGERS[call.q.element_size()]).numpy()
    q = torch.from_numpy(codes[shared.rows]).view(call.q.dtype)
    out = torch.empty(*q.shape[:2], call.out.shape[2])
    lse = torch.empty(q.shape[:2])
    workspace = call.workspace
    assert workspace.shared is not None
    gathered = replace(
        call,
        q=q,
        out=out,
        lse=lse,
        query_start_loc=shared.query_start_loc,
        key_lens=shared.key_lens,
        page_table=shared.page_table,
        causal=False,
        draft_mask=None,
        params=replace(call.params, window=None, sinks=None),
        work=shared.work,
        shard=ALONE,
        workspace=workspace.shared,
    )

    def hand_out() -> None:
        if call.params.alibi_slopes is not None:
            lse.add_(shared.moved[:, None] * call.params.alibi_slopes)
        for parts, rows in ((workspace.partial_out, out), (workspace.partial_lse, lse)):
            parts.numpy().reshape(-1, *rows.shape[1:])[shared.slots] = rows.numpy()

    kernel(call, gathered, hand_out)
