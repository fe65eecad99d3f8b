"""R28: owners of older or consumer devices got no backend, a crash, or a closed binary's refusal.

One table serves every family from compute capability 7.5 on, and the CPU: each configuration is
served, or refused with a reason before any work. Turing has no bfloat16, so none is asked there.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

import pageant
from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES, Device
from pageant.select.explain import explain
from pageant.select.row import PHASES
from pageant.select.rows import ROWS
from tests.inputs import Case, build
from tests.reports.scene import each_dtype

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FEATURES = (
    pageant.Features(),
    pageant.Features(windows=(128, None), soft_cap=True, sinks=True, alibi=True, lse=True),
    pageant.Features(draft_masks=True, non_causal=True, out_formats=("model", "fp8_e4m3")),
)
KERNELS = ("auto", "pageant", "flashinfer", "reference", "triton.decode", "cpu.prefill")
each_family = pytest.mark.parametrize("family", FAMILIES)


def configs(kernels=KERNELS):
    axes = (DTYPES, ("auto", *FORMATS), FEATURES, kernels, (64, 192, 512))
    for dtype, format, features, name, dim in product(*axes):
        shape = pageant.Shape(num_q_heads=8, num_kv_heads=2, head_dim=dim, dtype=dtype)
        options = pageant.Options(kernels=name)
        yield shape, pageant.CacheSpec(format=format), features, options


def all_built(row):
    """As if every row's kernel existed and its packages were installed."""


@each_family
def test_served_or_refused_with_a_reason(family):
    verdicts = []
    for config in configs():
        verdict = pageant.supports(*config, family)
        assert verdict.ok == (verdict.reason is None) == (verdict.argument is None)
        assert verdict.ok or "; would run " in verdict.reason
        verdicts.append(verdict.ok)
    assert any(verdicts)
    assert not all(verdicts)


@each_family
def test_auto_serves_everything(family):
    for config in configs(("auto",)):
        assert pageant.supports(*config, family), config
        assert set(explain(*config, family).rows) == set(PHASES)


@each_family
def test_own_kernels_are_the_same_everywhere(family):
    """Once built, our kernels serve every format and feature on every family alike."""
    for config in configs(("pageant",)):
        shape = config[0]
        answer = explain(*config, family, missing=all_built)
        refused = family == "sm75" and shape.dtype == torch.bfloat16
        quantised = FORMATS.get(config[1].format)
        if shape.dtype == torch.float32 and family != "cpu" and quantised is not None:
            refused = quantised.quantized
        refused |= family == "sm75" and max(shape.head_dim, shape.value_dim) > 256
        if refused:
            assert answer.support.argument in ("dtype", "cache", "head_dim"), config
        else:
            assert answer.support.ok, answer.support
            assert {row.owner for row in answer.rows.values()} == {"pageant"}


def test_turing_is_never_asked_for_bfloat16():
    rows = [row for row in ROWS if "sm75" in row.families and row.owner != "reference"]
    assert {phase for row in rows for phase in row.phases} == set(PHASES)
    assert all("bfloat16" not in row.dtypes for row in rows)
    for config in configs(("auto", "pageant")):
        answer = explain(*config, "sm75", missing=all_built)
        if config[0].dtype == torch.bfloat16:
            assert not answer.support.ok or {r.owner for r in answer.rows.values()} == {"reference"}
        elif answer.support.ok:
            assert "bfloat16" not in answer.query_dtypes.values()
    verdict = explain(*next(iter(configs(("pageant",)))), "sm75", missing=all_built).support
    assert verdict.ok
    bf16 = pageant.Shape(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    options = pageant.Options(kernels="pageant")
    verdict = pageant.supports(bf16, options=options, device="sm75")
    assert verdict.argument == "dtype"
    assert "bfloat16" in verdict.reason
    assert pageant.supports(replace(bf16, dtype=torch.float16), device="sm75").ok


@each_family
def test_construction_says_the_same(family, monkeypatch):
    """The processor stands in for the device: refusals need no work there."""
    monkeypatch.setattr(Device, "detect", lambda device: FAMILIES[family])
    limits = pageant.Limits(max_requests=2, max_tokens=4, max_seq_len=32)
    for shape, cache, features, options in configs(("auto", "flashinfer")):
        verdict = pageant.supports(shape, cache, features, options, family)
        if verdict.ok:
            pageant.Attention(shape, cache, limits, features, options)
            continue
        with pytest.raises(pageant.ArgumentError) as caught:
            pageant.Attention(shape, cache, limits, features, options)
        assert (str(caught.value), caught.value.argument) == (verdict.reason, verdict.argument)


@each_dtype
@pytest.mark.parametrize("format", FORMATS)
def test_the_cpu_runs_what_it_serves(dtype, format):
    case = Case(
        seed=28,
        dtype=dtype,
        group=3,
        head_dim=64,
        v_head_dim=64,
        format=format,
        page_size=16,
        lengths=((1, 70), (3, 20), (9, 33)),
        window=30,
        soft_cap=2.0,
        alibi=True,
        sinks=True,
        speculative=2,
    )
    build(case).check()
