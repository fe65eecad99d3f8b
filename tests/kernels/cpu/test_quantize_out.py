"""Quantised outputs: byte for byte the definition, and within rounding of the float64 reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pageant
from pageant.cache.formats import FORMATS
from pageant.kernels import reference
from pageant.kernels.cpu import quantize_out as module
from pageant.kernels.cpu.quantize_out import quantize_out
from pageant.plan.inputs import LayerParams
from tests.inputs import BOUNDS, Case, Problem, assert_close, build, cases

Array = np.ndarray[Any, Any]
UNTOUCHED = 0x55
OUT_FORMATS = ("fp8_e4m3", "nvfp4")

# Magnitudes by code, from the bits: 4 exponent bits of bias 7 and 3 of mantissa; 2, 1 and 1.
E4M3 = np.array(
    [m / 512 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(x: Array, grid: Array) -> Array:
    """Code of the nearest magnitude; a tie goes to the even code; beyond the last, the last."""
    size = np.abs(x.astype(np.float64))
    low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, len(grid) - 1)
    high = np.minimum(low + 1, len(grid) - 1)
    below, above = size - grid[low], grid[high] - size
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return np.where(up, high, low).astype(np.uint8)


def to_e4m3(x: Array) -> Array:
    codes = nearest(np.nan_to_num(x, posinf=1e9, neginf=-1e9), E4M3)
    return np.where(np.isnan(x), 0x7F, codes | np.signbit(x).astype(np.uint8) << 7)


def define(rows: Array, out_format: str, out_scale: float) -> tuple[Array, Array]:
    """Bytes of codes, and of the scales of nvfp4 [T, blocks], in float32 throughout."""
    scale = np.float32(out_scale)
    with np.errstate(all="ignore"):
        if out_format == "fp8_e4m3":
            return to_e4m3(rows / scale), np.zeros((len(rows), 0), np.uint8)
        y = (rows * scale).reshape(len(rows), rows.shape[1] * rows.shape[2] // 16, 16)
        assert y.dtype == np.float32
        sf = to_e4m3(np.abs(y).max(-1) / np.float32(6))
        return codes_of(y, sf).reshape(*rows.shape[:2], rows.shape[2] // 2), sf


def codes_of(y: Array, sf: Array) -> Array:
    """e2m1 of y / sf for scales sf [T, blocks]: bytes [T, blocks, 8], the even element low."""
    divisor = e4m3_values(sf)[..., None].astype(np.float32)
    with np.errstate(all="ignore"):
        quotient = y / divisor
    codes = nearest(np.nan_to_num(quotient, posinf=1e9, neginf=-1e9), E2M1)
    codes |= np.signbit(quotient).astype(np.uint8) << 3
    codes[(divisor == 0).repeat(16, -1) | np.isnan(quotient)] = 0
    return codes[..., ::2] | codes[..., 1::2] << 4


def e4m3_values(codes: Array) -> Array:
    values = np.append(E4M3, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -values, values)


def e2m1_values(codes: Array) -> Array:
    """[.., n] bytes to [.., 2 n] numbers."""
    four = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return np.where(four & 8, -E2M1[four & 7], E2M1[four & 7])


@dataclass
class Room:
    """Tensors for a quantised output, full of UNTOUCHED; start_row None means linear scales."""

    out: torch.Tensor
    given: torch.Tensor | pageant.SwizzledScales | None
    scales: torch.Tensor | None
    start_row: int | None

    @classmethod
    def of(cls, sizes: tuple[int, int, int], out_format: str, start_row: int | None = None) -> Room:
        tokens, heads, dim = sizes
        fmt = FORMATS[out_format]
        out = torch.full((tokens, heads, dim // fmt.per_byte), UNTOUCHED, dtype=torch.uint8)
        out = out.view(fmt.element_dtype)
        if not fmt.scale_block:
            return cls(out, None, None, None)
        rows, blocks = tokens, heads * dim // 16
        if start_row is not None:
            rows, blocks = -(-(start_row + tokens) // 128) * 128, -(-blocks // 4) * 4
        scales = torch.full((rows, blocks), UNTOUCHED, dtype=torch.uint8)
        scales = scales.view(torch.float8_e4m3fn)
        given = scales if start_row is None else pageant.SwizzledScales(scales, start_row)
        return cls(out, given, scales, start_row)

    def read(self, tokens: int) -> tuple[Array, Array]:
        """Bytes of codes and scales of the first tokens; all others must be UNTOUCHED."""
        out = self.out.view(torch.uint8).numpy()
        assert (out[tokens:] == UNTOUCHED).all()
        if self.scales is None:
            return out[:tokens], np.zeros((tokens, 0), np.uint8)
        scales, blocks = self.scales.view(torch.uint8).numpy(), out.shape[1] * out.shape[2] // 8
        first = 0
        if self.start_row is not None:
            rows, columns = scales.shape
            tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
            scales = tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns)
            first = self.start_row
        own = np.zeros(scales.shape, bool)
        own[first : first + tokens, :blocks] = True
        assert (scales[~own] == UNTOUCHED).all()
        return out[:tokens], scales[first : first + tokens, :blocks]


def some_rows(tokens: int, heads: int, dim: int) -> torch.Tensor:
    """Blocks of every magnitude, of zeros, on the grids, between their points, and not finite."""
    rng = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens, heads, dim, generator=rng)
    rows *= torch.exp2(torch.randint(-24, 18, (tokens, heads, 1), generator=rng).float())
    flat = rows.view(-1, 16)
    flat[0], flat[1], flat[2, 3] = 0.0, -0.0, torch.nan
    flat[3, 5], flat[4, 6] = torch.inf, -torch.inf
    ties = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])
    flat[5] = torch.cat([ties, -ties])
    flat[6] = torch.tensor([17.0, 19.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 464.0, 465.0] * 2)
    flat[7] = -flat[6] * 2.0**-9
    return rows


def check_bytes(rows: torch.Tensor, room: Room, out_format: str, out_scale: float) -> None:
    codes, scales = room.read(len(rows))
    want_codes, want_scales = define(rows.numpy(), out_format, out_scale)
    assert (codes == want_codes).all()
    assert (scales == want_scales).all()


@pytest.mark.parametrize("step", [quantize_out, reference.quantize_out])
@pytest.mark.parametrize("out_scale", [1.0, 0.125, 0.3, 7.0, 2688.0])
@pytest.mark.parametrize(
    ("out_format", "start_row"),
    [("fp8_e4m3", None), ("nvfp4", None), ("nvfp4", 0), ("nvfp4", 3), ("nvfp4", 250)],
)
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 48), (1, 16)])
def test_the_definition(monkeypatch, step, out_scale, out_format, start_row, heads, dim):
    monkeypatch.setattr(module, "PIECE", 5 * heads * dim)  # so that there are several
    rows = some_rows(19, heads, dim)
    room = Room.of((22, heads, dim), out_format, start_row)
    params = LayerParams(score_scale=1.0, out_format=out_format, out_scale=out_scale)
    step(rows, room.out, room.given, params)
    check_bytes(rows, room, out_format, out_scale)


@pytest.mark.parametrize("step", [quantize_out, reference.quantize_out])
@pytest.mark.parametrize("out_format", OUT_FORMATS)
def test_tensors_of_any_strides(step, out_format):
    rows = some_rows(19, 2, 64)
    whole = Room.of((2 * 22, 4, 64), out_format)
    assert whole.out.shape[0] == 44
    params = LayerParams(score_scale=1.0, out_format=out_format, out_scale=3.0)
    part = None if whole.scales is None else whole.scales[::2, 4:12]
    step(rows, whole.out[::2, 1:3], part, params)
    codes, scales = define(rows.numpy(), out_format, 3.0)
    out = whole.out.view(torch.uint8).numpy()
    assert (out[:38:2, 1:3] == codes).all()
    assert (out == UNTOUCHED).sum() >= out.size - codes.size
    if part is not None:
        assert (part[:19].view(torch.uint8).numpy() == scales).all()
        assert (whole.scales.view(torch.uint8)[:, :4] == UNTOUCHED).all()
        assert (whole.scales.view(torch.uint8)[1::2] == UNTOUCHED).all()


def test_no_rows():
    for out_format in OUT_FORMATS:
        room = Room.of((2, 2, 16), out_format)
        params = LayerParams(score_scale=1.0, out_format=out_format)
        quantize_out(torch.empty(0, 2, 16), room.out, room.given, params)
        room.read(0)


# Whole runs


@dataclass(frozen=True)
class Asked:
    """A case and how its output is to be stored."""

    case: Case
    out_format: str
    out_scale: float
    is_tensor: bool
    start_row: int | None


@st.composite
def asked(draw: Any, dtype: torch.dtype) -> Asked:
    case, out_format = draw(cases(dtype)), draw(st.sampled_from(OUT_FORMATS))
    if out_format == "nvfp4":
        dim = -(-case.v_head_dim // 16) * 16
        swizzled = case.swizzled and FORMATS[case.format].num_scales(dim) % 4 == 0
        case = replace(case, v_head_dim=dim, swizzled=swizzled)
    return Asked(
        replace(case, query_scale=draw(st.sampled_from((None, None, 0.25)))),
        out_format,
        draw(st.sampled_from((0.05, 0.37, 1.0, 3.0, 700.0))),
        draw(st.booleans()),
        draw(st.sampled_from((None, 0, 5, 130))) if out_format == "nvfp4" else None,
    )


def run(asked: Asked, kernels: str = "auto") -> tuple[Problem, Array, Array]:
    """Bytes of the codes and the scales: the definition of rows that are within the bounds.

    What is not the batch's is checked to be left alone.
    """
    problem = build(asked.case, kernels)
    attn = problem.attn
    features = replace(attn.features, out_formats=(asked.out_format,))
    attn = pageant.Attention(attn.shape, attn.cache, attn.limits, features, attn.options)
    attn._planner.workspace.finished.fill_(torch.nan)
    shape = attn.shape
    sizes = (problem.q.shape[0], shape.num_q_heads, shape.value_dim)
    room = Room.of(sizes, asked.out_format, asked.start_row)
    scale = torch.tensor([asked.out_scale]) if asked.is_tensor else asked.out_scale
    layer = replace(problem.layer, out_format=asked.out_format, out_scale=scale)
    plan = attn.plan(problem.batch)
    out, lse = attn.run(
        plan,
        problem.q,
        problem.cache,
        layer,
        out=room.out,
        out_scales=room.given,
        return_lse=True,
    )
    assert out is room.out
    tokens, bound = len(problem.expected_out), BOUNDS[asked.case.dtype]
    assert_close(lse[:tokens], problem.expected_lse, bound)
    codes, scales = room.read(tokens)
    finished = attn._planner.workspace.finished[:tokens]
    assert_close(finished, problem.expected_out, bound)
    want_codes, want_scales = define(finished.numpy(), asked.out_format, asked.out_scale)
    assert (codes == want_codes).all()
    assert (scales == want_scales).all()
    return problem, codes, scales


def check_rounded(asked: Asked, want: torch.Tensor, codes: Array, scales: Array) -> int:
    """Every stored number lies between what the ends of its tolerance round to.

    Rounding keeps order, so this holds exactly when the unrounded row is within the bound. Returns
    how many elements the bound leaves but one code.
    """
    slack = 3 * BOUNDS[asked.case.dtype] * want.norm(dim=-1, keepdim=True)
    low, high = ((want + s).to(torch.float32).numpy() for s in (-slack, slack))
    scale = np.float32(asked.out_scale)
    if asked.out_format == "fp8_e4m3":
        got = e4m3_values(codes)
        ends = [e4m3_values(to_e4m3(end / scale)) for end in (low, high)]
    else:
        size = np.maximum(np.abs(low), np.abs(high)).reshape(*scales.shape, 16).max(-1)
        least = np.maximum(np.maximum(low, -high), 0).reshape(*scales.shape, 16).max(-1)
        bounds = [e4m3_values(to_e4m3(x * scale / np.float32(6))) for x in (least, size)]
        assert (bounds[0] <= e4m3_values(scales)).all()
        assert (e4m3_values(scales) <= bounds[1]).all()
        got = e2m1_values(codes).reshape(*scales.shape, 16)
        ends = [
            e2m1_values(codes_of((end * scale).reshape(*scales.shape, 16), scales))
            for end in (low, high)
        ]
    assert (ends[0] <= got).all()
    assert (got <= ends[1]).all()
    blind = (want == 0).all(-1).numpy()
    assert (codes[blind] & 0x77 == 0).all()
    return int((ends[0] == ends[1]).sum())


def prove(dtype: torch.dtype, kernels: str) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=100,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(asked(dtype))
    def equal(asked: Asked) -> None:
        problem, codes, scales = run(asked, kernels)
        check_rounded(asked, problem.expected_out, codes, scales)
        seen["combined"] += asked.case.count_features() >= 3
        seen["cases"] += 1

    equal()
    assert seen["combined"] >= seen["cases"] / 2


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_cpu_with_every_feature(dtype: torch.dtype) -> None:
    prove(dtype, "auto")


def test_reference_with_every_feature() -> None:
    prove(torch.float32, "reference")


PLAIN = Case(
    seed=1,
    head_dim=32,
    v_head_dim=48,
    lengths=((3, 9), (1, 6), (5, 5)),
    sinks=True,
    padding=3,
)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("speculative", [0, 1, 7])
@pytest.mark.parametrize("query_scale", [None, 0.25])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8_e4m3", "int8", "nvfp4"])
@pytest.mark.parametrize(
    ("out_format", "start_row"), [("fp8_e4m3", None), ("nvfp4", None), ("nvfp4", 126)]
)
def test_both_phases_in_one_batch(kernels, speculative, query_scale, format, out_format, start_row):
    case = replace(PLAIN, format=format, speculative=speculative, query_scale=query_scale)
    asked = Asked(case, out_format, 2.5, True, start_row)
    problem, codes, scales = run(asked, kernels)
    certain = check_rounded(asked, problem.expected_out, codes, scales)
    assert certain >= 0.97 * problem.expected_out.numel()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("out_format", OUT_FORMATS)
def test_rows_are_rounded_once(dtype, out_format):
    """Decode finishes rows in float32, so fp16 and bf16 models lose nothing before the format."""
    case = replace(PLAIN, dtype=dtype, format="fp8_e4m3", speculative=7)
    problem = build(case)
    want = problem.expected_out
    _, codes, scales = run(Asked(case, out_format, 1.0, False, None))
    exact = replace(case, dtype=torch.float32)
    assert check_rounded(Asked(exact, out_format, 1.0, False, None), want, codes, scales) > 0
