"""CSR page tables and offsets as the rows of a Batch, without waiting for a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Queries:
    """New tokens: R requests, one after another.

    Attributes:
        starts: int32 [R + 1], on the device.
        num_tokens, longest: T and the most tokens of a request; None where only the device knows.
        host: `starts` on the CPU, if it was given there.
        is_uniform: every request always brings `longest`.
    """

    starts: torch.Tensor
    num_tokens: int | None
    longest: int | None
    host: torch.Tensor | None = None
    is_uniform: bool = False

    @property
    def num_requests(self) -> int:
        """R."""
        return self.starts.shape[0] - 1


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Where the keys of R requests lie.

    Attributes:
        lens: int32 [R], on the device.
        table: int32 [R, W], page ids, on the device.
        page_size: tokens a page.
        longest: bound on `lens`.
        host: `lens` on the CPU, if the host knows them.
    """

    lens: torch.Tensor
    table: torch.Tensor
    page_size: int
    longest: int
    host: torch.Tensor | None = None

    def over(self, block_tables: torch.Tensor) -> Keys:
        """The same keys by a padded table int [R, W] in place of the one that was built."""
        table = on(block_tables, self.lens.device)
        return replace(self, table=table if table.stride(-1) == 1 else table.contiguous())


def on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """int32 on the device; what the host holds is copied in stream order."""
    return x.to(device=device, dtype=torch.int32, non_blocking=True)


def queries(qo_indptr: torch.Tensor, device: torch.device) -> Queries:
    """The new tokens of FlashInfer's qo_indptr [R + 1]; host bounds only if it lies there."""
    starts = on(qo_indptr, device)
    if not qo_indptr.is_cpu:
        return Queries(starts=starts, num_tokens=None, longest=None)
    longest = int(qo_indptr.diff().max()) if len(qo_indptr) > 1 else 0
    host = qo_indptr.int()
    return Queries(starts=starts, num_tokens=int(qo_indptr[-1]), longest=longest, host=host)


def uniform(num_requests: int, length: int, device: torch.device) -> Queries:
    """New tokens of requests that all bring `length`."""
    starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * length
    host = torch.arange(num_requests + 1, dtype=torch.int32) * length
    total = num_requests * length
    return Queries(starts=starts, num_tokens=total, longest=length, host=host, is_uniform=True)


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Keys of each request, int32 [R]: all pages but the last are full.

    An empty request is expected to say 0 for the tokens on its last page.

    >>> get_seq_lens(torch.tensor([0, 2, 3, 3]), torch.tensor([2, 4, 0]), 4)
    tensor([6, 4, 0], dtype=torch.int32)
    """
    full = (kv_indptr.diff() - 1).clamp(min=0)
    return (full * page_size + kv_last_page_len).to(torch.int32)


def pages(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    device: torch.device,
    width: int | None = None,
) -> Keys:
    """Keys that lie in pages, from FlashInfer's lists.

    Where indptr lies on a GPU, the host knows no length, and the table gets as many columns as
    `indices` has entries: R * len(indices) numbers. Give it on the CPU, or a width, for a table
    that is just wide enough.

    Args:
        indptr: int [R + 1], where each request's pages begin in `indices`.
        indices: int [.., pages], page ids.
        last_page_len: int [R], tokens on each request's last page; not looked at without pages.
        page_size: tokens a page.
        device: of the result.
        width: columns of the table, if they must be so many.

    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> keys = pages(i32(0, 2, 3, 3), i32(7, 2, 5), i32(2, 4, 0), 4, torch.device("cpu"))
    >>> keys.lens.tolist(), keys.table.tolist()
    ([6, 4, 0], [[7, 2], [5, 5], [5, 5]])
    """
    host, widest = None, indices.shape[0]
    if indptr.is_cpu:
        widest = int(indptr.diff().max()) if indptr.shape[0] > 1 else 0
        if int(indptr[-1]) > indices.shape[0]:
            have = f"{indices.shape[0]} entries"
            raise ValueError(f"paged_kv_indices has {have}; allowed: {int(indptr[-1])}, by indptr")
    longest = widest * page_size
    if indptr.is_cpu and last_page_len.is_cpu:
        host = _lens(indptr, last_page_len, page_size)
        longest = int(host.max()) if len(host) else 0
    starts = on(indptr, device)
    lens = _lens(starts, on(last_page_len, device), page_size) if host is None else on(host, device)
    table = _table(starts, on(indices, device), max(1, widest) if width is None else width)
    return Keys(lens=lens, table=table, page_size=page_size, longest=longest, host=host)


def _lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    counts = indptr.diff()
    if counts.shape != last_page_len.shape:
        have = f"{list(last_page_len.shape)} entries"
        raise ValueError(f"paged_kv_last_page_len has {have}; allowed: {list(counts.shape)}")
    lens = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
    return lens.to(torch.int32)


def _table(starts: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [R, width]: each request's page ids, then some that exist but are not its own."""
    if not indices.shape[0]:
        return starts.new_zeros(starts.shape[0] - 1, width)
    steps = torch.arange(width, dtype=torch.int32, device=starts.device)
    at = (starts[:-1, None] + steps).clamp_(max=indices.shape[0] - 1)
    return indices.index_select(0, at.flatten()).view(at.shape)


def ragged(kv_indptr: torch.Tensor, num_keys: int | None, device: torch.device) -> Keys:
    """Keys that lie one request after another: pages of one token, numbered by row.

    Args:
        kv_indptr: int [R + 1], first key of each request.
        num_keys: of all requests together, a bound where only the device knows; None if the host
            can tell.
        device: of the result.
    """
    host = kv_indptr.diff().int() if kv_indptr.is_cpu else None
    longest = num_keys or 0
    if host is not None:
        longest = int(host.max()) if len(host) else 0
    starts = on(kv_indptr, device)
    steps = torch.arange(max(1, longest), dtype=torch.int32, device=device)
    table = starts[:-1, None] + steps
    return Keys(lens=starts.diff(), table=table, page_size=1, longest=longest, host=host)
