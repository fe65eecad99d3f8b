"""Scales as kernels take them: the host never waits to learn one that lies on the device."""

from __future__ import annotations

import torch

from pageant.cache.scales import LOADED
from pageant.types import Scalar


def kernel_scale(scale: Scalar) -> Scalar | None:
    """None for 1, a number for one that the host knows, else a tensor for the kernel to load.

    >>> kernel_scale(1.0), kernel_scale(torch.tensor([0.5]))
    (None, 0.5)
    """
    if not isinstance(scale, torch.Tensor):
        return None if scale == 1.0 else float(scale)
    if scale.is_cpu:
        return float(scale.to(torch.float32))
    return scale if scale.dtype in LOADED else scale.to(torch.float32)
