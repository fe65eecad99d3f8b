"""FlashInfer's small helpers that callers of its attention use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.device import Device

__all__ = ["FP4Tensor", "ceil_div", "get_device_sm_count", "round_up"]


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """The multiple of y from x on."""
    return ceil_div(x, y) * y


def get_device_sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU, as Pageant counts them."""
    return Device.detect(device).num_sms


@dataclass
class FP4Tensor:
    """nvfp4 output: packed elements, and block scales in tiles of 128 rows by 4 blocks.

    Attributes:
        data: uint8 [T, .., ceil(n / 2)], the even element in the low half.
        scale: float8_e4m3fn [rows, columns], rows a multiple of 128.
        scale_start_index: row of the first token in `scale`.
        original_shape: of the values; None: twice the last axis of data.
    """

    data: torch.Tensor
    scale: torch.Tensor
    scale_start_index: int = 0
    original_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8:
            raise ValueError(f"data is of {self.data.dtype}; allowed: torch.uint8")
        if self.scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"scale is of {self.scale.dtype}; allowed: torch.float8_e4m3fn")
        if self.scale.shape[0] % 128:
            raise ValueError(f"scale has {self.scale.shape[0]} rows; allowed: a multiple of 128")
        last = self.scale.shape[0] - self.data.shape[0]
        if not 0 <= self.scale_start_index <= last:
            have = f"scale_start_index is {self.scale_start_index}"
            raise ValueError(f"{have}; allowed: 0 to {last}, so that all rows fit")
        if self.original_shape is None:
            self.original_shape = (*self.data.shape[:-1], 2 * self.data.shape[-1])
        if self.data.shape[-1] != ceil_div(self.original_shape[-1], 2):
            have = f"data has {self.data.shape[-1]} bytes a row"
            raise ValueError(f"{have}; allowed: {ceil_div(self.original_shape[-1], 2)}")

    @property
    def dtype(self) -> str:
        """Always "nvfp4"."""
        return "nvfp4"
