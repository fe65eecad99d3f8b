"""Random cases shared by the tests: a configuration, a batch, poisoned pages and the right answer.

A Case is drawn small (sizes, features) and filled from a seed, so that a failing one prints short
and repeats exactly. Every slot that no row can see holds NaN, and every page table entry that no
row can need holds a page id that does not exist.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import event
from hypothesis import strategies as st

import pageant
from pageant.cache.formats import FORMATS, resolve
from pageant.cache.quantize import dequantize, quantize
from pageant.kernels import reference
from pageant.plan.inputs import LayerParams

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
NO_SUCH_PAGE = 1_000_003


@dataclass(frozen=True)
class Case:
    """One random problem. Lengths are (new tokens, keys) a request."""

    seed: int
    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    format: str = "fp32"
    page_size: int = 4
    memory: str = "LBHNC"
    causal: bool | tuple[bool, ...] = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    drafts: str | None = None
    cross: bool = False
    scales: bool = False
    speculative: int = 0
    splits: int | None = None
    padding: int = 0
    swizzled: bool = False
    # (an earlier request, tokens) of each: their pages are the first of its own as well.
    prefixes: tuple[tuple[int, int], ...] = ()
    query_scale: float | None = None
    score_scale: float | None = None

    def count_features(self) -> int:
        """How many things beside plain causal attention this case combines."""
        on = (
            self.causal is not True,
            self.window is not None,
            self.soft_cap is not None,
            self.alibi,
            self.sinks,
            self.drafts is not None,
            self.cross,
            self.scales and FORMATS[self.format].quantized,
            self.speculative > 0,
            self.splits is not None,
            self.padding > 0,
            self.v_head_dim != self.head_dim,
            self.memory not in ("LBHNC", "separate"),
            self.swizzled,
            self.query_scale is not None,
            self.score_scale is not None,
        )
        return sum(on)


MEMORIES = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "separate", "strided")


@st.composite
def cases(draw: Any, dtype: torch.dtype, max_len: int = 70) -> Case:
    """Draw a Case; sizes are kept so that one takes milliseconds."""
    heads = draw(st.sampled_from((1, 2, 3, 4)))
    group = draw(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64)))
    wide = draw(st.integers(0, 9)) == 0
    dims = st.sampled_from((256, 320, 512) if wide else (16, 24, 40, 56, 64, 72, 96, 128))
    dim = draw(dims)
    count = draw(st.integers(0, 5))
    pairs = st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 12)),
        st.one_of(st.integers(0, 5), st.integers(1, max_len)),
    )
    lengths = tuple(draw(pairs) for _ in range(count))
    maybe = st.booleans()
    causal = draw(
        st.one_of(
            st.just(True), st.just(False), st.tuples(*[maybe] * count) if count else st.just(True)
        )
    )
    case = Case(
        seed=draw(st.integers(0, 2**20)),
        dtype=dtype,
        kv_heads=heads,
        group=group,
        head_dim=dim,
        v_head_dim=draw(dims) if draw(maybe) else dim,
        format=draw(st.sampled_from(tuple(FORMATS))),
        page_size=draw(st.sampled_from((1, 2, 3, 5, 16, 48, 64))),
        memory=draw(st.sampled_from(MEMORIES)),
        lengths=lengths,
        causal=causal,
        window=draw(st.one_of(st.none(), st.integers(1, 40))),
        soft_cap=draw(st.one_of(st.none(), st.sampled_from((0.5, 2.0, 30.0)))),
        alibi=draw(maybe),
        sinks=draw(maybe),
        drafts=draw(st.sampled_from((None, None, "mask", "parents"))),
        cross=draw(st.integers(0, 4)) == 0,
        scales=draw(maybe),
        speculative=draw(st.sampled_from((0, 0, 1, 3, 7))),
        splits=draw(st.sampled_from((None, None, 1, 2, 3, 7))),
        padding=draw(st.sampled_from((0, 0, 1, 5))),
    )
    fmt = FORMATS[case.format]
    if fmt.scale_block and case.page_size % 4 == 0 and fmt.num_scales(case.v_head_dim) % 4 == 0:
        case = replace(case, swizzled=draw(maybe))
    event(f"features: {'three or more' if case.count_features() >= 3 else 'fewer'}")
    return case


@dataclass(frozen=True)
class Problem:
    """A Case with its numbers: what to give Pageant, and what it must answer."""

    case: Case
    attn: pageant.Attention
    batch: pageant.Batch
    cache: pageant.LayerCache
    layer: pageant.Layer
    q: torch.Tensor
    expected_out: torch.Tensor
    expected_lse: torch.Tensor

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan and run, padding rows poisoned first and checked to stay so."""
        plan = self.attn.plan(self.batch)
        real, rows = self.expected_out.shape[0], self.q.shape[0]
        shape = self.attn.shape
        out = self.q.new_full((rows, shape.num_q_heads, shape.value_dim), 77.0, dtype=shape.dtype)
        got, lse = self.attn.run(plan, self.q, self.cache, self.layer, out=out, return_lse=True)
        assert got.data_ptr() == out.data_ptr()
        assert (out[real:] == 77.0).all(), "rows past the real tokens were written"
        return out[:real].cpu(), lse[:real].cpu()

    def check(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, and compare with the right answer, to the accuracy of the model's dtype."""
        out, lse = self.run()
        assert_close(out, self.expected_out, BOUNDS[self.case.dtype])
        assert_close(lse, self.expected_lse, BOUNDS[self.case.dtype])
        return out, lse

    def on(self, device: str) -> Problem:
        """The same problem on another device."""
        mine = self.attn
        attn = pageant.Attention(
            mine.shape, mine.cache, mine.limits, mine.features, mine.options, device
        )
        cache = _poisoned_cache(self.case, attn, self.cache.num_pages)
        for name in ("k", "v", "k_scales", "v_scales"):
            view, stored = getattr(cache, name), getattr(self.cache, name)
            if view is not None:
                view.copy_(stored)
        batch, layer = (_moved(part, device) for part in (self.batch, self.layer))
        return replace(self, attn=attn, cache=cache, batch=batch, layer=layer, q=self.q.to(device))


def _moved(fields: Any, device: str) -> Any:
    tensors = {
        field.name: getattr(fields, field.name).to(device)
        for field in dataclasses.fields(fields)
        if isinstance(getattr(fields, field.name), torch.Tensor) and not field.name.endswith("_cpu")
    }
    return replace(fields, **tensors)


def build(case: Case, kernels: str = "auto") -> Problem:
    """Fill a Case with numbers."""
    rng = torch.Generator().manual_seed(case.seed)
    np_rng = np.random.default_rng(case.seed)
    shape = pageant.Shape(
        num_q_heads=case.kv_heads * case.group,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        dtype=case.dtype,
    )
    layer = _layer(case, shape, rng)
    query_lens = [m for m, _ in case.lengths]
    tokens = sum(query_lens)
    q = torch.randn(tokens + case.padding, shape.num_q_heads, shape.head_dim, generator=rng)
    q = q.to(case.dtype)
    if case.query_scale is not None:
        q = (q / case.query_scale).to(torch.float8_e4m3fn)
    drafts = _drafts(case, rng)
    pages, table = _tables(case, np_rng)
    attn = pageant.Attention(
        shape,
        pageant.CacheSpec(
            format=case.format,
            page_size=case.page_size,
            layout=case.memory if case.memory in MEMORIES[:6] else "LBHNC",
            v_scale_order="swizzled" if case.swizzled else "linear",
        ),
        pageant.Limits(max_requests=8, max_tokens=96, max_seq_len=2048),
        replace(
            pageant.Features.of([layer]),
            lse=True,
            non_causal=case.causal is not True,
            draft_masks=case.drafts is not None,
        ),
        pageant.Options(
            kernels=kernels, speculative_tokens=case.speculative, debug_splits=case.splits
        ),
    )
    cache = _poisoned_cache(case, attn, num_pages=pages)
    pools = [
        _stored(case, side, pages, scale, rng)
        for side, scale in ((0, layer.k_scale), (1, layer.v_scale))
    ]
    outs, lses, start = [], [], 0
    for request, (m, _) in enumerate(case.lengths):
        mask = _mask(case, request, drafts[request])
        stored = [
            _fill(case, cache, side, table[request], mask, pool) for side, pool in enumerate(pools)
        ]
        out, lse = reference.attend(
            q[start : start + m].double(), *stored, mask, _params(case, layer)
        )
        outs.append(out)
        lses.append(lse)
        start += m
    empty = torch.zeros(0, shape.num_q_heads, shape.value_dim, dtype=torch.float64)
    return Problem(
        case,
        attn,
        _batch(case, drafts, table),
        cache,
        layer,
        q,
        torch.cat([empty, *outs]),
        torch.cat([empty[..., 0], *lses]),
    )


def _layer(case: Case, shape: pageant.Shape, rng: torch.Generator) -> pageant.Layer:
    heads = shape.num_q_heads
    scale = 1.3 * shape.head_dim**-0.5 if case.scales else None
    return pageant.Layer(
        scale=scale if case.score_scale is None else case.score_scale,
        window=case.window,
        soft_cap=case.soft_cap,
        # Not so large that outputs would be subnormal in float16.
        sinks=torch.rand(heads, generator=rng) * 4 - 2 if case.sinks else None,
        alibi_slopes=torch.rand(heads, generator=rng) * 0.3 if case.alibi else None,
        k_scale=0.5 if case.scales else 1.0,
        v_scale=torch.tensor([3.0]) if case.scales else 1.0,
        q_scale=1.0 if case.query_scale is None else case.query_scale,
    )


def _params(case: Case, layer: pageant.Layer) -> LayerParams:
    """Cache scales are already in the stored values the reference gets, so here they are 1."""
    scale = case.head_dim**-0.5 if layer.scale is None else layer.scale
    return LayerParams(
        score_scale=scale * (case.query_scale or 1.0),
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=layer.sinks,
        alibi_slopes=layer.alibi_slopes,
    )


def _drafts(case: Case, rng: torch.Generator) -> list[torch.Tensor | None]:
    """bool [m, m] a request: which of the new tokens each one sees; None where causality rules."""
    if case.drafts == "mask":
        return [torch.rand(m, m, generator=rng) < 0.5 for m, _ in case.lengths]
    if case.drafts == "parents":
        return [_tree(_parents(case.seed, r, m)) for r, (m, _) in enumerate(case.lengths)]
    return [None] * len(case.lengths)


def _mask(case: Case, request: int, draft: torch.Tensor | None) -> torch.Tensor:
    """bool [m, n]: who sees whom, from the definition."""
    m, n = case.lengths[request]
    causal = case.causal if isinstance(case.causal, bool) else case.causal[request]
    return reference.visible(
        m, n, causal=causal and not case.cross, window=case.window, draft=draft
    )


def _parents(seed: int, request: int, m: int) -> list[int]:
    rng = np.random.default_rng((seed, request))
    return [int(rng.integers(-1, i)) if i else -1 for i in range(m)]


def _tree(parents: list[int]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row in range(len(parents)):
        node = parents[row]
        while node >= 0:
            mask[row, node] = True
            node = parents[node]
    return mask


def _tables(case: Case, rng: np.random.Generator) -> tuple[int, list[list[int]]]:
    """Pool size and page ids a request: shuffled; ids nobody may need do not exist."""
    counts = [-(-n // case.page_size) for _, n in case.lengths]
    pool = sum(counts) + 3
    ids = iter(rng.permutation(pool).tolist())
    width = max(counts, default=0) + 1
    owned, table = [[next(ids) for _ in range(count)] for count in counts], []
    for pages, (parent, tokens) in zip(owned, case.prefixes, strict=False):
        common = min(tokens // case.page_size, len(pages), len(owned[parent]))
        pages[:common] = owned[parent][:common]
    for (m, n), count, pages in zip(case.lengths, counts, owned, strict=True):
        row = pages + [NO_SUCH_PAGE] * (width - count)
        unseen = 0 if case.window is None else max(0, n - m - case.window + 1) // case.page_size
        row[:unseen] = [-5] * unseen
        table.append(row if m else [-9] * width)
    return pool, table


def _poisoned_cache(case: Case, attn: pageant.Attention, num_pages: int) -> pageant.LayerCache:
    kv, n, fmt = attn.shape, case.page_size, attn.format
    if case.memory in MEMORIES[:6]:
        cache = attn.new_cache(num_layers=2, num_pages=num_pages)[1]
    else:
        gap = 3 if case.memory == "strided" else 1

        def room(size: int, dtype: torch.dtype) -> torch.Tensor:
            size_of = (num_pages, n, kv.num_kv_heads * gap, size + 8)
            whole = torch.zeros(size_of, dtype=dtype, device=attn.device)
            return whole[:, :, ::gap, :size]

        dims = (kv.head_dim, kv.value_dim)
        tensors = [room(dim // fmt.per_byte, fmt.element_dtype) for dim in dims]
        if fmt.scale_dtype is not None:
            scales = [room(fmt.num_scales(dim), fmt.scale_dtype) for dim in dims]
            tensors += scales if fmt.scale_block else [scale[..., 0] for scale in scales]
        cache = attn.wrap_cache(*tensors)
    for view in (cache.k, cache.v, cache.k_scales, cache.v_scales):
        if view is not None:
            nan = torch.tensor(torch.nan) if view.is_floating_point() else torch.tensor(-1)
            view[:] = nan.to(view.dtype)
    return cache


Stored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def _stored(case: Case, side: int, pages: int, scale: Any, rng: torch.Generator) -> Stored:
    """Random rows for every slot: codes, scales, and float64 [slots, Hkv, D] as they read back."""
    fmt = resolve(case.format, case.dtype)
    dim = (case.head_dim, case.v_head_dim)[side]
    rows = torch.randn(pages * case.page_size, case.kv_heads, dim, generator=rng)
    codes, scales = quantize(rows, fmt.name, scale)
    return codes, scales, dequantize(codes, scales, fmt.name, scale).double()


def _fill(
    case: Case,
    cache: pageant.LayerCache,
    side: int,
    pages: list[int],
    mask: torch.Tensor,
    stored: Stored,
) -> torch.Tensor:
    """Write rows where some query row looks; float64 [n, Hkv, D] as they read back."""
    codes, scales, whole = stored
    values = torch.zeros(mask.shape[1], *whole.shape[1:], dtype=torch.float64)
    view, own_scales, is_swizzled = cache.sides[side]
    for key in mask.any(0).nonzero().flatten().tolist():
        page, row = pages[key // case.page_size], key % case.page_size
        slot = page * case.page_size + row
        values[key] = whole[slot]
        view[page, row] = codes[slot]
        if scales is None:
            continue
        if is_swizzled:
            quarter = scales.shape[2] // 4
            for s in range(scales.shape[2]):
                at = own_scales[page, row // 4 * 4 + s // quarter, :, s % quarter * 4 + row % 4]
                at[:] = scales[slot, :, s]
        else:
            own_scales[page, row] = scales[slot]
    return values


def _batch(case: Case, drafts: list[torch.Tensor | None], table: list[list[int]]) -> pageant.Batch:
    query_lens = [m for m, _ in case.lengths]
    key_lens = torch.tensor([n for _, n in case.lengths], dtype=torch.int32)
    tokens, longest = sum(query_lens), max(query_lens, default=0)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    others: dict[str, Any] = {}
    if case.drafts == "mask":
        rows = torch.zeros(tokens, longest, dtype=torch.bool)
        for start, draft in zip(starts, drafts, strict=False):
            if draft is not None:
                rows[start : start + len(draft), : len(draft)] = draft
        others["draft_mask"] = rows
    elif case.drafts == "parents":
        parents = [
            parent
            for request, m in enumerate(query_lens)
            for parent in _parents(case.seed, request, m)
        ]
        others["draft_parents"] = torch.tensor(parents, dtype=torch.int32)
    if case.cross:
        others["encoder_seq_lens"] = key_lens
    causal = case.causal if isinstance(case.causal, bool) else torch.tensor(case.causal)
    width = max((len(row) for row in table), default=1)
    return pageant.Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=key_lens,
        page_table=torch.tensor(table, dtype=torch.int32).reshape(len(table), width),
        num_requests=len(case.lengths),
        num_tokens=tokens + case.padding,
        max_query_len=longest,
        max_seq_len=int(key_lens.max()) if len(key_lens) else 0,
        causal=causal,
        **others,
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """Relative Frobenius error within the bound, and within three times it for every row."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    finite = torch.isfinite(want)
    assert (got[~finite] == want[~finite]).all(), "infinities differ"
    assert torch.isfinite(got[finite]).all(), "NaN or Inf where the reference is finite"
    difference = torch.where(finite, got - want, 0.0)
    size = torch.where(finite, want, 0.0)
    total = difference.norm() / size.norm().clamp(min=1e-30)
    assert total <= bound, f"relative error {total:.2e} over the tensor, bound {bound:.0e}"
    if got.dim() == 3:
        rows = difference.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-30)
        worst = rows.max() if rows.numel() else torch.tensor(0.0)
        assert worst <= 3 * bound, f"relative error {worst:.2e} in a row, bound {3 * bound:.0e}"
