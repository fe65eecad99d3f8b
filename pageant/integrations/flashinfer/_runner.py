"""Plans and runs for all wrappers: one Attention for each configuration a wrapper was planned with.

``plan`` notes what FlashInfer's plan says. Where the host knows how many tokens the batch has, the
Attention plans at once; else the first ``run``, whose query tells, does. Further runs only run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pageant.api import Attention
from pageant.cache.out_scales import SwizzledScales
from pageant.cache.pages import LayerCache
from pageant.integrations.flashinfer import _masks
from pageant.integrations.flashinfer._inputs import Pair, check_rows
from pageant.integrations.flashinfer._kept import LONGEST, Kept
from pageant.integrations.flashinfer._lengths import Keys, Queries
from pageant.integrations.flashinfer._setting import (
    Factors,
    Setting,
    layer_of,
    scaled_query,
    to_base_2,
)
from pageant.integrations.flashinfer.absent import refuse
from pageant.plan.batch import Batch
from pageant.plan.build import Plan

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass
class Step:
    """What was planned, and what came of it.

    Attributes:
        setting, queries, keys, mask, drafts: as given to `Runner.plan`.
        attention, plan, num_rows: made of them, for a query of that many rows.
        slot_step: of a mask whose rows are requests, see `_masks`; 0: pages are copied.
    """

    setting: Setting
    queries: Queries
    keys: Keys
    mask: torch.Tensor | None = None
    drafts: torch.Tensor | None = None
    attention: Attention | None = None
    plan: Plan | None = None
    num_rows: int = -1
    slot_step: int | None = None


class Runner:
    """Attention for one wrapper.

    Args:
        device: where it computes.
        keeps_addresses: for CUDA graphs: what runs read lies in the same memory after every plan.
    """

    def __init__(self, device: torch.device, *, keeps_addresses: bool = False) -> None:
        self.device, self.keeps_addresses = device, keeps_addresses
        self.step: Step | None = None
        self._kept = Kept(device, is_fixed=keeps_addresses)
        self._held: dict[str, torch.Tensor] = {}

    def plan(
        self,
        setting: Setting,
        queries: Queries,
        keys: Keys,
        mask: torch.Tensor | None = None,
        drafts: torch.Tensor | None = None,
    ) -> None:
        """Plan a batch.

        Args:
            setting, queries, keys: what it is.
            mask: FlashInfer's custom mask, flat and unpacked.
            drafts: bool [T, longest], a mask over new tokens alone.
        """
        if keys.lens.shape[0] != queries.num_requests:
            have = f"{keys.lens.shape[0]} requests"
            raise ValueError(f"the page table has {have}; allowed: {queries.num_requests}")
        before, known = self.step, queries.num_tokens
        step = Step(setting, queries, keys, mask, drafts)
        if self.keeps_addresses and before is not None and before.num_rows >= 0:
            if known is not None and known > before.num_rows:
                allowed = f"at most {before.num_rows}, as first planned for CUDA graphs"
                raise ValueError(f"qo_indptr[-1] is {known}; allowed: {allowed}")
            known, step.slot_step = before.num_rows, before.slot_step
        self.step = step
        self._kept.age()
        if known is not None and (mask is None or step.slot_step is not None):
            self._make(step, known)

    def forget(self) -> None:
        """Let go of the plan, and of caches that runs have seen."""
        self.step = None
        self._kept.forget()

    def run(
        self,
        q: torch.Tensor,
        pair: Pair,
        scales: Pair | None = None,
        factors: Factors | None = None,
        *,
        out: torch.Tensor | None = None,
        out_scales: SwizzledScales | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """FlashInfer's run: out [T, Hq, Dv], and with return_lse float32 [T, Hq], base 2.

        Args:
            q: [T, Hq, D].
            pair: keys and values [P, N, Hkv, ..].
            scales: of nvfp4, e4m3 [P, N, Hkv, D / 16].
            factors: scales and sinks of this layer.
            out, lse: written and returned, if given.
            out_scales: of nvfp4 output, written.
            return_lse: whether the lse is returned too.
        """
        step = self._planned(q)
        setting, parts = step.setting, pair if scales is None else (*pair, *scales)
        self._check(step, q, pair, scales)
        size = (q.shape[0], setting.num_q_heads, setting.out_width)
        if out is None:
            out = q.new_zeros(size, dtype=setting.out_dtype)
        check_rows("out", out, size, setting.out_dtype, q.device)
        if lse is not None:
            check_rows("lse", lse, size[:2], torch.float32, q.device)
        if step.num_rows != q.shape[0]:
            self._make(step, q.shape[0], parts)
        assert step.attention is not None
        model = setting.shape.dtype
        rows = out
        if setting.out_format == "model" and out.dtype != model:
            rows = out.new_empty(size, dtype=model)
        layer, rest = layer_of(setting, factors or Factors(), self._kept.slopes(setting))
        result = step.attention.run(
            step.plan,
            scaled_query(q, setting.shape, rest.query),
            self._wrap(step, pair, scales),
            layer,
            out=rows,
            out_scales=out_scales,
            return_lse=return_lse,
        )
        if rest.value is not None:
            rows.mul_(rest.value)
        if rows is not out:
            out.copy_(rows)
        if isinstance(result, torch.Tensor):
            return out
        whole = to_base_2(result[1], layer.sinks)
        return out, whole if lse is None else lse.copy_(whole)

    def _planned(self, q: torch.Tensor) -> Step:
        if self.step is None:
            raise RuntimeError("run before plan; allowed: plan() first, then run() once a layer")
        known, rows = self.step.queries.num_tokens, q.shape[0]
        is_padded = self.keeps_addresses and known is not None and known <= rows
        if known is not None and rows != known and not is_padded:
            raise ValueError(f"q has {rows} rows; allowed: qo_indptr[-1], {known}")
        return self.step

    def _check(self, step: Step, q: torch.Tensor, pair: Pair, scales: Pair | None) -> None:
        """Raise ValueError for tensors of other types or sizes than planned."""
        setting = step.setting
        size = (q.shape[0], setting.num_q_heads, setting.head_dim)
        check_rows("q", q, size, setting.q_dtype, self.device)
        per_byte = 2 if setting.kv_dtype == torch.uint8 else 1
        dims = (setting.head_dim // per_byte, setting.v_head_dim // per_byte)
        for name, x, dim in zip(("k", "v"), pair, dims, strict=True):
            want = (x.shape[0], step.keys.page_size, setting.num_kv_heads, dim)
            check_rows(name, x, want, setting.kv_dtype, self.device)
        if per_byte == 2 and scales is None:
            raise ValueError("kv_cache_sf is None; allowed: the block scales of a uint8 cache")
        for x in scales or ():
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                have = f"kv_cache_sf has innermost stride {x.stride(-1)}"
                raise ValueError(f"{have}; allowed: 1 (its innermost stride must be 1)")

    def _make(self, step: Step, rows: int, parts: tuple[torch.Tensor, ...] | None = None) -> None:
        """Plan, now that the number of rows is known, and with a mask how pages lie."""
        queries, keys, page_size = step.queries, step.keys, step.keys.page_size
        drafts = step.drafts
        longest = rows if queries.longest is None else queries.longest
        if self.keeps_addresses:  # launches must serve whatever is planned later
            longest = longest if queries.is_uniform else rows
            keys = replace(keys, longest=keys.table.shape[1] * keys.page_size)
        starts, lens, table = queries.starts, keys.lens, self._hold("table", keys.table)
        if step.mask is not None and not self.keeps_addresses:
            drafts = _masks.draft_mask(step.mask, queries, keys)
        if step.mask is not None and drafts is None:
            if parts is not None:
                step.slot_step = _masks.slot_step(parts) or 0
            if step.setting.alibi:
                refuse("custom_mask with ALiBi")
            window, at = step.setting.window, step.slot_step or 0
            by_row = _masks.by_row(step.mask.to(self.device), queries, keys, rows, window, at)
            starts, lens, page_size, longest = by_row.starts, by_row.lens, 1, 1
            table = self._hold("slots", by_row.slots)
        batch = Batch(
            query_start_loc=starts,
            seq_lens=lens,
            page_table=table,
            num_requests=lens.shape[0],
            num_tokens=rows,
            max_query_len=longest,
            max_seq_len=min(keys.longest, LONGEST),
            causal=step.setting.causal or step.mask is not None,
            draft_mask=None if drafts is None else drafts.to(self.device),
            query_start_loc_cpu=queries.host if starts is queries.starts else None,
        )
        step.attention = self._kept.attention(step.setting, batch, page_size)
        step.plan, step.num_rows = step.attention.plan(batch), rows

    def _hold(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The tensor; for CUDA graphs a copy that always lies in the same memory."""
        if not self.keeps_addresses:
            return x
        held = self._held.setdefault(name, x)
        if held.shape != x.shape:
            raise ValueError(f"{name} is {list(x.shape)}; allowed: {list(held.shape)}, as first")
        return held if held is x else held.copy_(x)

    def _wrap(self, step: Step, pair: Pair, scales: Pair | None) -> LayerCache:
        """The layer's pages, remembered while its plan lasts."""
        assert step.attention is not None
        parts: tuple[torch.Tensor, ...] = pair if scales is None else (*pair, *scales)
        at = step.slot_step
        if at == 0:
            return step.attention.wrap_cache(*(_masks.gathered(x, step.keys) for x in parts))
        views = parts if at is None else tuple(_masks.token_pages(x, at) for x in parts)
        return self._kept.cache(step.attention, parts, views)
