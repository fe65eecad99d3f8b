"""What the functional forms are given, checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pageant.cache.formats import resolve
from pageant.cache.pages import LayerCache
from pageant.cache.scales import check_scale
from pageant.cache.tensors import FLOATS, check_tensor, overlaps_itself, rows_meet
from pageant.select.bounds import require_whole
from pageant.types import Scalar, bad

BATCH_FIELDS = ("causal", "draft_mask", "draft_parents", "encoder_seq_lens")
INT32, BYTES = (torch.int32,), (torch.uint8, torch.int8)
KEY_NAMES, PAGE_NAMES = ("k", "v"), ("k_cache", "v_cache")
SCALE_NAMES = ("k_scales", "v_scales")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first name that is not known.

    >>> check_names(["causal", "colour"], BATCH_FIELDS)
    Traceback (most recent call last):
    pageant.types.ArgumentError: colour is 'given'; allowed: \
causal, draft_mask, draft_parents, encoder_seq_lens
    """
    for name in given:
        if name not in known:
            raise bad(name, "given", ", ".join(known))


def check_states(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str], format: str
) -> None:
    """Raise unless q is [T, Hq, D], k [.., Hkv, D] and v [.., Hkv, Dv] with as many rows as k.

    Args:
        q: queries, of a model dtype.
        k, v: keys and values, stored in the format (nvfp4: [.., Hkv, D / 2]).
        names: what errors call k and v; PAGE_NAMES have pages and rows before their heads.
        format: the name of a format.
    """
    check_tensor("q", q, FLOATS, dims=3)
    if q.device.type not in ("cpu", "cuda"):
        raise bad("q", str(q.device), "a tensor on the CPU or a CUDA device")
    if not isinstance(format, str):
        raise bad("format", format, "the name of a cache format")
    fmt = resolve(format, q.dtype)
    kinds = (fmt.element_dtype, *(BYTES if fmt.bits <= 8 else ()))
    dims = 4 if names == PAGE_NAMES else 3
    for name, x in zip(names, (k, v), strict=True):
        check_tensor(name, x, kinds, dims=dims, device=q.device)
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise bad(name, f"content stride {x.stride(-1)}", "content stride 1")
    if k.shape[-1] * fmt.per_byte != q.shape[-1]:
        raise bad(names[0], list(k.shape), f"head size {q.shape[-1]}, as of q")
    if k.shape[:-1] != v.shape[:-1]:
        have = ", ".join(map(str, k.shape[:-1]))
        raise bad(names[1], list(v.shape), f"[{have}, any], as {names[0]} has")


def check_flag(name: str, value: object) -> None:
    """Raise unless the value is True or False."""
    if not isinstance(value, bool):
        raise bad(name, value, "True or False")


def check_lengths(
    tensors: Mapping[str, torch.Tensor], device: torch.device, dims: Mapping[str, int]
) -> None:
    """Raise unless each is an int32 tensor on the device; dimensions are 1 unless `dims` says."""
    for name, x in tensors.items():
        check_tensor(name, x, INT32, dims=dims.get(name, 1), device=device)


def check_starts(name: str, starts: torch.Tensor, num_rows: int) -> None:
    """Raise unless offsets [R + 1] begin at 0 or above, never fall, and end within the rows."""
    if len(starts) == 0:
        raise bad(name, [], "[requests + 1]")
    if int(starts[0]) < 0 or int(starts[-1]) > num_rows or bool((starts.diff() < 0).any()):
        raise bad(name, starts.tolist(), f"offsets that never fall, up to the {num_rows} keys")


def check_new_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    scales: tuple[Scalar, Scalar],
) -> None:
    """Raise unless these are what is written, where to, and two scales; sizes are not compared."""
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, FLOATS, dims=3)
    for name, x in zip(PAGE_NAMES, pages, strict=True):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            have = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise bad(name, have, "a tensor [pages, page_size, kv heads, elements]")
    check_tensor("slot_mapping", slot_mapping, (torch.int64,), dims=1, device=k.device)
    check_scales(scales)


def check_scales(scales: object) -> None:
    """Raise unless these are two scales, of keys and of values."""
    if not isinstance(scales, tuple | list) or len(scales) != 2:
        raise bad("scales", scales, "two scales, of keys and of values")
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        check_scale(name, scale)


def check_table(seq_lens: torch.Tensor, page_table: torch.Tensor, page_size: int) -> None:
    """Raise unless these are lengths [R] that rows of the table [R, W] hold.

    The values are looked at on the CPU alone.
    """
    check_tensor("page_table", page_table, INT32, dims=2)
    check_lengths({"seq_lens": seq_lens}, page_table.device, dims={})
    require_whole("page_size", page_size)
    if len(seq_lens) != len(page_table):
        raise bad("page_table", list(page_table.shape), f"[{len(seq_lens)}, any], a row a request")
    if not seq_lens.is_cpu:
        return
    room = page_table.shape[1] * page_size
    for wrong in ((seq_lens < 0) | (seq_lens > room)).nonzero()[:1, 0].tolist():
        allowed = f"0 to {room}: {page_table.shape[1]} pages of {page_size} tokens"
        raise bad(f"seq_lens[{wrong}]", int(seq_lens[wrong]), allowed)


def check_apart(out: Mapping[str, torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Raise if memory of a tensor that is written meets another's, or its own."""
    written = list(out.values())
    for place, (name, x) in enumerate(out.items()):
        others = (*written[:place], *read)
        if overlaps_itself(x) or any(rows_meet(x, other) for other in others):
            raise bad(f"out: {name}", "memory that is read or written elsewhere", "its own memory")


def check_page_ids(page_table: torch.Tensor, seq_lens: torch.Tensor, cache: LayerCache) -> None:
    """Raise for a page in use that the cache does not have, if the table is on the CPU."""
    if not page_table.is_cpu:
        return
    counts = -(-seq_lens // cache.page_size)
    is_used = torch.arange(page_table.shape[1]) < counts[:, None]
    is_wrong = is_used & ((page_table < 0) | (page_table >= cache.num_pages))
    for row, column in is_wrong.nonzero()[:1].tolist():
        name = f"page_table[{row}, {column}]"
        raise bad(name, int(page_table[row, column]), f"page ids from 0 to {cache.num_pages - 1}")
