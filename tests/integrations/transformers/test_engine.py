"""Models of several families with random weights: packed, paged and chunked equals eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pageant.api import Attention
from pageant.integrations.transformers import Step, layers_of
from pageant.plan.batch import Batch
from pageant.types import ArgumentError, CacheSpec, Features, Limits, Shape
from tests.integrations.transformers.models import CONFIGS, WINDOWS, make

PAGE_SIZE = 4


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_say_what_the_model_needs(family: str) -> None:
    model = make(CONFIGS[family])
    shape, layers = layers_of(model)
    assert shape == Shape(
        num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, dtype=torch.float32
    )
    assert [layer.window for layer in layers] == WINDOWS[family]
    assert {layer.soft_cap for layer in layers} == {2.0 if family == "gemma2" else None}
    assert {layer.scale for layer in layers} == {1 / 3 if family.startswith("gemma") else 1 / 4}
    for index, layer in enumerate(layers):
        if family == "gpt_oss":
            assert layer.sinks is not None
            torch.testing.assert_close(layer.sinks, model.model.layers[index].self_attn.sinks.data)
        else:
            assert layer.sinks is None


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_paged_equals_eager(family: str) -> None:
    """Two requests of 30 and 21 tokens, in three steps: prefills, a mixed step, decodes."""
    model = make(CONFIGS[family])
    tokens = [torch.randint(96, (length,)) for length in (30, 21)]
    expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens]

    shape, layers = layers_of(model)
    attention = Attention(
        shape=shape,
        cache=CacheSpec(page_size=PAGE_SIZE),
        limits=Limits(max_requests=2, max_tokens=64, max_seq_len=32),
        features=Features.of(layers),
        device="cpu",
    )
    cache = attention.new_cache(num_layers=len(layers), num_pages=16)
    tables = [[9, 3, 5, 0, 12, 1, 7, 2], [4, 8, 6, 10, 11, 13]]
    done = [0, 0]
    for counts in ({0: 13, 1: 19}, {1: 1, 0: 16}, {0: 1, 1: 1}):
        ids = [tokens[r][done[r] : done[r] + count] for r, count in counts.items()]
        positions = [torch.arange(done[r], done[r] + count) for r, count in counts.items()]
        plan = attention.plan(
            Batch.from_lengths(
                list(counts.values()),
                [done[r] + count for r, count in counts.items()],
                [tables[r] for r in counts],
                page_size=PAGE_SIZE,
            )
        )
        logits = model(
            input_ids=torch.cat(ids)[None],
            position_ids=torch.cat(positions)[None],
            use_cache=False,
            pageant_step=Step(attention, plan, cache, layers),
        ).logits[0]
        rows = [expected[r][done[r] : done[r] + count] for r, count in counts.items()]
        torch.testing.assert_close(logits, torch.cat(rows), atol=1e-3, rtol=1e-4)
        done = [done[r] + counts.get(r, 0) for r in range(2)]
    assert done == [30, 21]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer types"),
    ],
)
def test_what_would_be_wrong_is_refused(change: dict[str, Any], reason: str) -> None:
    model = make(CONFIGS["llama"])
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ArgumentError, match=reason):
        layers_of(model)


def test_layers_of_several_shapes_are_refused() -> None:
    model = make(CONFIGS["llama"])
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(64, 16, bias=False)
    attention.v_proj = torch.nn.Linear(64, 16, bias=False)
    with pytest.raises(ArgumentError, match="same heads"):
        layers_of(model)


@torch.inference_mode()
def test_a_model_of_the_engine_also_runs_without_it() -> None:
    model = make(CONFIGS["llama"])
    ids = torch.randint(96, (1, 13))
    expected = model(input_ids=ids).logits
    layers_of(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-3, rtol=1e-4)
