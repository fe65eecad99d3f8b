"""FlashInfer's packed bits: booleans as bytes, in numpy's order."""

from __future__ import annotations

import torch

from pageant.integrations.flashinfer._lengths import on

__all__ = ["packbits", "segment_packbits"]


def _weights(bitorder: str, device: torch.device) -> torch.Tensor:
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder is {bitorder!r}; allowed: 'big', 'little'")
    shift = torch.arange(8, dtype=torch.int32, device=device)
    return 1 << (shift if bitorder == "little" else 7 - shift)


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """uint8 [ceil(n / 8)] of bool [n]; missing bits of the last byte are 0.

    >>> packbits(torch.tensor([True, False, True])).tolist()
    [160]
    >>> packbits(torch.tensor([True, False, True]), "little").tolist()
    [5]
    """
    bits = torch.nn.functional.pad(x.reshape(-1).bool(), (0, -x.numel() % 8)).view(-1, 8)
    return (bits * _weights(bitorder, x.device)).sum(-1).to(torch.uint8)


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment x[indptr[i] : indptr[i + 1]] from a whole byte on.

    Returns:
        The bytes, and int32 [R + 1] where each segment's begin. How many bytes there are depends on
        the offsets' values: where those lie on a GPU, this waits for it.

    >>> y, starts = segment_packbits(torch.ones(12).bool(), torch.tensor([0, 3, 12]), "little")
    >>> y.tolist(), starts.tolist()
    ([7, 255, 1], [0, 1, 3])
    """
    starts = on(indptr, x.device)
    sizes = (starts.diff() + 7) // 8
    first = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    count = int(first[-1])
    byte = torch.arange(count, device=x.device)
    owner = torch.searchsorted(first[1:].contiguous(), byte, right=True)
    bit = (byte - first[owner])[:, None] * 8 + torch.arange(8, device=x.device)
    at = starts[owner].long()[:, None] + bit
    inside = at < starts[owner + 1][:, None]
    flat = x.reshape(-1).bool()
    bits = flat[at.clamp(max=max(0, flat.shape[0] - 1))] & inside if count else inside
    y = (bits * _weights(bitorder, x.device)).sum(-1).to(torch.uint8)
    return y, first.to(torch.int32)
