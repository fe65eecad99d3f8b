"""FlashInfer's names for pages: tokens appended, and where they belong."""

from __future__ import annotations

import torch

from pageant.integrations.flashinfer._inputs import Cache, Pair, check_layout, sides
from pageant.integrations.flashinfer._lengths import get_seq_lens, on
from pageant.ops.pages import write_pages
from pageant.types import Scalar

__all__ = [
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]


def append_paged_kv_cache(  # budget: FlashInfer's signature
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Store token t of request batch_indices[t] at its position; the table has its page already.

    Args:
        append_key, append_value: [T, Hkv, D], of the cache's type; or of 16 or 32 bits, which an
            fp8 cache stores with scale 1.
        batch_indices, positions: int32 [T]; a negative batch index is skipped.
        paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout: the cache's pages.
    """
    pair = sides(paged_kv_cache, check_layout(kv_layout))
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, pair)
    keys, values = append_key, append_value
    if keys.dtype == pair[0].dtype and keys.element_size() == 1:  # bytes, two at a time
        if keys.shape[-1] % 16 or values.shape[-1] % 16:
            raise ValueError(f"append_key is {list(keys.shape)}; allowed for fp8: D of 16's")
        pair = pair[0].view(torch.float16), pair[1].view(torch.float16)
        keys, values = keys.view(torch.float16), values.view(torch.float16)
    formats = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
    name = formats.get(pair[0].dtype, "auto")
    if name == "auto" and keys.dtype != pair[0].dtype:
        raise ValueError(f"append_key is of {keys.dtype}; allowed: {pair[0].dtype}, as the cache")
    write_pages(keys, values, *pair, slots, format=name)


def _slots(
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    pair: Pair,
) -> torch.Tensor:
    """int64 [T]: page * page_size + row of each token; -1 where the batch index is negative."""
    device, page_size = pair[0].device, pair[0].shape[1]
    owner, position = on(batch_indices, device).long(), on(positions, device).long()
    pages = on(kv_indices, device)
    if not pages.shape[0]:
        return torch.full_like(owner, -1)
    at = on(kv_indptr, device)[owner.clamp(min=0)] + position // page_size
    page = pages[at.clamp(0, pages.shape[0] - 1)].long()
    return torch.where(owner < 0, -1, page * page_size + position % page_size)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each appended token, the last of a request at its end.

    Args:
        append_indptr: int32 [R + 1], first appended token of each request.
        seq_lens: int32 [R], keys of each with the appended ones.
        nnz: tokens; those past append_indptr[-1] get request -1 and position 0.
        batch_indices, positions: int32 [nnz], written and returned if given.

    Two tokens end a request of five, one is a request of its own:

    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> [x.tolist() for x in get_batch_indices_positions(i32(0, 2, 3), i32(5, 1), 4)]
    [[0, 0, 1, -1], [3, 4, 0, 0]]
    """
    starts = append_indptr.to(torch.int32)
    token = torch.arange(nnz, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(starts[1:].contiguous(), token, right=True).int()
    is_real = token < starts[-1]
    known = owner.clamp(max=max(0, seq_lens.shape[0] - 1))
    if seq_lens.shape[0]:
        shift = seq_lens.to(starts.device) - starts[1:]
        place = torch.where(is_real, token + shift[known], 0).int()
    else:
        place = torch.zeros_like(token)
    owner = torch.where(is_real, owner, -1)
    return (
        owner if batch_indices is None else batch_indices.copy_(owner),
        place if positions is None else positions.copy_(place),
    )


def nvfp4_quantize_append_paged_kv_cache(  # budget: FlashInfer's signature
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: Scalar,
    v_scale: Scalar,
    kv_layout: str = "NHD",
) -> None:
    """`append_paged_kv_cache` into an nvfp4 cache: uint8 pages and linear e4m3 block scales.

    k_scale and v_scale are what reading multiplies by.
    """
    pair = sides(paged_kv_cache, check_layout(kv_layout))
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, pair)
    _write_nvfp4(
        (append_key, append_value), pair, kv_cache_sf, slots, (k_scale, v_scale), kv_layout
    )


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
    k_scale: Scalar,
    v_scale: Scalar,
    kv_layout: str = "NHD",
) -> None:
    """The same by slots [T], page * page_size + row; those below 0 or of no page are skipped."""
    pair = sides(paged_kv_cache, check_layout(kv_layout))
    slots = slot_mapping.to(device=pair[0].device, dtype=torch.int64)
    slots = torch.where(slots < pair[0].shape[0] * pair[0].shape[1], slots, -1)
    _write_nvfp4(
        (append_key, append_value), pair, kv_cache_sf, slots, (k_scale, v_scale), kv_layout
    )


def _write_nvfp4(
    new: Pair,
    pair: Pair,
    kv_cache_sf: Cache,
    slots: torch.Tensor,
    scales: tuple[Scalar, Scalar],
    kv_layout: str,
) -> None:
    """Quantise and store; a scale on a GPU is not looked at."""
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        on_host = not isinstance(scale, torch.Tensor) or scale.is_cpu
        if on_host and not 0 < float(scale) < float("inf"):
            raise ValueError(f"{name} is {scale}; allowed: a positive finite global decode scale")
    k_scales, v_scales = sides(kv_cache_sf, kv_layout)
    write_pages(
        *new, *pair, slots, k_scales=k_scales, v_scales=v_scales, format="nvfp4", scales=scales
    )
