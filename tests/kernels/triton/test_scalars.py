"""Scales as the kernels take them."""

import torch

from pageant.kernels.triton.common.scalars import kernel_scale


def test_what_the_host_knows_is_a_number():
    assert kernel_scale(1) is None
    assert kernel_scale(0.25) == 0.25
    assert kernel_scale(torch.tensor([[3]])) == 3.0
    assert kernel_scale(torch.tensor(0.1, dtype=torch.float64)) == float(torch.tensor(0.1))


def test_what_lies_on_the_device_is_not_read():
    """A meta tensor stands for one on a GPU: reading it would raise."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        scale = torch.empty(1, dtype=dtype, device="meta")
        assert kernel_scale(scale) is scale
    found = kernel_scale(torch.empty((), dtype=torch.int64, device="meta"))
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
