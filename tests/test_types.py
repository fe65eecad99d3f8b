"""The declared values: defaults, what follows from them, and the one form of errors."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from pageant import CacheSpec, ContextParallel, Features, Layer, Limits, Options, Shape, Support
from pageant.types import ArgumentError, bad


def test_sizes_that_follow():
    shape = Shape(num_q_heads=12, num_kv_heads=4, head_dim=64)
    assert (shape.value_dim, shape.group_size, shape.dtype) == (64, 3, torch.bfloat16)
    assert Shape(num_q_heads=1, num_kv_heads=1, head_dim=64, v_head_dim=32).value_dim == 32


@pytest.mark.parametrize("kind", [CacheSpec, Limits, Layer, Features, Options])
def test_everything_is_optional_named_and_frozen(kind):
    value = kind()
    field = next(iter(kind.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, 1)
    with pytest.raises(TypeError):
        kind(1)


def test_features_of_layers():
    layers = [
        Layer(window=4),
        Layer(window=None, sinks=torch.zeros(2)),
        Layer(window=4, alibi_slopes=torch.zeros(2)),
        Layer(soft_cap=1.0, out_format="fp8_e4m3"),
    ]
    assert Features.of(layers, lse=True) == Features(
        windows=(4, None),
        soft_cap=True,
        sinks=True,
        alibi=True,
        lse=True,
        out_formats=("model", "fp8_e4m3"),
    )
    assert Features.of([]) == Features.of([Layer()]) == Features()
    assert Features.of(layer for layer in layers[:1]).windows == (4,)


def test_world():
    assert Options().world == 1
    assert Options(context_parallel=ContextParallel(rank=1, world=4)).world == 4


def test_support_is_true_or_false():
    assert Support(True)
    assert not Support(False, "because", "sm")


def test_errors_have_one_form():
    error = bad("page_size", "16", "a whole number")
    assert isinstance(error, ArgumentError)
    assert isinstance(error, ValueError)
    assert str(error) == "page_size is '16'; allowed: a whole number"
    assert error.argument == "page_size"


@pytest.mark.parametrize("layers", [5, None, [None], [Layer(), 5], "ab"])
def test_features_of_what_is_no_layer(layers):
    with pytest.raises(ArgumentError, match=r"pageant\.Layer") as caught:
        Features.of(layers)
    assert caught.value.argument == "layers"
