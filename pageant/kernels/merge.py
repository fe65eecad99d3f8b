"""Join attention over disjoint sets of keys, any number of parts at once, on any device.

    whole = ln sum_s e^(lse_s);  out = sum_s e^(lse_s - whole) out_s / (1 + e^(sink - whole))

A part of lse -inf (or +inf, which some libraries report) is empty: nothing of its out is used, and
one part that is not empty comes back bit for bit, negative zeros included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageant.cache.tensors import FLOATS, check_tensor, check_writable, overlaps_itself
from pageant.select.choose import load_step
from pageant.types import bad

DTYPES = (*FLOATS, torch.float64)


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One state from several, in float32; nothing waits for the device.

    Args:
        outs: a list of [T, H, Dv], floating point, normalised without any sink; any strides; may
            alias `out`.
        lses: a list of [T, H], floating point, natural log, without any sink.
        sinks: float32 [H]: e^sink joins the denominator once.
        out: [T, H, Dv], written and returned; None makes one of the first of `outs`' dtype.

    Returns:
        out, and lse float32 [T, H], without the sink; rows no part has keys for: zeros and -inf.

    Raises:
        ArgumentError: for parts that are no tensors, do not fit together, or require grad.

    >>> ln2 = torch.tensor([[0.6931472]])
    >>> out, lse = merge_states([torch.ones(1, 1, 2), torch.zeros(1, 1, 2)], [ln2, ln2])
    >>> out.flatten(), lse.item()
    (tensor([0.5000, 0.5000]), 1.3862943649291992)
    """
    _check(outs, lses, sinks, out)
    shape, device = outs[0].shape, outs[0].device
    if out is None:
        out = torch.empty(shape, dtype=outs[0].dtype, device=device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
    load_step("merge_states", device)(outs, lses, sinks, out, lse)
    return out, lse


def _check(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, list | tuple):
            raise bad(name, f"a {type(parts).__name__}", "a list of tensors")
    if not outs:
        raise bad("outs", [], "one part or more")
    if len(lses) != len(outs):
        raise bad("lses", f"a list of {len(lses)}", f"one lse for each of the {len(outs)} outs")
    check_tensor("outs[0]", outs[0], DTYPES, dims=3)
    shape, device = outs[0].shape, outs[0].device
    for name, parts, want in (("outs", outs, shape), ("lses", lses, shape[:2])):
        for index, part in enumerate(parts):
            _check_part(f"{name}[{index}]", part, DTYPES, want, device)
    if sinks is not None:
        _check_part("sinks", sinks, (torch.float32,), shape[1:2], device)
    if out is not None:
        _check_part("out", out, DTYPES, shape, device)
        check_writable("out", out)
        if overlaps_itself(out):
            raise bad("out", f"a tensor of strides {out.stride()}", "rows that do not overlap")


def _check_part(
    name: str,
    x: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: torch.Size,
    device: torch.device,
) -> None:
    check_tensor(name, x, dtypes, device=device)
    if x.shape != shape:
        raise bad(name, list(x.shape), str(list(shape)))
