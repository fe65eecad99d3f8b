"""Custom masks: any set of keys a row, in terms of what Pageant's batches can say.

A mask that lets every row see all keys before its request's new tokens is a draft mask. Of any
other, each row becomes a request of its own, one token whose page table lists the keys it sees, in
pages of one token. That is exact, but a row shares no work with its neighbours: R requests of m
rows read m times the keys they would read once, and the table holds T times the longest request's
number of keys. Whether a mask is of the first kind is looked at only where mask and lengths lie on
the CPU; on a GPU that would wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.integrations.flashinfer._lengths import Keys, Queries


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Each token as a request.

    Attributes:
        starts: int32 [T + 1], 0 to T.
        lens: int32 [T], keys that each row sees.
        slots: int32 [T, W]: page * step + row of those keys.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor


def unpack(packed: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """bool [bits]: a packed mask without the bits that fill each request's last byte.

    Args:
        packed: uint8, little-endian bits, each request from a whole byte on.
        sizes: int64 [R], bits of each request, on the CPU.
    """
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    flat, first = bits.flatten().bool(), 0
    parts = [flat[:0]]
    for size in sizes.tolist():
        parts.append(flat[first : first + size])
        first += -(-size // 8) * 8
    return torch.cat(parts)


def draft_mask(mask: torch.Tensor, queries: Queries, keys: Keys) -> torch.Tensor | None:
    """bool [T, longest], if the mask is one over new tokens alone and the host can see that.

    Args:
        mask: bool [sum of m * n], request by request, row by row.
        queries, keys: of the batch.
    """
    if not mask.is_cpu or queries.host is None or keys.host is None or not queries.longest:
        return None
    drafts = torch.zeros(int(queries.host[-1]), queries.longest, dtype=torch.bool)
    first = 0
    for start, m, n in zip(
        queries.host.tolist(), queries.host.diff().tolist(), keys.host.tolist(), strict=False
    ):
        rows = mask[first : first + m * n].view(m, n)
        first += m * n
        if not rows[:, : max(0, n - m)].all():
            return None
        drafts[start : start + m, max(0, m - n) : m] = rows[:, max(0, n - m) :]
    return drafts


def by_row(
    mask: torch.Tensor, queries: Queries, keys: Keys, num_rows: int, window: int | None, step: int
) -> Rows:
    """Every row's visible keys, on the mask's device.

    Args:
        mask: bool [sum of m * n], request by request, row by row.
        queries, keys: of the batch, on the mask's device.
        num_rows: T.
        window: keys a row sees at most, itself included; None means all.
        step: slots from one page to the next; 0: pages are those of `gathered`.

    One request of two rows and three keys on pages 4 and 2, two tokens a page:

    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> queries = Queries(starts=i32(0, 2), num_tokens=2, longest=2)
    >>> keys = Keys(lens=i32(3), table=i32(4, 2).view(1, 2), page_size=2, longest=3)
    >>> rows = by_row(torch.tensor([1, 0, 1, 0, 1, 0]).bool(), queries, keys, 2, None, step=2)
    >>> rows.lens.tolist(), rows.slots[0, :2].tolist(), rows.slots[1, :1].tolist()
    ([2, 1], [8, 4], [9])
    """
    device, longest = mask.device, max(1, keys.longest)
    row = torch.arange(num_rows, dtype=torch.int32, device=device)
    owner = torch.searchsorted(queries.starts[1:], row, right=True)
    owner = owner.clamp_(max=max(0, queries.num_requests - 1))
    counts, all_lens = queries.starts.diff().long(), keys.lens.long()
    own, lens = row - queries.starts[owner], all_lens[owner]
    before = (counts * all_lens).cumsum(0) - counts * all_lens
    key = torch.arange(longest, device=device)
    at = (before[owner] + own * lens)[:, None] + key
    seen = (key < lens[:, None]) & (at < mask.shape[0])
    if mask.shape[0]:
        seen &= mask[at.clamp_(max=mask.shape[0] - 1)]
    if window is not None:
        seen &= key > (lens - counts[owner] + own)[:, None] - window
    table = keys.table if step else own_pages(keys)
    step = step or keys.page_size
    slot = table.long()[owner][:, key // keys.page_size] * step + key % keys.page_size
    place = torch.where(seen, seen.cumsum(1) - 1, longest)
    slots = torch.zeros(num_rows, longest + 1, dtype=torch.int64, device=device)
    slots.scatter_(1, place, slot)
    return Rows(
        starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        lens=seen.sum(1, dtype=torch.int32),
        slots=slots[:, :longest].int(),
    )


def slot_step(parts: tuple[torch.Tensor, ...]) -> int | None:
    """Slots from one page to the next in `token_pages`; None if a token's heads lie apart.

    Args:
        parts: keys, values and what scales they have, [P, N, Hkv, ..].
    """
    steps = set()
    for x in parts:
        page, token = x.stride(0), x.stride(1)
        inner = 1 + sum(
            (size - 1) * step for size, step in zip(x.shape[2:], x.stride()[2:], strict=True)
        )
        if x.shape[1] == 1:
            token = max(page, inner)
        if x.shape[0] == 1:
            page = token * x.shape[1]
        if token < inner or page % token or page // token < x.shape[1]:
            return None
        steps.add(page // token)
    return steps.pop() if len(steps) == 1 else None


def token_pages(x: torch.Tensor, step: int) -> torch.Tensor:
    """[slots, 1, Hkv, ..] over the memory of pages [P, N, Hkv, ..], nothing copied."""
    num_pages, page_size = x.shape[:2]
    token = x.stride(0) if page_size == 1 else x.stride(1)
    count = (num_pages - 1) * step + page_size
    return x.as_strided((count, 1, *x.shape[2:]), (token, token, *x.stride()[2:]))


def gathered(x: torch.Tensor, keys: Keys) -> torch.Tensor:
    """A copy of the batch's own pages, [R * W * N, 1, Hkv, ..], for those `slot_step` refuses."""
    at = keys.table.flatten().clamp(0, x.shape[0] - 1)
    whole = x.view(torch.uint8) if x.element_size() == 1 else x
    return whole.index_select(0, at).flatten(0, 1).unsqueeze(1).view(x.dtype)


def own_pages(keys: Keys) -> torch.Tensor:
    """int32 [R, W]: the table by which `gathered` pages are found."""
    count = keys.table.numel()
    ids = torch.arange(count, dtype=torch.int32, device=keys.table.device)
    return ids.view(keys.table.shape)
