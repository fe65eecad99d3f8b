"""Every operation in plain PyTorch, in float64: what all other kernels are compared with.

Row i of a request with m new tokens and n keys sits at position p = n - m + i.

    s = score_scale * (q . k);  s = cap * tanh(s / cap);  s = s + slope * (j - p);  mask
    out = value_scale * sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink));  lse = ln sum_j exp(s_j)

Written to be read: one function an idea, one request at a time, no regard for speed.
"""

from __future__ import annotations

import torch

from pageant.cache.formats import FORMATS, Format
from pageant.cache.layout import swizzled
from pageant.cache.out_scales import OutScales
from pageant.cache.pages import LayerCache, Side
from pageant.cache.quantize import decode, encode
from pageant.kernels.call import AttentionCall
from pageant.plan.inputs import LayerParams
from pageant.plan.work import REQUEST
from pageant.types import Scalar

EXACT = torch.float64
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch indexes those on every device


def run(call: AttentionCall) -> None:
    """Attention of every request the work list names, rounded to the call's own types."""
    for request in sorted(set(call.work.items[: call.work.counts[0], REQUEST].tolist())):
        first, last = call.query_start_loc[request : request + 2].tolist()
        n = int(call.key_lens[request])
        pages = call.page_table[request]
        mask = visible(
            last - first,
            n,
            causal=bool(call.causal if isinstance(call.causal, bool) else call.causal[request]),
            window=call.params.window,
            draft=None if call.draft_mask is None else call.draft_mask[first:last],
        )
        keys = call.shard.position(torch.arange(call.shard.count(n)))
        mask, near = mask[:, keys], keys - n
        k, v = (gather(side, call.cache.format, pages, mask) for side in call.cache.sides)
        out, lse = attend(call.q[first:last].to(EXACT), k, v, mask, call.params, near)
        call.out[first:last] = out.to(call.out.dtype)
        if call.lse is not None:
            call.lse[first:last] = lse.float()


def visible(
    m: int, n: int, *, causal: bool, window: int | None, draft: torch.Tensor | None
) -> torch.Tensor:
    """bool [m, n]: whether row i sees key j.

    Three new tokens after one cached, a window of two; rows are positions 1, 2 and 3:

    >>> visible(3, 4, causal=True, window=2, draft=None).int()
    tensor([[1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    position = torch.arange(n - m, n)[:, None]
    key = torch.arange(n)
    if draft is not None:
        mask = (key < n - m).expand(m, n).clone()
        newest = min(m, n)
        mask[:, n - newest :] = draft[:, m - newest : m].cpu()
    elif causal:
        mask = key <= position
    else:
        mask = torch.ones(m, n, dtype=torch.bool)
    if window is not None:
        mask = mask & (key > position - window)
    return mask


def gather(side: Side, fmt: Format, pages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float64 [n, Hkv, D]: one request's stored keys or values; zeros where no row looks.

    Args:
        side: the layer's keys or values.
        fmt: their format.
        pages: int [W], the request's page ids.
        mask: bool [m, n].
    """
    view = side.elements
    heads, dim = view.shape[2], view.shape[3] * fmt.per_byte
    rows = torch.zeros(mask.shape[1], heads, dim, dtype=EXACT, device=view.device)
    seen = mask.any(0).nonzero().squeeze(1).to(view.device)
    page, row = pages[seen // view.shape[1]].long(), seen % view.shape[1]
    codes = view.view(INTEGERS[view.element_size()])[page, row]
    scales = None if side.scales is None else _scales(side, side.scales, page, row)
    rows[seen] = decode(codes, scales, fmt, EXACT)
    return rows


def _scales(
    side: Side, scales: torch.Tensor, page: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """Stored scales of some tokens: [n, Hkv], or [n, Hkv, blocks]."""
    whole = scales.view(INTEGERS[scales.element_size()])
    if not side.is_swizzled:
        return whole[page, row].view(scales.dtype)
    rows, columns = swizzled(row, scales.shape[3])
    return whole[page[:, None], rows, :, columns].transpose(1, 2).contiguous().view(scales.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    params: LayerParams,
    near: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request.

    Args:
        q: [m, Hq, D].
        k, v: [n, Hkv, D] and [n, Hkv, Dv], the same dtype as q.
        mask: bool [m, n].
        params: scale, cap, slopes, sinks.
        near: int64 [n], where each key stands, from the position after the last row's on; None
            if they are the n before it.

    Returns:
        out [m, Hq, Dv] and lse [m, Hq].
    """
    scores = scored(q, k, mask, params, near)
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(scores - shift[..., None])
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(0, 1)
    out = (weights @ values).transpose(0, 1) * params.value_scale
    lse = lse.transpose(0, 1)
    return with_sinks(out, lse, params.sinks), lse


def scored(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor,
    params: LayerParams,
    near: torch.Tensor | None = None,
) -> torch.Tensor:
    """[Hq, m, n]: scaled, capped and biased scores; -inf where the mask hides the key."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * params.score_scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    if params.alibi_slopes is not None:
        near = torch.arange(-k.shape[0], 0) if near is None else near
        distance = near[None, :] - torch.arange(-q.shape[0], 0)[:, None]
        slopes = params.alibi_slopes.to(q.dtype)[:, None, None]
        scores = scores + slopes * distance.to(q.device)
    return scores.masked_fill(~mask.to(q.device), -torch.inf)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`out` [T, H, Dv] with exp(sink) in each head's denominator; lse [T, H] is without it."""
    if sinks is None:
        return out
    share = torch.sigmoid(lse - sinks.to(lse.dtype))
    return torch.where(lse[..., None] == -torch.inf, 0.0, out * share[..., None])


def quantize_out(
    rows: torch.Tensor, out: torch.Tensor, scales: OutScales | None, params: LayerParams
) -> None:
    """Store finished rows in a quantised form, one token and one block after another.

    Args:
        rows: float32 [T, Hq, Dv].
        out: fp8 [>= T, Hq, Dv], or for nvfp4 uint8 [>= T, Hq, Dv / 2].
        scales: of nvfp4; None for fp8.
        params: out_format and out_scale.
    """
    fmt = FORMATS[params.out_format]
    for token, row in enumerate(rows):
        if scales is None:
            out[token], _ = encode(row, fmt, params.out_scale)
            continue
        for block, values in enumerate(row.reshape(-1, fmt.scale_block)):
            codes, scale = encode(values * params.out_scale, fmt)
            head, place = divmod(block * len(codes), out.shape[2])
            out[token, head, place : place + len(codes)] = codes
            assert scale is not None
            _scale_of(scales, token, block).copy_(scale[0])


def _scale_of(scales: OutScales, token: int, block: int) -> torch.Tensor:
    """The one element, a view, that holds the scale of a token's block."""
    if isinstance(scales, torch.Tensor):
        return scales[token, block]
    row = scales.start_row + token
    tiles = scales.scales.view(-1, scales.scales.shape[1] // 4, 32, 4, 4)
    return tiles[row // 128, block // 4, row % 32, row % 128 // 32, block % 4]


def merge_states(
    outs: list[torch.Tensor], lses: list[torch.Tensor], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join attention over disjoint keys: float64 [T, H, Dv] and [T, H].

    An lse of +inf is read as -inf, an empty part; nothing of its out is used.
    """
    lse = torch.stack([part.to(EXACT) for part in lses])
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    whole = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - whole.masked_fill(whole == -torch.inf, 0.0))
    parts = torch.stack([part.to(EXACT) for part in outs])
    parts = torch.where(lse[..., None] == -torch.inf, 0.0, parts * weights[..., None])
    return with_sinks(parts.sum(0), whole, sinks), whole


def write_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    scales: tuple[Scalar, Scalar] = (1.0, 1.0),
) -> None:
    """Store each token's key and value at its slot; negative slots are skipped."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        page, row = divmod(slot, cache.page_size)
        for x, side, scale in zip((k, v), cache.sides, scales, strict=True):
            codes, stored = encode(x[token], cache.format, scale)
            side.elements[page, row] = codes
            if stored is None or side.scales is None:
                continue
            if side.is_swizzled:
                rows, columns = swizzled(torch.tensor(row), stored.shape[1])
                plane = side.scales[page].view(torch.uint8)
                plane[rows, :, columns] = stored.view(torch.uint8).T
            else:
                side.scales[page, row] = stored
