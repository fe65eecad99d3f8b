"""Formats: every code reads as torch's own table, writing rounds to nearest even and saturates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant import ArgumentError, ops
from pageant.cache.formats import ALIASES, FORMATS, OF_DTYPE, RESERVED, resolve
from pageant.cache.quantize import decode, encode

EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")
each_fp8 = pytest.mark.parametrize("name", EIGHT_BITS)
ALL_CODES = torch.arange(256).to(torch.uint8)


def stored(values, name, scale=1.0):
    """What values read back as."""
    codes, scales = ops.quantize(torch.tensor(values), name, scale)
    assert scales is None
    return ops.dequantize(codes, None, name, scale).tolist()


def from_the_definition(code, fmt):
    """Value of an fp8 code by the OCP specification, worked out bit by bit."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    bias = (1 << (fmt.exponent_bits - 1)) - 1
    top = (1 << fmt.exponent_bits) - 1
    if fmt.name == "fp8_e4m3":
        if code & 0x7F == 0x7F:
            return math.nan
    elif exponent == top:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - fmt.mantissa_bits)
    return sign * (1 + mantissa / (1 << fmt.mantissa_bits)) * 2.0 ** (exponent - bias)


@each_fp8
def test_all_256_codes_read_as_torch_and_the_specification_say(name):
    fmt = FORMATS[name]
    got = decode(ALL_CODES, fmt)
    assert torch.equal(
        got.view(torch.int32), ALL_CODES.view(fmt.element_dtype).float().view(torch.int32)
    )
    want = torch.tensor([from_the_definition(code, fmt) for code in range(256)])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got[torch.isfinite(got)].max() == fmt.max_value


@each_fp8
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_reading_into_any_type_is_exact(name, dtype):
    fmt = FORMATS[name]
    torch.testing.assert_close(
        decode(ALL_CODES, fmt, dtype).float(),
        decode(ALL_CODES, fmt),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@each_fp8
def test_every_finite_code_survives_a_round_trip(name):
    fmt = FORMATS[name]
    values = decode(ALL_CODES, fmt)
    kept = torch.isfinite(values)
    assert torch.equal(encode(values, fmt).view(torch.uint8)[kept], ALL_CODES[kept])


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("fp8_e4m3", 1000.0, 448.0),
        ("fp8_e4m3", -1000.0, -448.0),
        ("fp8_e4m3", 448.0, 448.0),
        ("fp8_e4m3", 464.0, 448.0),
        ("fp8_e4m3", 465.0, 448.0),
        ("fp8_e4m3", math.inf, 448.0),
        ("fp8_e4m3", -math.inf, -448.0),
        ("fp8_e5m2", 1e6, 57344.0),
        ("fp8_e5m2", -1e6, -57344.0),
        ("fp8_e5m2", 61440.0, 57344.0),
        ("fp8_e5m2", math.inf, 57344.0),
        ("fp8", 1e30, 448.0),
    ],
)
def test_writing_saturates(name, value, want):
    assert stored([value], name) == [want]


@each_fp8
def test_nan_stays_nan(name):
    assert math.isnan(stored([math.nan], name)[0])
    assert math.isnan(stored([math.nan], name, 0.25)[0])


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        # e4m3 has steps of 1/8 between 1 and 2: the neighbour with an even last bit wins.
        ("fp8_e4m3", 1 + 1 / 16, 1.0),
        ("fp8_e4m3", 1 + 3 / 16, 1.25),
        ("fp8_e4m3", 1 + 5 / 16, 1.25),
        ("fp8_e4m3", -(1 + 3 / 16), -1.25),
        ("fp8_e4m3", 1 + 1 / 16 + 1 / 1024, 1.125),
        ("fp8_e4m3", 2.0**-10, 0.0),
        ("fp8_e4m3", 3 * 2.0**-10, 2.0**-8),
        ("fp8_e5m2", 1 + 1 / 8, 1.0),
        ("fp8_e5m2", 1 + 3 / 8, 1.5),
        ("fp8_e5m2", 2.0**-17, 0.0),
        ("fp8_e5m2", 3 * 2.0**-17, 2.0**-15),
    ],
)
def test_ties_go_to_even(name, value, want):
    assert stored([value], name) == [want]


@each_fp8
@given(st.floats(width=32, allow_nan=False), st.sampled_from([1.0, 0.5, 3.0, 1e-3, 448.0]))
def test_the_nearest_value_is_stored(name, value, scale):
    """Nothing representable is nearer to value / scale, computed in float32."""
    fmt = FORMATS[name]
    target = (torch.tensor(value) / torch.tensor(scale)).double()
    values = decode(ALL_CODES, fmt, torch.float64)
    values = values[torch.isfinite(values)]
    got = decode(encode(torch.tensor([value]), fmt, scale), fmt, torch.float64)[0]
    target = target.clamp(-fmt.max_value, fmt.max_value)
    assert (got - target).abs() == (values - target).abs().min()


@each_fp8
def test_the_scale_divides_by_ieee_division(name):
    """x / 3, not x times the rounded third: over a million values the two differ somewhere."""
    x = torch.linspace(-100, 100, 1_000_003)
    want = (x / 3.0).to(FORMATS[name].element_dtype).view(torch.uint8)
    for scale in (3.0, torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([3.0]).double()):
        assert torch.equal(encode(x, FORMATS[name], scale).view(torch.uint8), want)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@each_fp8
def test_division_is_in_float32_whatever_the_input(name, source):
    x = torch.linspace(-9, 9, 5003).to(source)
    want = encode(x.float(), FORMATS[name], 0.3)
    assert torch.equal(encode(x, FORMATS[name], 0.3).view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_plain_formats_cast_and_ignore_the_scale(name):
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 1e3
    codes, scales = ops.quantize(x, name, 7.0)
    assert scales is None
    assert torch.equal(codes, x.to(FORMATS[name].element_dtype))
    assert torch.equal(ops.dequantize(codes, None, name, 7.0), codes.float())


@each_fp8
def test_bytes_are_as_good_as_the_element_type(name):
    codes, _ = ops.quantize(torch.tensor([1.5, -3.0]), name, 2.0)
    assert codes.dtype == FORMATS[name].element_dtype
    assert ops.dequantize(codes.view(torch.uint8), None, name, 2.0).tolist() == [1.5, -3.0]


def test_scales_where_there_are_none_are_refused():
    with pytest.raises(ValueError, match="scales are given, but fp8_e4m3 stores none"):
        ops.dequantize(torch.zeros(4, dtype=torch.uint8), torch.ones(1), "fp8_e4m3")


@pytest.mark.parametrize(("dtype", "name"), [*OF_DTYPE.items()])
def test_auto_is_the_models_own(dtype, name):
    assert resolve("auto", dtype) is FORMATS[name]
    assert FORMATS[name].element_dtype == dtype


def test_aliases_and_refusals():
    assert resolve("fp8", torch.float32) is FORMATS["fp8_e4m3"]
    assert set(ALIASES) == {"fp8"}
    for name in (*RESERVED, "fp7", "", "FP8", "bfloat16"):
        with pytest.raises(ArgumentError) as caught:
            resolve(name, torch.float32)
        assert caught.value.argument == "cache"
        assert repr(name) in str(caught.value)
        assert "fp8_e4m3" in str(caught.value)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_descriptors_agree_with_torch(fmt):
    limits = torch.finfo(fmt.element_dtype)
    assert fmt.bits == limits.bits
    assert fmt.max_value == limits.max
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert limits.eps == 2.0**-fmt.mantissa_bits
    assert fmt.quantized == (fmt.bits == 8)
    assert fmt.data_bytes(40) == 40 * fmt.bits // 8
    assert fmt.scale_bytes(40) == 0
