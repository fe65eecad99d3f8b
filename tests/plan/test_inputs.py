"""What write and run are given: a mistake in it is an error that names it, never a wrong number."""

import math

import pytest
import torch

import pageant
from pageant import Layer

BATCH = pageant.Batch.from_lengths([1], [3], [[0]], page_size=4)
ROW = torch.ones(1, 1, 16)


def attention(format="auto", **features):
    return pageant.Attention(
        pageant.Shape(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        pageant.CacheSpec(format=format, page_size=4),
        pageant.Limits(max_requests=4, max_tokens=16),
        pageant.Features(**features),
    )


def run(attn, layer):
    cache = attn.new_cache(num_layers=1, num_pages=2)[0]
    return attn.run(attn.plan(BATCH), torch.ones(1, 2, 16), cache, layer)


@pytest.mark.parametrize(("declared", "field"), [("sinks", "sinks"), ("alibi", "alibi_slopes")])
def test_numbers_a_head_that_require_grad(declared, field):
    attn = attention(**{declared: True})
    learned = torch.zeros(2, requires_grad=True)
    with pytest.raises(pageant.ArgumentError, match="grad") as caught:
        run(attn, Layer(**{field: learned}))
    assert caught.value.argument == f"layer.{field}"
    assert not run(attn, Layer(**{field: learned.detach()})).requires_grad


@pytest.mark.parametrize("cap", [math.inf, math.nan, 0.0, -1.0, 1e39, 1e-46])
def test_a_cap_that_is_no_cap(cap):
    attn = attention(soft_cap=True)
    with pytest.raises(pageant.ArgumentError, match="from 1e-37 to 1e37") as caught:
        run(attn, Layer(soft_cap=cap))
    assert caught.value.argument == "layer.soft_cap"
    assert torch.isfinite(run(attn, Layer(soft_cap=1e30))).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [torch.ones(2), torch.ones(0), torch.ones(1, 2)])
@pytest.mark.parametrize("format", ["fp8_e4m3", "auto"])
def test_writing_with_scales_of_several_elements(name, scale, format):
    attn = attention(format)
    kv = attn.new_cache(num_layers=1, num_pages=2)
    plan = attn.plan(BATCH)
    with pytest.raises(pageant.ArgumentError, match="one element") as caught:
        attn.write(plan, kv[0], ROW, ROW, Layer(**{name: scale}))
    assert caught.value.argument == f"layer.{name}"
    assert not kv.storage.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", math.inf),
        ("scale", math.nan),
        ("scale", "0.1"),
        ("soft_cap", "30"),
        ("soft_cap", True),
        ("window", True),
        ("window", 1.0),
        ("k_scale", 0.0),
        ("k_scale", -1.0),
        ("v_scale", math.nan),
        ("v_scale", "1"),
        ("v_scale", None),
        ("sinks", torch.zeros(2, device="meta")),
        ("sinks", [0.0, 0.0]),
    ],
)
def test_values_that_are_none(field, value):
    attn = attention("fp8_e4m3", windows=(None, 1), soft_cap=True, sinks=True)
    with pytest.raises(pageant.ArgumentError, match=r"allowed: ") as caught:
        run(attn, Layer(**{field: value}))
    assert caught.value.argument == f"layer.{field}"


def test_a_plan_of_another_attention():
    ours, other = attention(), attention()
    kv, plan = ours.new_cache(num_layers=1, num_pages=2), other.plan(BATCH)
    for use in (
        lambda: ours.run(plan, torch.ones(1, 2, 16), kv[0]),
        lambda: ours.write(plan, kv[0], ROW, ROW),
        lambda: ours.update(plan),
    ):
        with pytest.raises(pageant.ArgumentError, match="another Attention's") as caught:
            use()
        assert caught.value.argument == "plan"


@pytest.mark.parametrize(
    "change", [lambda k, v: (k.half(), v), lambda k, v: (k, v[:1]), lambda k, v: (k, v.double())]
)
def test_pages_put_together_wrongly(change):
    attn = attention()
    kv = attn.new_cache(num_layers=1, num_pages=2)[0]
    wrong = pageant.LayerCache(*change(kv.k, kv.v), kv.format)
    with pytest.raises(pageant.ArgumentError) as caught:
        attn.run(attn.plan(BATCH), torch.ones(1, 2, 16), wrong)
    assert caught.value.argument == "cache"
