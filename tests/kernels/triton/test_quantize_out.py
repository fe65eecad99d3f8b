"""Quantised outputs: the kernel's bytes are the definition's, and no others change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant.cache.out_scales import SwizzledScales
from pageant.kernels.triton import quantize_out as module
from pageant.kernels.triton.quantize_out import quantize_out
from pageant.plan.inputs import LayerParams
from tests.kernels.cpu.test_quantize_out import (
    OUT_FORMATS,
    UNTOUCHED,
    Room,
    check_bytes,
    define,
    some_rows,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACES = [("fp8_e4m3", None), ("nvfp4", None), ("nvfp4", 0), ("nvfp4", 3), ("nvfp4", 250)]


def run(rows, room, out_format, out_scale):
    """The kernel on its device, over a room that lies on the CPU."""
    params = LayerParams(score_scale=1.0, out_format=out_format, out_scale=out_scale)
    out = room.out.to(DEVICE)
    given = scales = None if room.scales is None else room.scales.to(DEVICE)
    if room.start_row is not None:
        given = SwizzledScales(scales, room.start_row)
    quantize_out(rows.to(DEVICE), out, given, params)
    room.out.view(torch.uint8).copy_(out.view(torch.uint8))
    if scales is not None:
        room.scales.view(torch.uint8).copy_(scales.view(torch.uint8))


@pytest.mark.parametrize("out_scale", [1.0, 0.125, 0.3, 7.0, 2688.0])
@pytest.mark.parametrize(("out_format", "start_row"), PLACES)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 48), (1, 16)])
def test_the_definition(out_scale, out_format, start_row, heads, dim):
    rows = some_rows(19, heads, dim)
    room = Room.of((22, heads, dim), out_format, start_row)
    run(rows, room, out_format, out_scale)
    check_bytes(rows, room, out_format, out_scale)


@pytest.mark.parametrize("out_format", OUT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_scale_that_the_kernel_loads(monkeypatch, out_format, dtype):
    """As one on a GPU is."""
    monkeypatch.setattr(module, "kernel_scale", lambda scale: scale.to(DEVICE))
    rows, room = some_rows(7, 2, 64), Room.of((7, 2, 64), out_format)
    run(rows, room, out_format, torch.tensor(0.37, dtype=dtype))
    check_bytes(rows, room, out_format, float(torch.tensor(0.37, dtype=dtype)))


@pytest.mark.parametrize("out_format", OUT_FORMATS)
def test_tensors_of_any_strides(out_format):
    rows = some_rows(19, 2, 64)
    whole = Room.of((2 * 22, 4, 64), out_format)
    part = None if whole.scales is None else whole.scales[::2, 4:12]
    params = LayerParams(score_scale=1.0, out_format=out_format, out_scale=3.0)
    apart = rows.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    out, scales = whole.out.to(DEVICE), None if part is None else whole.scales.to(DEVICE)
    quantize_out(
        apart.to(DEVICE),
        out[::2, 1:3],
        None if scales is None else scales[::2, 4:12],
        params,
    )
    want_codes, want_scales = define(rows.numpy(), out_format, 3.0)
    codes = out.cpu().view(torch.uint8).numpy()
    assert (codes[:38:2, 1:3] == want_codes).all()
    assert (codes[1::2] == UNTOUCHED).all()
    assert (codes[38:] == UNTOUCHED).all()
    assert (codes[:, [0, 3]] == UNTOUCHED).all()
    if scales is not None:
        found = scales.cpu().view(torch.uint8).numpy()
        assert (found[:38:2, 4:12] == want_scales).all()
        assert (found[1::2] == UNTOUCHED).all()
        assert (found[:, :4] == UNTOUCHED).all()


@pytest.mark.parametrize("out_format", OUT_FORMATS)
def test_columns_apart(out_format):
    rows = some_rows(6, 2, 32)
    room = Room.of((6, 2, 32), out_format)
    wide = torch.full((*room.out.shape, 2), UNTOUCHED, dtype=torch.uint8)
    wide = wide.view(room.out.dtype).to(DEVICE)
    scales = None if room.scales is None else room.scales.to(DEVICE)
    params = LayerParams(score_scale=1.0, out_format=out_format)
    quantize_out(rows.to(DEVICE), wide[..., 0], scales, params)
    wide = wide.cpu().view(torch.uint8).numpy()
    assert (wide[..., 0] == define(rows.numpy(), out_format, 1.0)[0]).all()
    assert (wide[..., 1] == UNTOUCHED).all()


@pytest.mark.parametrize("out_format", OUT_FORMATS)
def test_no_rows(out_format):
    room = Room.of((2, 2, 16), out_format)
    run(torch.empty(0, 2, 16), room, out_format, 1.0)
    room.read(0)


@settings(max_examples=40)
@given(
    st.sampled_from(PLACES),
    st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 12)),
    st.sampled_from((1.0, 0.05, 0.37, 700.0, 1e-30)),
    st.integers(0, 300),
)
def test_anything_goes(place, sizes, out_scale, start_row):
    out_format, is_swizzled = place
    tokens, heads, blocks = sizes
    rows = some_rows(8 * tokens, heads, 16 * blocks)
    start = None if is_swizzled is None else start_row
    room = Room.of((8 * tokens + 2, heads, 16 * blocks), out_format, start)
    run(rows, room, out_format, out_scale)
    check_bytes(rows, room, out_format, out_scale)
