"""FlashInfer's block sparse names: each block of rows sees the blocks of keys that a list names.

A block of keys is a page and a block of rows a request, so that nothing is copied. Where blocks of
keys differ in size a page is one token.
"""

from __future__ import annotations

from typing import Any

import torch

from pageant.integrations.flashinfer import _lengths
from pageant.integrations.flashinfer._inputs import DType, check_pos_mode
from pageant.integrations.flashinfer._lengths import Keys, Queries
from pageant.integrations.flashinfer._masks import unpack
from pageant.integrations.flashinfer._runner import Result
from pageant.integrations.flashinfer._setting import Factors
from pageant.integrations.flashinfer._wrapper import Wrapper
from pageant.integrations.flashinfer.absent import refuse

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


def _refuse(causal: bool, pos_encoding_mode: str) -> None:
    if causal or check_pos_mode(pos_encoding_mode) != "NONE":
        refuse("pos_encoding_mode or causal over blocks")


class BlockSparseAttentionWrapper(Wrapper):
    """Blocks of R rows by C keys, given as a compressed list of blocks for each block of rows."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)
        self._key_rows = 0

    def plan(  # budget: FlashInfer's signature
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        R: int,  # noqa: N803
        C: int,  # noqa: N803
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType = "float16",
        non_blocking: bool = True,
    ) -> None:
        """Plan a pattern.

        Args:
            indptr, indices: int32 [M / R + 1] and [blocks]: block columns of each block row.
            M, N, R, C: rows, keys, and the sizes of a block.
            mask: bool [blocks, R, C], which pairs of each block count; costs what `_masks` says.
            packed_mask: the same as little-endian bits, block after block.
            others: as in the prefill wrapper's plan.
        """
        _refuse(causal, pos_encoding_mode)
        if M % R or N % C:
            raise ValueError(f"M, N are {M}, {N}; allowed: multiples of R, C, which are {R}, {C}")
        if indptr.shape[0] != M // R + 1:
            raise ValueError(f"indptr has {indptr.shape[0]} entries; allowed: {M // R + 1}")
        setting = self._setting(
            (num_qo_heads, num_kv_heads),
            (head_dim, None),
            (q_data_type, kv_data_type, o_data_type),
            causal=False,
            pos_encoding_mode=pos_encoding_mode,
            window_left=-1,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        self._key_rows = N
        last = torch.full((M // R,), C, dtype=torch.int32, device=indptr.device)
        keys = _lengths.pages(indptr, indices, last, C, self.device)
        queries = _lengths.uniform(M // R, R, self.device)
        if mask is None and packed_mask is not None:
            mask = unpack(packed_mask, torch.tensor([indices.shape[0] * R * C])).view(-1, R, C)
        flat = None if mask is None else _by_rows(mask.to(self.device), keys, indptr, R)
        self._runner.plan(setting, queries, keys, flat)

    begin_forward = plan

    def run(  # budget: FlashInfer's signature
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Attention of q [M, Hq, D] over k and v [N, Hkv, D]."""
        step = self._runner.step
        if step is None:
            raise RuntimeError("run before plan; allowed: plan() first")
        if k.shape[0] != self._key_rows:
            raise ValueError(f"k has {k.shape[0]} rows; allowed: {self._key_rows}")
        size = (-1, step.keys.page_size)
        return self._runner.run(
            q,
            (k.unflatten(0, size), v.unflatten(0, size)),
            None,
            Factors(q_heads=scale_q, k_heads=scale_k, v_heads=scale_v),
            out=out,
            lse=lse,
            return_lse=return_lse,
        )


def _by_rows(mask: torch.Tensor, keys: Keys, indptr: torch.Tensor, rows: int) -> torch.Tensor:
    """Mask [blocks, R, C] in the order of a custom mask: request, row, key."""
    blocks, _, columns = mask.shape
    starts = _lengths.on(indptr, mask.device)
    block = torch.arange(blocks, dtype=torch.int32, device=mask.device)
    owner = torch.searchsorted(starts[1:].contiguous(), block, right=True)
    own, counts = block - starts[owner], starts.diff()[owner]
    first = (starts[owner].long() * rows * columns + own * columns)[:, None, None]
    row = torch.arange(rows, device=mask.device)[None, :, None]
    at = first + row * (counts.long() * columns)[:, None, None]
    flat = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    flat[(at + torch.arange(columns, device=mask.device)).flatten()] = mask.flatten().bool()
    return flat


class VariableBlockSparseAttentionWrapper(Wrapper):
    """Blocks whose sizes differ, by a pattern for each key/value head; tensors are HND."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)
        self._pattern: tuple[torch.Tensor, ...] = ()
        self._heads = (0, 0)

    def plan(  # budget: FlashInfer's signature
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> None:
        """Note a pattern; the first `run`, which knows how many keys there are, plans.

        Args:
            block_mask_map: bool [Hkv, MB, NB].
            block_row_sz, block_col_sz: int [Hkv, MB] and [Hkv, NB], summing to rows and keys.
            others: as in the prefill wrapper's plan.
        """
        _refuse(causal, pos_encoding_mode)
        if block_mask_map.shape[0] != num_kv_heads:
            have = f"block_mask_map is of {block_mask_map.shape[0]} heads"
            raise ValueError(f"{have}; allowed: {num_kv_heads}, num_kv_heads")
        self._heads = (num_kv_heads, num_qo_heads // num_kv_heads)
        self._planned = self._setting(
            (self._heads[1], 1),
            (head_dim, None),
            (q_data_type, kv_data_type, None),
            causal=False,
            pos_encoding_mode=pos_encoding_mode,
            window_left=-1,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )
        given = (block_mask_map, block_row_sz, block_col_sz)
        self._pattern = tuple(x.to(self.device) for x in given)
        self._runner.forget()

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Out [Hq, m, D] of q [Hq, m, D] over k and v [Hkv, n, D]; q is copied, and so is out."""
        if not self._pattern:
            raise RuntimeError("run before plan; allowed: plan() first")
        heads, group = self._heads
        count = q.shape[1]
        if self._runner.step is None:
            self._runner.plan(self._planned, *_requests(self._pattern, k.shape[1]))
        rows = q.unflatten(0, (heads, group)).transpose(1, 2).reshape(heads * count, group, -1)
        pair = (x.reshape(-1, 1, 1, x.shape[2]) for x in (k, v))
        k, v = pair
        result: Any = self._runner.run(rows.contiguous(), (k, v), return_lse=True)
        whole, whole_lse = (
            x.unflatten(0, (heads, count)).transpose(1, 2).flatten(0, 1) for x in result
        )
        whole = whole if out is None else out.copy_(whole)
        if not return_lse:
            return whole
        return whole, whole_lse if lse is None else lse.copy_(whole_lse)


def _requests(pattern: tuple[torch.Tensor, ...], num_keys: int) -> tuple[Queries, Keys]:
    """A request for each head and block of rows; its pages are the visible keys, of one token."""
    seen, row_sizes, column_sizes = pattern
    heads = seen.shape[0]
    flat = row_sizes.flatten().to(torch.int32)
    starts = torch.nn.functional.pad(flat.cumsum(0, dtype=torch.int32), (1, 0))
    ends = column_sizes.cumsum(1)
    key = torch.arange(num_keys, device=seen.device).expand(heads, -1).contiguous()
    block = torch.searchsorted(ends, key, right=True).clamp_(max=seen.shape[2] - 1)
    visible = seen.bool().gather(2, block[:, None].expand(-1, seen.shape[1], -1)).flatten(0, 1)
    place = torch.where(visible, visible.cumsum(1) - 1, num_keys)
    table = torch.zeros(len(visible), num_keys + 1, dtype=torch.int64, device=seen.device)
    slot = key + torch.arange(heads, device=seen.device)[:, None] * num_keys
    table.scatter_(1, place, slot.repeat_interleave(seen.shape[1], 0))
    keys = Keys(
        lens=visible.sum(1, dtype=torch.int32),
        table=table[:, :num_keys].int(),
        page_size=1,
        longest=num_keys,
    )
    return Queries(starts=starts, num_tokens=None, longest=None), keys
