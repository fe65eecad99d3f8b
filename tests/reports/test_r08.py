"""R8: options were accepted and ignored, or something slower was put in their place silently.

`supports` says yes exactly when an Attention can be built, gives the reason it is refused with, and
a yes means that it runs.
"""

from itertools import product

import pytest
import torch

import pageant
from pageant import CacheSpec, ContextParallel, Features, Options, Shape
from pageant.device import FAMILIES
from tests.reports.scene import KERNELS


def shape(**others):
    fields = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}
    return Shape(**{**fields, **others})


SHAPES = (
    shape(),
    shape(dtype=torch.bfloat16),
    shape(dtype=torch.float64),
    shape(head_dim=512, v_head_dim=16),
    shape(head_dim=20),
    shape(head_dim=8),
    shape(head_dim=520),
    shape(v_head_dim=17),
    shape(num_q_heads=5),
    shape(num_q_heads=0),
    shape(num_kv_heads=0),
)
CACHES = (
    CacheSpec(),
    CacheSpec(format="fp8"),
    CacheSpec(format="fp8_e5m2", page_size=1),
    CacheSpec(format="bf16", page_size=528, layout="BHLNC"),
    CacheSpec(format="nvfp4"),
    CacheSpec(format="int8"),
    CacheSpec(format="fp7"),
    CacheSpec(page_size=0),
    CacheSpec(layout="NHD"),
)
FEATURES = (
    Features(),
    Features(windows=(4, None), soft_cap=True, sinks=True, alibi=True, lse=True),
    Features(draft_masks=True, non_causal=True),
    Features(windows=()),
    Features(windows=(0,)),
    Features(out_formats=("fp8_e4m3",)),
    Features(out_formats=("fp6",)),
)
OPTIONS = (
    Options(),
    Options(kernels="reference"),
    Options(kernels="pageant", speculative_tokens=3, plan_slots=2),
    Options(kernels="cpu.decode"),
    Options(kernels="flashinfer"),
    Options(kernels="magic"),
    Options(invariant=True),
    Options(quantize_query=False),
    Options(debug_splits=2),
    Options(debug_splits=0),
    Options(speculative_tokens=-1),
    Options(plan_slots=0),
    Options(context_parallel=ContextParallel(rank=0, world=2)),
    Options(context_parallel=ContextParallel(rank=2, world=2)),
)


def built(*config):
    """The Attention, or the error that refuses it."""
    try:
        return pageant.Attention(
            config[0], config[1], pageant.Limits(max_requests=4, max_tokens=16), *config[2:], "cpu"
        )
    except pageant.ArgumentError as error:
        return error


def agree(*config):
    answer, attn = pageant.supports(*config, "cpu"), built(*config)
    assert bool(answer) == isinstance(attn, pageant.Attention)
    if not answer:
        assert (answer.reason, answer.argument) == (str(attn), attn.argument)
        assert answer.reason
        assert answer.argument
    return answer, attn


def test_supports_is_what_construction_does():
    answers = [bool(agree(*config)[0]) for config in product(SHAPES, CACHES, FEATURES, OPTIONS)]
    assert 100 < sum(answers) < len(answers) / 2


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        ({"shape": shape(dtype=torch.float64)}, "dtype"),
        ({"shape": shape(head_dim=20)}, "head_dim"),
        ({"shape": shape(v_head_dim=17)}, "head_dim"),
        ({"shape": shape(num_q_heads=5)}, "q_heads"),
        ({"cache": CacheSpec(format="fp7")}, "cache"),
        ({"cache": CacheSpec(format="int8", v_scale_order="swizzled")}, "v_scale_order"),
        ({"cache": CacheSpec(page_size=0)}, "page_size"),
        ({"cache": CacheSpec(page_size=2.0)}, "page_size"),
        ({"cache": CacheSpec(layout="NHD")}, "layout"),
        ({"features": Features(windows=(0,))}, "window"),
        ({"features": Features(soft_cap=30.0)}, "soft_cap"),
        ({"features": Features(out_formats=("fp6",))}, "out_formats"),
        ({"options": Options(kernels="magic")}, "kernels"),
        ({"options": Options(plan_slots=0)}, "plan_slots"),
    ],
)
def test_the_argument_in_the_way_is_named(config, argument):
    asked = {
        "shape": shape(),
        "cache": CacheSpec(),
        "features": Features(),
        "options": Options(),
        **config,
    }
    answer, _ = agree(*asked.values())
    assert answer.argument == argument


@pytest.mark.parametrize("kernels", [*KERNELS, "pageant"])
@pytest.mark.parametrize("features", FEATURES[:3])
@pytest.mark.parametrize("cache", CACHES[:4])
def test_a_yes_runs(cache, features, kernels):
    for model in (shape(), shape(dtype=torch.bfloat16), shape(head_dim=512, v_head_dim=16)):
        answer, attn = agree(model, cache, features, Options(kernels=kernels))
        assert answer
        kv = attn.new_cache(num_layers=1, num_pages=12)
        batch = pageant.Batch.from_lengths(
            [1, 3], [5, 3], [range(5), range(5, 10)], cache.page_size
        )
        plan = attn.plan(batch)
        rows = torch.ones(4, 2, 512, dtype=model.dtype)
        attn.write(plan, kv[0], rows[..., : model.head_dim], rows[..., : model.value_dim])
        q = torch.zeros(4, 4, model.head_dim, dtype=model.dtype)
        for window in features.windows:
            out = attn.run(plan, q, kv[0], pageant.Layer(window=window))
            assert out.dtype == model.dtype
            # The first request's four cached keys are zero: its mean is 1/5, or less is in sight.
            first = 1 / 5 if window is None else 1 / min(window, 5)
            torch.testing.assert_close(out[0], torch.full_like(out[0], first), rtol=4e-3, atol=0)
            assert (out[1:] == 1).all()


@pytest.mark.parametrize("device", [*FAMILIES, "90", "cpu"])
def test_any_family_answers_without_hardware(device):
    for config in product(SHAPES, CACHES, FEATURES[:3], OPTIONS[:3]):
        answer = pageant.supports(*config, device)
        assert (answer.reason is None) == answer.ok
        assert (answer.argument is None) == answer.ok


@pytest.mark.parametrize("device", ["sm74", "99", "quantum", "meta"])
def test_devices_that_are_none(device):
    answer = pageant.supports(shape(), device=device)
    assert not answer
    assert answer.reason


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_named_row_runs_or_raises(phase):
    attn = pageant.Attention(shape(), options=Options(kernels="reference.attention"))
    assert attn.explain().rows[phase].name == "reference.attention"
    attn = pageant.Attention(shape(), options=Options(kernels=f"cpu.{phase}"))
    assert attn.explain().rows[phase].name == f"cpu.{phase}"


def test_auto_is_the_fast_kernel():
    rows = pageant.Attention(shape()).explain().rows
    assert {row.owner for row in rows.values()} == {"pageant"}
