"""Prefill on the CPU: many query rows a request; keys are gathered once, then matrices multiplied.

For row i of a request with m new tokens and n keys, at position p = n - m + i, and query head h:

    s_j = score_scale * (q . k_j);  s = cap * tanh(s / cap);  s = s + slope_h * (j - p);  mask
    out = value_scale * sum_j e^(s_j) v_j / (sum_j e^(s_j) + e^(sink_h));  lse = ln sum_j e^(s_j)

The keys that a span of rows can see are gathered, a tile at a time, into head-major buffers
[Hkv, keys, width]. Torch's own blocked attention then serves the tile: without a mask where all
rows see all of it, by blocks of rows where the newest keys meet their own rows, and with an
additive bias [1, 1 or Hq, rows, keys] otherwise. It knows no soft cap, so capped scores are
computed here. Tiles are folded by their lse in float32; the sink enters once, at the end.

Limits: unit content stride. Torch's kernel wants keys and values of one head size, so the narrower
is padded with zeros to `width`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from pageant.cache.formats import FORMATS, Format
from pageant.cache.layout import swizzled
from pageant.cache.pages import Side
from pageant.cache.quantize import decode
from pageant.kernels.call import AttentionCall
from pageant.plan.inputs import LayerParams

KEY_TILE = 4096  # keys gathered at once
MAX_ROWS = KEY_TILE  # rows of a span, so that its newest keys fit one tile
SQUARE_ROWS = 256  # rows of a causal square computed at once, over keys up to their last
SCORES = 1 << 22  # floats of a tile's bias or scores, where there is one a head
MIN_KEYS = 256  # keys of such a tile; with fewer, folding costs more than the scores
WHOLE_PAGE = 128  # tokens; larger pages are cut, smaller ones gathered whole in one call

ONES = torch.ones(256, 1).to(torch.float8_e4m3fn)

State = tuple[torch.Tensor, torch.Tensor]  # out [rows, Hq, >= Dv] and lse float32 [rows, Hq]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Consecutive query rows of a request and the keys they can see.

    Attributes:
        request: its index in the batch.
        first_row, last_row: token rows of q and out.
        first_key, last_key: keys [first_key, last_key), perhaps none.
        position: of the first row; its own key, if n - m + i >= 0.
        causal: whether rows see no key after their own position.
        draft: bool [rows, M], column c is key newest + c; or None.
        newest: n - m, the first key a draft mask rules.
    """

    request: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int
    position: int
    causal: bool
    draft: torch.Tensor | None
    newest: int

    @property
    def rows(self) -> int:
        """How many query rows."""
        return self.last_row - self.first_row

    @property
    def seam(self) -> int:
        """Neither causality nor drafts hide a key before this one from any row."""
        if self.draft is not None:
            return self.newest
        return self.position if self.causal and self.rows > 1 else self.last_key

    def hidden_by(self, window: int | None, key: int) -> bool:
        """Whether the window hides this key, and perhaps later ones, from the last row."""
        return window is not None and key <= self.position + self.rows - 1 - window


def run(call: AttentionCall) -> None:
    """Attention of the rows the work list names."""
    spans = [part for span in _spans(call) for part in _with_keys(call, span)]
    tiles = [_tiles(span, call.params, call.q.shape[1]) for span in spans]
    keys = _Keys(call, max((b - a for tile in tiles for a, b in tile), default=0))
    for span, tile in zip(spans, tiles, strict=True):
        q = call.q[span.first_row : span.last_row].to(keys.dtype)
        if keys.width > q.shape[2]:
            q = torch.nn.functional.pad(q, (0, keys.width - q.shape[2]))
        state = _attend(q, keys, span, tile[0], call.params)
        for bounds in tile[1:]:
            state = _fold(state, _attend(q, keys, span, bounds, call.params))
        _store(call, span, state)


def _spans(call: AttentionCall) -> Iterator[Span]:
    """The work list's items; neighbours that walk the same keys without a bias are joined."""
    starts, key_lens = call.query_start_loc.tolist(), call.key_lens.tolist()
    draft = call.draft_mask
    joins = call.params.window is None and not _per_head(call.params) and draft is None
    last: Span | None = None
    items = call.work.items[: call.work.counts[0]].tolist()
    for request, begin, end, first_key, last_key, _ in items:
        first = starts[request]
        if (
            joins
            and last is not None
            and (last.request, last.last_row, last.first_key) == (request, first + begin, first_key)
            and last.rows + end - begin <= MAX_ROWS
        ):
            last = replace(last, last_row=first + end, last_key=last_key)
            continue
        if last is not None:
            yield last
        newest = key_lens[request] - (starts[request + 1] - first)
        causal = call.causal if isinstance(call.causal, bool) else bool(call.causal[request])
        last = Span(
            request=request,
            first_row=first + begin,
            last_row=first + end,
            first_key=first_key,
            last_key=last_key,
            position=newest + begin,
            causal=causal and draft is None,
            draft=None if draft is None else draft[first + begin : first + end],
            newest=newest,
        )
    if last is not None:
        yield last


def _per_head(params: LayerParams) -> bool:
    """Whether a tile takes memory for each head: a bias, or the scores themselves."""
    return params.alibi_slopes is not None or params.soft_cap is not None


def _with_keys(call: AttentionCall, span: Span) -> Iterator[Span]:
    """Answer rows that see nothing: all without keys, and causal ones before the first key."""
    blind = span.rows
    if span.first_key < span.last_key:
        blind = max(0, -span.position) if span.causal else 0
    seeing = span.first_row + blind
    if blind:
        call.out[span.first_row : seeing] = 0.0
        if call.lse is not None:
            call.lse[span.first_row : seeing] = -torch.inf
    if blind < span.rows:
        yield replace(span, first_row=seeing, position=span.position + blind)


def _tiles(span: Span, params: LayerParams, heads: int) -> list[tuple[int, int]]:
    """Key ranges to go through, cut at the seam where one side then needs no bias."""
    step = KEY_TILE
    if _per_head(params):
        step = min(max(SCORES // (heads * span.rows), MIN_KEYS), KEY_TILE)
    edges = [span.first_key, span.last_key]
    cuts = not _per_head(params) and not span.hidden_by(params.window, span.first_key)
    if cuts and span.first_key < span.seam < span.last_key:
        edges.insert(1, span.seam)
    return [
        (a, min(a + step, high))
        for low, high in itertools.pairwise(edges)
        for a in range(low, high, step)
    ]


class _Keys:
    """Buffers for one call's keys and values [Hkv, slots, width], filled tile by tile.

    Attributes:
        dtype: what is computed in: the model's type, or float32 where that cannot hold the cache's
            values or the scores are computed here.
        width: the larger head size.
    """

    def __init__(self, call: AttentionCall, most_keys: int) -> None:
        """Room for tiles of up to `most_keys` keys."""
        self.format, self.page_table = call.cache.format, call.page_table
        self.page_size = call.cache.page_size
        self.dtype = _compute_dtype(call)
        self.width = max(call.q.shape[2], call.out.shape[2])
        slots = most_keys + 2 * self.page_size  # whole pages: part of one more at either end
        self._pairs = [_Pair(side, self.format, self.width, slots) for side in call.cache.sides]

    def gather(self, request: int, a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values a to b of a request: [1, Hkv, b - a, width] each, valid until the next.

        They may share the buffers' memory.
        """
        n = self.page_size
        pages = self.page_table[request, a // n : -(-b // n)]
        k, v = (_widen(*pair.copy(pages, (a, b)), self.format, self.dtype) for pair in self._pairs)
        return k[None, ..., : self.width], v[None, ..., : self.width]


def _compute_dtype(call: AttentionCall) -> torch.dtype:
    fmt, model = call.cache.format, call.q.dtype
    has_row_scales = fmt.scale_dtype is not None and not fmt.scale_block
    if call.params.soft_cap is not None or has_row_scales:  # products have more bits than 16
        return torch.float32
    if fmt.quantized and model == torch.float16:  # tiny before the value scale, so no float16
        return torch.float32
    return model if fmt.bits <= 8 else torch.promote_types(model, fmt.element_dtype)


class _Pair:
    """Head-major copies of one side's elements [Hkv, slots, ..] and scales; zeros past its size."""

    def __init__(self, side: Side, fmt: Format, width: int, slots: int) -> None:
        codes = fmt.element_dtype if fmt.bits > 8 else torch.uint8
        self.elements, self.scales = side.elements.view(codes), side.scales
        self.is_swizzled = side.is_swizzled
        heads = self.elements.shape[2]
        if fmt.scale_block:
            blocks = fmt.num_scales(width)
            width = blocks * fmt.scale_block // fmt.per_byte
            self._scale_room = torch.zeros(heads, slots, blocks, dtype=torch.uint8)
        elif self.scales is not None:
            self.scales = self.scales[..., None]
            self._scale_room = torch.zeros(heads, slots, 1)
        self._room = torch.zeros(heads, slots, width, dtype=codes)

    def copy(
        self, pages: torch.Tensor, bounds: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Elements and scales of slots a to b of the pages."""
        codes = _copy_pages(self.elements, pages, bounds, self._room)
        if self.scales is None:
            return codes, None
        if not self.is_swizzled:
            scales = self.scales.view(self._scale_room.dtype)
            return codes, _copy_pages(scales, pages, bounds, self._scale_room)
        whole = self.scales.view(torch.uint8)[pages]
        (a, b), (n, size) = bounds, whole.shape[1::2]
        rows, columns = swizzled(torch.arange(a, b) % n, size)
        page = torch.arange(a, b) // n - a // n
        found = self._scale_room[:, : b - a]
        found[..., :size] = whole[page[:, None], rows, :, columns].permute(2, 0, 1)
        return codes, found


def _copy_pages(
    view: torch.Tensor, pages: torch.Tensor, bounds: tuple[int, int], buffer: torch.Tensor
) -> torch.Tensor:
    """Slots a to b of the pages [P, N, Hkv, D], as part of the buffer [Hkv, slots, width]."""
    (a, b), n, dim = bounds, view.shape[1], view.shape[3]
    if n <= WHOLE_PAGE:
        count, skip = pages.shape[0], a % n
        room = buffer[:, : count * n, :dim].unflatten(1, (count, n))
        torch.index_select(view, 0, pages, out=room.permute(1, 2, 0, 3))
        return buffer[:, skip : skip + b - a]
    low = a
    for page in pages.tolist():
        high = min(b, (low // n + 1) * n)
        rows = view[page, low % n : low % n + high - low]
        buffer[:, low - a : high - a, :dim] = rows.transpose(0, 1)
        low = high
    return buffer[:, : b - a]


def _widen(
    codes: torch.Tensor, scales: torch.Tensor | None, fmt: Format, dtype: torch.dtype
) -> torch.Tensor:
    """Stored elements [Hkv, keys, ..] as values of `dtype`, times stored scales [Hkv, keys, ..].

    Bytes are looked up: torch converts fp8 slowly.
    """
    if scales is None:
        return codes.to(dtype) if fmt.bits > 8 else _looked_up(codes, _values(fmt, dtype))
    if fmt.scale_block:  # products of e2m1 and e4m3 have 6 bits: exact in every dtype
        factors = _looked_up(scales, _values(FORMATS["fp8_e4m3"], dtype))
        values = _looked_up(codes, _pairs(dtype)).view(dtype)
        values.unflatten(-1, (-1, fmt.scale_block)).mul_(factors[..., None])
        return values
    if fmt.exponent_bits == 0:
        values = codes.view(fmt.element_dtype).float()
    else:
        values = _looked_up(codes, _values(fmt, torch.float32))
    return values.mul_(scales).to(dtype)


def _looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table.index_select(0, codes.flatten().int())
    return found.view(codes.shape)


@lru_cache
def _values(fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """[256]: the value of every byte."""
    return decode(torch.arange(256, dtype=torch.uint8), None, fmt, dtype)


@lru_cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """[256]: the two e2m1 values of every byte, side by side as one element of twice their size."""
    both = decode(torch.arange(256, dtype=torch.uint8)[:, None], ONES, FORMATS["nvfp4"], dtype)
    return both.view({2: torch.int32, 4: torch.float64}[dtype.itemsize])[:, 0]


def _attend(
    q: torch.Tensor, keys: _Keys, span: Span, bounds: tuple[int, int], params: LayerParams
) -> State:
    """A span's rows over one tile of keys, without sinks and value scale."""
    k, v = keys.gather(span.request, *bounds)
    if _is_square(span, bounds, params):
        return _square(q, k, v, params.score_scale)
    seen = _visible(span, bounds, params.window)
    if seen is not None and span.draft is not None:
        unseen = ~seen.any(0)[None, None, :, None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    bias = _bias(span, bounds, seen, params.alibi_slopes)
    if params.soft_cap is None:
        out, lse = _flash(q, k, v, bias, params.score_scale)
    else:
        out, lse = _capped(q, k[0], v[0], bias, (params.score_scale, params.soft_cap))
    if seen is not None:
        blind = ~seen.any(1)  # torch answers these rows with an lse of 0
        out[blind], lse[blind] = 0.0, -torch.inf
    return out, lse


def _is_square(span: Span, bounds: tuple[int, int], params: LayerParams) -> bool:
    """Whether the tile is the rows' own keys, and causality all that shapes the scores."""
    own = span.causal and bounds == (span.position, span.position + span.rows)
    return own and not _per_head(params) and not span.hidden_by(params.window, bounds[0])


def _square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> State:
    """Causal rows over their own keys, a block of rows at a time.

    Torch's own causal mask is not used: it computes more of what it hides, and is applied before a
    scale that might be negative.
    """
    rows = q.shape[0]
    parts = []
    for low in range(0, rows, SQUARE_ROWS):
        high = min(low + SQUARE_ROWS, rows)
        bias = torch.full((1, 1, high - low, high), -torch.inf).triu_(low + 1)
        parts.append(_flash(q[low:high], k[:, :, :high], v[:, :, :high], bias, scale))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> State:
    """Torch's blocked attention: q [rows, Hq, width], k and v [1, Hkv, keys, width]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None], k, v, attn_mask=bias, scale=scale
    )
    return out[0].transpose(0, 1), lse[0].T


def _visible(span: Span, bounds: tuple[int, int], window: int | None) -> torch.Tensor | None:
    """bool [rows, keys]: which keys each row sees; None for all."""
    a, b = bounds
    if not span.hidden_by(window, a):
        window = None
    if b <= span.seam and window is None:
        return None
    key = torch.arange(a, b)
    position = torch.arange(span.position, span.position + span.rows)[:, None]
    if span.causal:
        seen = key <= position
    else:
        seen = torch.ones(span.rows, b - a, dtype=torch.bool)
    if span.draft is not None:
        low = max(a, span.newest)
        seen[:, low - a :] = span.draft[:, low - span.newest : max(b, low) - span.newest]
    return seen if window is None else seen & (key > position - window)


def _bias(
    span: Span,
    bounds: tuple[int, int],
    seen: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor | None:
    """float32 [1, 1 or Hq, rows, keys] to add to scaled scores, -inf where hidden; or None."""
    if slopes is not None:
        position = torch.arange(span.position, span.position + span.rows)[:, None]
        bias = slopes[:, None, None] * (torch.arange(*bounds) - position)
        return (bias if seen is None else bias.masked_fill_(~seen, -torch.inf))[None]
    if seen is None:
        return None
    return torch.zeros(1, 1, *seen.shape).masked_fill_(~seen, -torch.inf)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale_and_cap: tuple[float, float],
) -> State:
    """Attention with a soft cap, in float32. Rows without a visible key come out as NaN.

    Args:
        q: [rows, Hq, width].
        k, v: [Hkv, keys, width].
        bias: [1, 1 or Hq, rows, keys], or None.
        scale_and_cap: factor on q . k, and the cap.
    """
    (rows, heads, width), kv_heads = q.shape, k.shape[0]
    scale, cap = scale_and_cap
    # A group's heads are so many more rows over the same keys.
    grouped = q.transpose(0, 1).reshape(kv_heads, -1, width)
    scores = (grouped @ k.mT).mul_(scale / cap).tanh_().mul_(cap).view(heads, rows, -1)
    if bias is not None:
        scores += bias[0]
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights.view(kv_heads, -1, k.shape[1]) @ v).view(heads, rows, width) / total
    return out.transpose(0, 1), (peak + total.log())[..., 0].T


def _fold(state: State, part: State) -> State:
    """Attention over the keys of both, in float32."""
    (out, lse), (part_out, part_lse) = state, part
    share = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    folded = out.float().lerp_(part_out.float(), share[..., None])
    return folded, torch.logaddexp(lse, part_lse)


def _store(call: AttentionCall, span: Span, state: State) -> None:
    """Apply the value scale and the sinks, and write the rows in their own type."""
    out, lse = state
    out, params = out[..., : call.out.shape[2]], call.params
    if params.sinks is not None:
        # A sink of -inf beside no keys is no share at all.
        share = torch.sigmoid(lse - params.sinks).nan_to_num_(0.0)
        out = out.float() * (share * params.value_scale)[..., None]
    elif params.value_scale != 1.0:
        out = out.float() * params.value_scale
    call.out[span.first_row : span.last_row] = out
    if call.lse is not None:
        call.lse[span.first_row : span.last_row] = lse
