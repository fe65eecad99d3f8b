"""Everything at once: features, quantised caches, shared prefixes and quantised outputs, at random.

Each example combines what its draw says and must equal the float64 reference to 1e-5.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import pageant
from pageant.cache.formats import FORMATS
from pageant.cache.quantize import dequantize
from pageant.plan import prefix
from tests.inputs import MEMORIES, Case, build

# Half a step of the largest code, and where the block scale is itself rounded, of that too.
OUT_BOUNDS = {"fp8_e4m3": 2**-4, "nvfp4": 0.25}
EXAMPLES = 200


@pytest.fixture(autouse=True)
def _always_share(monkeypatch):
    monkeypatch.setattr(prefix, "RULES", (prefix.Rule(members=2, tokens=1, because="a test"),))


@st.composite
def everything(draw):
    """A Case whose requests may begin with pages of earlier ones, and an output format."""
    maybe = st.booleans()
    speculative = draw(st.sampled_from((0, 1, 3)))
    most = 60
    lengths = [
        (draw(st.integers(1, 1 + speculative)), draw(st.integers(1, most)))
        for _ in range(draw(st.integers(2, 5)))
    ]
    lengths += [(draw(st.integers(5, 12)), draw(st.integers(1, most)))] * draw(st.integers(0, 1))
    prefixes = [
        (draw(st.integers(0, max(0, r - 1))), draw(st.sampled_from((0, 16, most))))
        for r in range(len(lengths))
    ]
    case = Case(
        seed=draw(st.integers(0, 2**20)),
        dtype=torch.float32,
        kv_heads=draw(st.sampled_from((1, 2, 3))),
        group=draw(st.sampled_from((1, 2, 3, 5))),
        head_dim=draw(st.sampled_from((16, 24, 64))),
        v_head_dim=draw(st.sampled_from((16, 32, 80))),
        format=draw(st.sampled_from(tuple(FORMATS))),
        page_size=draw(st.sampled_from((1, 3, 4, 16))),
        memory=draw(st.sampled_from(MEMORIES)),
        lengths=tuple(lengths),
        window=draw(st.sampled_from((None, None, 9, 70))),
        soft_cap=draw(st.sampled_from((None, 2.0))),
        alibi=draw(maybe),
        sinks=draw(maybe),
        drafts=draw(st.sampled_from((None, "mask", "parents"))),
        scales=draw(maybe),
        speculative=speculative,
        splits=draw(st.sampled_from((None, None, 3))),
        padding=draw(st.sampled_from((0, 2))),
        prefixes=tuple(prefixes),
        query_scale=draw(st.sampled_from((None, 0.25))),
    )
    fmt = FORMATS[case.format]
    if fmt.scale_block and case.page_size % 4 == 0 and fmt.num_scales(case.v_head_dim) % 4 == 0:
        case = replace(case, swizzled=draw(maybe))
    return case, draw(st.sampled_from(("model", "fp8_e4m3", "nvfp4")))


def quantised(problem, name):
    """What `run` stores in the output format, read back, of the real tokens."""
    attn, shape = problem.attn, problem.attn.shape
    features = replace(attn.features, out_formats=("model", name))
    attn = pageant.Attention(shape, attn.cache, attn.limits, features, attn.options)
    rows, real = problem.q.shape[0], problem.expected_out.shape[0]
    out_scale, scales = 0.01, None
    if name == "nvfp4":
        out_scale = 400.0
        blocks = shape.num_q_heads * shape.value_dim // 16
        scales = torch.zeros(rows, blocks, dtype=torch.float8_e4m3fn)
    layer = replace(problem.layer, out_format=name, out_scale=out_scale)
    out = attn.run(attn.plan(problem.batch), problem.q, problem.cache, layer, out_scales=scales)
    if scales is None:
        return dequantize(out[:real], None, name, out_scale).double()
    blocks = scales[:real].float().unflatten(1, (shape.num_q_heads, -1)).to(scales.dtype)
    return dequantize(out[:real], blocks, name, 1 / out_scale).double()


def prove(examples):
    """Compare on every drawn case; count what they hold."""
    seen = dict.fromkeys(("all", "combined", "shared", "quantised"), 0)

    @settings(
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(everything())
    def equal(drawn):
        case, out_format = drawn
        problem = build(case)
        groups = problem.attn.plan(problem.batch).shared[case.window]
        problem.check()
        if out_format != "model":
            got, want = quantised(problem, out_format), problem.expected_out
            error = (got - want).norm() / want.norm().clamp(min=1e-30)
            assert error <= OUT_BOUNDS[out_format]
        event(f"format: {case.format}")
        event(f"out: {out_format}")
        event(f"shared: {bool(groups)}")
        event(f"drafts: {case.drafts}, window: {case.window is not None}")
        event(f"features: {min(case.count_features(), 9)}")
        seen["all"] += 1
        seen["combined"] += case.count_features() >= 5
        seen["shared"] += bool(groups)
        seen["quantised"] += out_format != "model"

    equal()
    assert seen["combined"] >= seen["all"] / 2, seen
    assert min(seen["shared"], seen["quantised"]) >= seen["all"] / 10, seen


def test_everything_at_once():
    prove(EXAMPLES)
