"""Builder and layers driven as vLLM drives them, against the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm` has an environment")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from pageant.integrations.vllm.backend import PageantBackend
from pageant.integrations.vllm.builder import PageantBuilder
from pageant.integrations.vllm.cache import FORMATS
from pageant.integrations.vllm.impl import PageantImpl
from pageant.types import Layer
from tests.integrations.vllm.scene import BATCHES, HKV, HQ, D, Scene


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
@pytest.mark.parametrize("cache", FORMATS)
def test_every_cache_type_in_every_layout(
    monkeypatch: pytest.MonkeyPatch, cache: str, layout: str
) -> None:
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(cache, torch.float32)
    scales = {"_k_scale": torch.tensor(0.5), "_v_scale": torch.tensor(2.0)}
    scene = Scene(monkeypatch, layout=layout, cache=cache, dtype=dtype, scales=scales)
    common = scene.common(BATCHES["mixed"])
    scene.fill(common)
    q, (out,) = scene.step(common)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        out.float(), scene.expected(common, q, Layer()), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("batch", BATCHES)
def test_layers_that_differ(monkeypatch: pytest.MonkeyPatch, batch: str) -> None:
    """A window, a cap and sinks, each in another layer of one group; padded or not."""
    sinks = torch.randn(HQ)
    layers = ({}, {"window": 9, "cap": 2.0}, {"sinks": sinks})
    ours = Layer(), Layer(window=9, soft_cap=2.0), Layer(sinks=sinks)
    scene = Scene(monkeypatch, *layers)
    for padding in (0, 3):
        common = scene.common(BATCHES[batch], padding)
        scene.fill(common)
        q, outs = scene.step(common)
        for out, layer in zip(outs, ours, strict=True):
            torch.testing.assert_close(out, scene.expected(common, q, layer), atol=1e-5, rtol=1e-5)


def test_scales_of_an_unquantised_cache_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_q_scale", "_k_scale", "_v_scale")
    scales = {name: torch.tensor(float(i)) for i, name in enumerate(names, 2)}
    plain, scaled = Scene(monkeypatch), Scene(monkeypatch, scales=scales)
    for scene in (plain, scaled):
        torch.manual_seed(0)
        scene.fill(scene.common(BATCHES["mixed"]))
        scene.out = scene.step(scene.common(BATCHES["mixed"]))[1][0]
    assert torch.equal(plain.out, scaled.out)


def test_non_causal_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    causal = torch.tensor([True, False, True, False])
    common = scene.common(BATCHES["mixed"]).replace(causal=causal)
    scene.fill(common)
    q, (out,) = scene.step(common)
    expected = scene.expected(common, q, Layer(), causal=causal)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_draft_step_reuses_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and slots advance in place; the metadata stays the same object."""
    scene = Scene(monkeypatch)
    common = scene.common(([1, 1], [17, 28]))
    scene.fill(common)
    metadata = scene.builder.build_for_drafting(common, 0)
    for _ in range(3):
        q, k, v = torch.randn(2, HQ, D), *torch.randn(2, 2, HKV, D)
        scene.write(k, v, common.slot_mapping)
        out = torch.empty(2, HQ * D)
        scene.impls[0].forward(scene.layer, q, k, v, scene.cache, metadata, out)
        expected = scene.expected(common, q, Layer())
        torch.testing.assert_close(out.view(2, HQ, D), expected, atol=1e-5, rtol=1e-5)
        common.seq_lens += 1
        common.slot_mapping += 1
        scene.builder.update_draft_decode_metadata(metadata)


def test_nothing_to_attend_while_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    out, q = torch.full((5, HQ * D), 7.0), torch.ones(5, HQ, D)
    scene.impls[0].forward(scene.layer, q, q, q, torch.tensor([]), None, out)
    assert (out == 0).all()


@pytest.mark.parametrize("fused", ["fp8", "nvfp4"])
def test_fused_output_quantisation(monkeypatch: pytest.MonkeyPatch, fused: str) -> None:
    scene = Scene(monkeypatch, fused=True)
    common = scene.common(BATCHES["mixed"])
    scene.fill(common)
    q, (plain,) = scene.step(common)
    metadata, scale = scene.builder.build(0, common), torch.tensor(0.25)
    args = (scene.layer, q, q[:, :HKV], q[:, :HKV], scene.cache, metadata)
    if fused == "fp8":
        out = torch.empty(len(q), HQ * D, dtype=torch.float8_e4m3fn)
        scene.impls[0].forward(*args, out, output_scale=scale)
        got = out.float() * scale
        torch.testing.assert_close(got.view_as(plain), plain, atol=0.05, rtol=0.07)
    else:
        out = torch.zeros(len(q), HQ * D // 2, dtype=torch.uint8)
        blocks = torch.zeros(128, HQ * D // 16 // 4, dtype=torch.int32)  # four scales a word
        scene.impls[0].forward(
            *args, out, output_scale=torch.tensor(4.0), output_block_scale=blocks
        )
        assert out.any()
        assert blocks.view(torch.uint8)[: len(q)].any()


def test_sinks_keep_their_address_when_weights_come_again() -> None:
    sinks = torch.nn.Parameter(torch.ones(HQ, dtype=torch.bfloat16), requires_grad=False)
    impl = PageantImpl(HQ, D, 1.0, HKV, sinks=sinks)
    held = impl.layer.sinks
    sinks.fill_(3.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.layer.sinks is held
    assert held.tolist() == [3.0] * HQ


def test_speculation_decides_what_counts_as_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Scene(monkeypatch).builder.reorder_batch_threshold == 1
    drafts = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    scene = Scene(monkeypatch, speculative=drafts)
    assert scene.builder.reorder_batch_threshold == 4
    metadata = scene.builder.build(0, scene.common(([4, 2, 5], [9, 9, 9])))
    counts = metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills
    assert (*counts, metadata.num_prefill_tokens) == (2, 6, 1, 5)
    support = PageantBuilder.get_cudagraph_support(scene.config, scene.spec)
    assert support is AttentionCGSupport.NEVER


def test_answers_come_with_a_reason() -> None:
    asked: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_non_causal": True,
        "use_batch_invariant": True,
        "use_dcp": True,
    }
    for more in ({}, {"head_size": 72}, {"block_size": 7}, {"kv_cache_dtype": "nvfp4_4over6"}):
        assert PageantBackend.validate_configuration(**asked | more) == []
    for more, word in (
        ({"head_size": 20}, "head_size"),
        ({"use_mla": True}, "MLA"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "kv_cache_dtype"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
    ):
        reasons = PageantBackend.validate_configuration(**asked | more)
        assert any(word in reason for reason in reasons)
