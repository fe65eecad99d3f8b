"""Formats: every code reads as torch's own table, writing rounds to nearest even and saturates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant import ArgumentError, ops
from pageant.cache.formats import ALIASES, FORMATS, OF_DTYPE, resolve
from pageant.cache.quantize import decode, encode
from tests.cache import definition

EIGHT_BITS = ("fp8_e4m3", "fp8_e5m2")
each_fp8 = pytest.mark.parametrize("name", EIGHT_BITS)
ALL_CODES = torch.arange(256).to(torch.uint8)


def stored(values, name, scale=1.0):
    """What values read back as."""
    codes, scales = ops.quantize(torch.tensor(values), name, scale)
    assert scales is None
    return ops.dequantize(codes, None, name, scale).tolist()


@each_fp8
def test_all_256_codes_read_as_torch_and_the_specification_say(name):
    fmt = FORMATS[name]
    got = decode(ALL_CODES, None, fmt)
    assert torch.equal(
        got.view(torch.int32), ALL_CODES.view(fmt.element_dtype).float().view(torch.int32)
    )
    want = torch.from_numpy(definition.TABLES[name]).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got[torch.isfinite(got)].max() == fmt.max_value


@each_fp8
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_reading_into_any_type_is_exact(name, dtype):
    fmt = FORMATS[name]
    torch.testing.assert_close(
        decode(ALL_CODES, None, fmt, dtype).float(),
        decode(ALL_CODES, None, fmt),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@each_fp8
def test_every_finite_code_survives_a_round_trip(name):
    fmt = FORMATS[name]
    values = decode(ALL_CODES, None, fmt)
    kept = torch.isfinite(values)
    assert torch.equal(encode(values, fmt)[0].view(torch.uint8)[kept], ALL_CODES[kept])


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
def test_every_nan_is_stored_as_one_byte(name):
    """As GPUs convert: the sign and the payload of a NaN are not kept."""
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, -1], dtype=torch.int32)
    codes, _ = encode(bits.view(torch.float32), FORMATS[name])
    assert codes.view(torch.uint8).tolist() == [0x7F] * 4


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
    values = decode(ALL_CODES, None, fmt, torch.float64)
    values = values[torch.isfinite(values)]
    got = decode(*encode(torch.tensor([value]), fmt, scale), fmt, torch.float64)[0]
    target = target.clamp(-fmt.max_value, fmt.max_value)
    assert (got - target).abs() == (values - target).abs().min()


@each_fp8
def test_the_scale_divides_by_ieee_division(name):
    """x / 3, not x times the rounded third: over a million values the two differ somewhere."""
    x = torch.linspace(-100, 100, 1_000_003)
    want = (x / 3.0).to(FORMATS[name].element_dtype).view(torch.uint8)
    for scale in (3.0, torch.tensor(3.0), torch.tensor([3.0]), torch.tensor([3.0]).double()):
        assert torch.equal(encode(x, FORMATS[name], scale)[0].view(torch.uint8), want)


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@each_fp8
def test_division_is_in_float32_whatever_the_input(name, source):
    x = torch.linspace(-9, 9, 5003).to(source)
    want, _ = encode(x.float(), FORMATS[name], 0.3)
    got, _ = encode(x, FORMATS[name], 0.3)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


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
    for name in ("nvfp8", "int4", "fp7", "", "FP8", "bfloat16"):
        with pytest.raises(ArgumentError) as caught:
            resolve(name, torch.float32)
        assert caught.value.argument == "cache"
        assert repr(name) in str(caught.value)
        assert "fp8_e4m3" in str(caught.value)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", *EIGHT_BITS])
def test_descriptors_agree_with_torch(name):
    fmt = FORMATS[name]
    limits = torch.finfo(fmt.element_dtype)
    assert fmt.bits == limits.bits
    assert fmt.max_value == limits.max
    assert fmt.bits == 1 + fmt.exponent_bits + fmt.mantissa_bits
    assert limits.eps == 2.0**-fmt.mantissa_bits
    assert fmt.quantized == fmt.uses_layer_scales == (fmt.bits == 8)
    assert fmt.data_bytes(40) == 40 * fmt.bits // 8
    assert fmt.scale_bytes(40) == fmt.num_scales(40) == 0


# Bits, elements a byte, layer scales, bytes of 40 elements, their scales and bytes of those.
SCALED = {
    "int8": (8, 1, False, 40, 1, 4),
    "fp8_e4m3_token_head": (8, 1, False, 40, 1, 4),
    "nvfp4": (4, 2, True, 20, 3, 3),
    "nvfp4_4over6": (4, 2, True, 20, 3, 3),
}
each_scaled = pytest.mark.parametrize("name", SCALED)
each_quantized = pytest.mark.parametrize("name", [*EIGHT_BITS, *SCALED])
each_row_scaled = pytest.mark.parametrize("name", ["int8", "fp8_e4m3_token_head"])
each_nvfp4 = pytest.mark.parametrize("name", ["nvfp4", "nvfp4_4over6"])


@each_scaled
def test_descriptors_of_formats_with_scales(name):
    fmt = FORMATS[name]
    assert fmt.quantized
    assert fmt.element_dtype.itemsize == 1
    assert SCALED[name] == (
        fmt.bits,
        fmt.per_byte,
        fmt.uses_layer_scales,
        fmt.data_bytes(40),
        fmt.num_scales(40),
        fmt.scale_bytes(40),
    )
    codes, scales = ops.quantize(torch.ones(3, 2, 40), name)
    assert codes.shape == (3, 2, fmt.data_bytes(40))
    assert codes.dtype == fmt.element_dtype
    assert scales.shape == ((3, 2, 3) if fmt.scale_block else (3, 2))
    assert scales.dtype == fmt.scale_dtype


def bytes_of(codes, scales):
    parts = [codes] if scales is None else [codes, scales.reshape(-1)]
    return [part.contiguous().view(torch.uint8).numpy() for part in parts]


def assert_stored_as_defined(x, name, scale=1.0):
    """One row's bytes are the definition's."""
    x = torch.as_tensor(x, dtype=torch.float32)
    codes, scales = encode(x, FORMATS[name], scale)
    want = definition.stored(x.numpy(), name, float(scale))
    for got, expected in zip(bytes_of(codes, scales), want, strict=False):
        assert got.tolist() == expected.tolist()
    assert (scales is None) == (want[1].size == 0)
    got = ops.dequantize(codes, scales, name, scale)
    assert got.shape == x.shape
    assert got.dtype == torch.float32
    return codes, scales, got


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Halves, quarters and thirds of small numbers: ties, block tops and exact steps.
near_ties = st.builds(
    lambda i, j, k: float(np.float32(i) / np.float32(j) * np.float32(2.0) ** k),
    st.integers(-64, 64),
    st.sampled_from((1, 2, 4, 3, 6, 7)),
    st.sampled_from((-20, -9, -3, 0, 3, 9)),
)


@st.composite
def rows(draw):
    """float32 [D] of one magnitude, some elements replaced by drawn ones."""
    size = draw(st.sampled_from((16, 24, 40, 48, 72)))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    grid = draw(st.sampled_from((0.0, 0.25, 0.5)))
    x = rng.standard_normal(size).astype(np.float32) * np.float32(2.0) ** draw(st.integers(-30, 20))
    if grid:  # multiples of a quarter step of the largest: every second one is a tie
        top = draw(st.sampled_from((4.0, 6.0)))
        x = np.rint(x / np.abs(x).max() * (top / grid)).astype(np.float32) * np.float32(grid)
    for index, value in draw(
        st.lists(st.tuples(st.integers(0, size - 1), near_ties | finite), max_size=4)
    ):
        x[index] = value
    return x


some_scales = st.sampled_from((1.0, 0.5, 3.0, 1e-3, 448.0, 1 / 3))


@each_quantized
@given(rows(), some_scales)
def test_rows_are_stored_as_defined(name, x, scale):
    assert_stored_as_defined(x, name, scale)


@each_quantized
def test_many_rows_at_once_are_each_stored_alone(name):
    x = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    codes, scales = ops.quantize(x, name, 0.25)
    for i in range(4):
        for j in range(3):
            alone = ops.quantize(x[i, j].float(), name, 0.25)
            assert torch.equal(codes[i, j].view(torch.uint8), alone[0].view(torch.uint8))
            if scales is not None:
                got = scales[i, j].reshape(-1).view(torch.uint8)
                assert torch.equal(got, alone[1].reshape(-1).view(torch.uint8))


@each_quantized
@pytest.mark.parametrize(
    "scale", [0.3, torch.tensor(0.3), torch.tensor([0.3]), torch.tensor([[0.3]]).double()]
)
def test_scales_of_every_kind_are_the_same(name, scale):
    """A float64 0.3 is not float32's 0.3, yet both mean the float32."""
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    codes, scales = ops.quantize(x, name, scale)
    want_codes, want_scales = ops.quantize(x, name, 0.3)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    values = ops.dequantize(codes, scales, name, scale)
    assert values.dtype == torch.float32
    assert values.shape == x.shape
    assert torch.equal(values, ops.dequantize(want_codes, want_scales, name, 0.3))


@each_row_scaled
def test_a_rows_own_scale_replaces_the_layers(name):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(4))
    codes, scales = ops.quantize(x, name, 7.0)
    assert torch.equal(scales, x.abs().amax(-1) / FORMATS[name].max_value)
    plain = ops.quantize(x, name)
    assert torch.equal(codes.view(torch.uint8), plain[0].view(torch.uint8))
    assert torch.equal(ops.dequantize(codes, scales, name, 7.0), ops.dequantize(*plain, name))


@each_row_scaled
def test_every_element_of_a_row_is_within_half_a_step(name):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).mul_(37)
    codes, scales = ops.quantize(x, name)
    error = (ops.dequantize(codes, scales, name) - x).abs()
    step = torch.ones_like(x) if name == "int8" else (x.abs() / scales[:, None] / 8).clamp(2**-9)
    assert (error <= step * scales[:, None] * 0.5001).all()
    assert (codes.float().abs().amax(-1) == FORMATS[name].max_value).all()


def test_int8_codes():
    """Row of top 127: steps of one, halves to the even code."""
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0])
    codes, scales = ops.quantize(x, "int8")
    assert scales.item() == 1.0
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -126, -127]


@each_row_scaled
def test_rows_of_zeros_nan_and_infinity(name):
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 3], x[3] = math.nan, math.inf, 1e-45  # whose scale would be 0 too
    codes, scales = ops.quantize(x, name)
    assert scales[0] == scales[3] == 0.0
    assert not codes[0].view(torch.uint8).any()
    assert not codes[3].view(torch.uint8).any()
    back = ops.dequantize(codes, scales, name)
    assert (back[[0, 3]] == 0).all()
    assert back[1].isnan().all(), "a NaN is lost"
    assert back[2, 3].isnan() or back[2, 3] == math.inf, "an infinity is lost"


def test_all_e2m1_codes():
    """Byte 0x21 holds code 1 first, the even element, then code 2; a scale of 1 and one of 2."""
    pairs = torch.arange(16, dtype=torch.uint8)
    codes = (pairs[0::2] | pairs[1::2] << 4).repeat(2)
    scales = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    got = ops.dequantize(codes, scales, "nvfp4")
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    want = torch.tensor([*sizes, *(-size for size in sizes)])
    assert definition.E2M1.tolist() == want.tolist()
    assert torch.equal(got, torch.cat([want, want * 2]))
    assert torch.equal(got.signbit(), torch.cat([want, want]).signbit())
    assert torch.equal(ops.dequantize(codes, scales, "nvfp4", 0.5), got * 0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_ties_go_to_the_even_code(sign):
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    x = torch.tensor(values + [0.0] * 8) * sign
    codes, scales = ops.quantize(x, "nvfp4")
    assert scales.tolist() == [1.0]
    assert ops.dequantize(codes, scales, "nvfp4")[:8].tolist() == [sign * size for size in want]
    above = torch.nextafter(x[:7], torch.full((7,), sign * 9))
    below = torch.nextafter(x[:7], torch.zeros(7))
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for near, expected in ((above, sizes[1:]), (below, sizes[:-1])):
        x[:7] = near
        got = ops.dequantize(*ops.quantize(x, "nvfp4"), "nvfp4")[:7]
        assert got.tolist() == [sign * size for size in expected]


@each_nvfp4
def test_nvfp4_edges(name):
    x = torch.zeros(5, 16)
    x[1] = 2.0**-11  # 1/6 of it rounds to a scale of 0
    x[2, 5] = math.nan
    x[3, 5], x[3, 6] = math.inf, 1.0
    x[4] = 1e6  # above 448 * 6
    codes, scales = ops.quantize(x, name)
    assert not codes[:2].any()
    assert scales[:2].float().tolist() == [[0.0], [0.0]]
    assert scales[2].float().isnan()
    assert scales[3:].float().tolist() == [[448.0], [448.0]]
    back = ops.dequantize(codes, scales, name)
    assert (back[:2] == 0).all()
    assert back[2].isnan().all(), "a NaN is lost"
    assert back[3, 5:7].tolist() == [448.0 * 6, 0.0]
    assert (back[4] == 448.0 * 6).all()
    for row in (x[0], x[1], x[3], x[4]):
        assert_stored_as_defined(row, name)


@each_nvfp4
def test_a_nan_stays_in_its_block(name):
    x = torch.ones(40)
    x[20] = math.nan
    back = ops.dequantize(*ops.quantize(x, name), name)
    assert back[16:32].isnan().all()
    assert not back[:16].isnan().any()
    assert not back[32:].isnan().any()


@each_nvfp4
@pytest.mark.parametrize("dim", [24, 40, 72])
def test_a_shorter_last_block_has_a_scale_of_its_own(name, dim):
    x = torch.full((dim,), 6.0)
    x[dim - 8 :] = 96.0
    _, scales, back = assert_stored_as_defined(x, name)
    assert scales.float().tolist() == [1.0] * (dim // 16) + [16.0]
    assert torch.equal(back, x)


def test_four_over_six_keeps_the_smaller_error():
    """Elements at 4 / 4 of the top and 3 / 4 of it: a top of 4 is exact, a top of 6 is not."""
    x = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)
    six, scale_six = ops.quantize(x, "nvfp4")
    four, scale_four = ops.quantize(x, "nvfp4_4over6")
    assert scale_six.float().tolist() == [0.6875]  # e4m3(4 / 6)
    assert scale_four.float().tolist() == [1.0]
    assert not torch.equal(ops.dequantize(six, scale_six, "nvfp4"), x)
    assert torch.equal(ops.dequantize(four, scale_four, "nvfp4_4over6"), x)
    # Readers see plain nvfp4.
    assert torch.equal(ops.dequantize(four, scale_four, "nvfp4"), x)


def test_four_over_six_keeps_six_where_both_are_exact():
    """Two ways to store 6, 3 and 0: scale 1 with codes 6 and 3, scale 1.5 with 4 and 2."""
    x = torch.tensor([6.0, 3.0] + [0.0] * 14)
    codes, scales = ops.quantize(x, "nvfp4_4over6")
    assert scales.float().tolist() == [1.0]
    assert ops.dequantize(codes, scales, "nvfp4").tolist() == x.tolist()


@pytest.mark.parametrize(
    "tenths",
    [
        [0, -955, -873, 0, -120, 748, 0, -599],
        [0, 575, -64, 0, 229, 289, 0, 103],
        [0, -210, 958, 0, 327, 509, 0, -353],
        [0, 415, -143, 0, -227, -301, 0, -731],
    ],
)
def test_four_over_six_adds_errors_in_the_documented_order(tenths):
    """Both errors are nearly equal: adding from left to right would choose otherwise."""
    x = torch.tensor([*tenths, *[0] * 8]) / 10
    _, _, back = assert_stored_as_defined(x, "nvfp4_4over6")
    assert torch.isfinite(back).all()


@given(rows(), some_scales)
def test_four_over_six_is_never_worse(x, scale):
    errors = {}
    for name in ("nvfp4", "nvfp4_4over6"):
        back = ops.dequantize(*ops.quantize(torch.from_numpy(x), name, scale), name, scale)
        difference = np.zeros(-(-len(x) // 16) * 16)
        difference[: len(x)] = back.numpy().astype(np.float64) - x
        errors[name] = (difference.reshape(-1, 16) ** 2).sum(-1)
    # The choice is made in float32.
    assert (errors["nvfp4_4over6"] <= errors["nvfp4"] * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@each_scaled
def test_reading_scaled_formats_rounds_once(name, dtype):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(6))
    codes, scales = encode(x, FORMATS[name])
    exact = decode(codes, scales, FORMATS[name], torch.float64)
    wide = decode(codes, scales, FORMATS[name])
    assert torch.equal(wide, exact.float())
    want = exact if dtype == torch.float64 else wide.to(dtype)
    assert torch.equal(decode(codes, scales, FORMATS[name], dtype), want)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda codes, scales: (codes, None, "int8"), "scales"),
        (lambda codes, scales: (codes, scales[:1], "int8"), "scales"),
        (lambda codes, scales: (codes, scales.half(), "int8"), "scales"),
        (lambda codes, scales: (codes, scales.double(), "int8"), "scales"),
        (lambda codes, scales: (codes, scales, "nvfp4"), "scales"),
        (lambda codes, scales: (codes, scales, "fp8_e4m3"), "scales"),
        (lambda codes, scales: (codes.float(), scales, "int8"), "codes"),
        (lambda codes, scales: (codes.float(), None, "fp8_e4m3"), "codes"),
    ],
)
def test_dequantize_refuses(call, argument):
    codes, scales = ops.quantize(torch.ones(2, 32), "int8")
    with pytest.raises(ArgumentError) as caught:
        ops.dequantize(*call(codes, scales))
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("shape", "name"), [((2, 17), "nvfp4"), ((), "int8"), ((2, 0), "int8"), ((0,), "nvfp4")]
)
def test_quantize_refuses_rows_it_cannot_pack(shape, name):
    with pytest.raises(ArgumentError) as caught:
        ops.quantize(torch.ones(shape), name)
    assert caught.value.argument == "x"


@each_scaled
def test_no_rows_at_all(name):
    codes, scales = ops.quantize(torch.ones(0, 2, 32), name)
    assert ops.dequantize(codes, scales, name).shape == (0, 2, 32)
