"""Rounding by bits: every pattern of a float's upper half, with lower halves at and beside ties."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pageant.cache.formats import FORMATS
from pageant.cache.quantize import encode
from pageant.kernels.triton.common import encode as module
from tests.cache import definition

LOWER = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
COUNT = 1 << 16


@triton.jit
def run_kernel(x, y, COUNT: tl.constexpr, NAME: tl.constexpr):
    at = tl.arange(0, COUNT)
    given = tl.load(x + at)
    if NAME == "e4m3":
        found = module.to_e4m3(given)
    elif NAME == "e5m2":
        found = module.to_e5m2(given)
    elif NAME == "e2m1":
        found = module.to_e2m1(given)
    elif NAME == "int8":
        found = module.to_int8(given)
    elif NAME == "bf16":
        found = module.to_bf16(given)
    elif NAME == "from_e4m3":
        found = module.from_e4m3(given)
    else:
        found = module.from_e2m1(given)
    tl.store(y + at, found)


@triton.jit
def absmax_kernel(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    given = tl.load(x + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(y + row, module.absmax(given, 1))


def floats(lower):
    bits = np.arange(COUNT, dtype=np.uint32) << 16 | np.uint32(lower)
    return torch.from_numpy(bits.view(np.float32))


def computed(name, x, device, dtype=torch.int32):
    x = x.to(device)
    y = torch.full(x.shape, -77, dtype=dtype, device=device)
    run_kernel[(1,)](x, y, COUNT=x.numel(), NAME=name, enable_fp_fusion=False)
    return y.cpu()


@pytest.mark.parametrize("lower", LOWER)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats(device, name, lower):
    x = floats(lower)
    want, _ = encode(x, FORMATS[f"fp8_{name}"])
    assert torch.equal(computed(name, x, device), want.view(torch.uint8).int())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats_by_their_definition(device, name):
    table = definition.TABLES[f"fp8_{name}"]
    points = np.sort(table[np.isfinite(table)]).astype(np.float32)
    middles = (points[:-1] + points[1:]) / 2
    near = [np.nextafter(x, np.float32(to)) for x in (points, middles) for to in (-np.inf, np.inf)]
    x = np.concatenate([points, middles, *near, np.float32([np.nan, np.inf, -np.inf, -0.0])])
    x = np.resize(x, 2048)
    want = definition.nearest(x, table)
    want[np.isnan(x)] = 0x7F
    assert np.array_equal(computed(name, torch.from_numpy(x), device).numpy(), want)


@pytest.mark.parametrize("lower", LOWER)
def test_four_bit_floats(device, lower):
    x = floats(lower)
    want = definition.nearest(x.numpy(), definition.E2M1)
    want[x.isnan().numpy()] = 0
    assert np.array_equal(computed("e2m1", x, device).numpy(), want)


@pytest.mark.parametrize("lower", LOWER)
def test_integers(device, lower):
    x = floats(lower)
    want = x.clamp(-127, 127).round().nan_to_num(0.0).int()
    assert torch.equal(computed("int8", x, device), want)


@pytest.mark.parametrize("lower", LOWER)
def test_bf16(device, lower):
    x = floats(lower)
    got = computed("bf16", x, device).short().view(torch.bfloat16)
    nan = x.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int16), x[~nan].bfloat16().view(torch.int16))


@pytest.mark.parametrize(
    ("name", "table"),
    [("from_e4m3", definition.TABLES["fp8_e4m3"]), ("from_e2m1", definition.E2M1)],
)
def test_codes_become_their_values(device, name, table):
    codes = torch.arange(len(table), dtype=torch.int32)
    got = computed(name, codes, device, torch.float32).numpy()
    assert np.array_equal(got, table.astype(np.float32), equal_nan=True)
    finite = ~np.isnan(table)
    assert np.array_equal(np.signbit(got)[finite], np.signbit(table)[finite])


def test_absmax_keeps_nan(device):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    x[0, 3], x[1, 0], x[1, 1] = torch.nan, -torch.inf, torch.nan
    x[2, 5], x[3] = -torch.inf, -0.0
    x = x.to(device)
    y = torch.empty(8, device=device)
    absmax_kernel[(1,)](x, y, ROWS=8, COLUMNS=16)
    want = x.abs().amax(1)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y[2:], want[2:])
