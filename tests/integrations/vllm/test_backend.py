"""Builder and layers driven as vLLM drives them, against the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm` has an environment")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheLayout

from pageant.integrations.vllm.backend import PageantBackend
from pageant.integrations.vllm.builder import PageantBuilder
from pageant.integrations.vllm.cache import FORMATS
from pageant.integrations.vllm.impl import PageantImpl
from pageant.ops.attention import ragged_attention
from pageant.types import ArgumentError, Layer
from tests.integrations.vllm.scene import BATCHES, HKV, HQ, PAGE, D, Scene, config


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


@pytest.mark.parametrize("lens", [[5, 1, 30], [7], [4, 0, 3, 0]])
def test_encoders_see_all_of_their_request(lens: list[int]) -> None:
    spec = EncoderOnlyAttentionSpec(
        block_size=PAGE, num_kv_heads=HKV, head_size=D, dtype=torch.float32
    )
    builder = PageantBuilder(spec, ["l0"], config(), torch.device("cpu"))
    impl = PageantImpl(HQ, D, 0.3, HKV, None, None, "auto", 5.0, "encoder_only")
    for step in range(2):
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        tokens = int(starts[-1])
        common = SimpleNamespace(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            max_query_len=max(lens),
            num_actual_tokens=tokens + 2,
        )
        metadata = builder.build(0, common)
        q, k, v = (torch.randn(tokens + 2, heads, D) for heads in (HQ, HKV, HKV))
        impl.do_kv_cache_update(None, k, v, torch.tensor([]), torch.zeros(tokens))
        for scale in (1.0, -1.0):  # as if in two layers
            out = torch.full((tokens + 2, HQ * D), 7.0)
            impl.forward(None, scale * q, k, v, torch.tensor([]), metadata, out)
            want = ragged_attention(
                scale * q[:tokens], k[:tokens], v[:tokens], starts, starts, causal=False,
                layer=Layer(scale=0.3, soft_cap=5.0), kernels="reference",
            )  # fmt: skip
            got = out[:tokens].view_as(want)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            assert (out[tokens:] == 7.0).all(), f"padding of step {step} was written"


def test_other_kinds_of_attention_are_one_clear_error() -> None:
    for arguments, message in (
        ((None, None, "auto", None, "encoder"), "attn_type is 'encoder'; allowed: decoder, encod"),
        ((None, 9, "auto", None, "encoder_only"), "sliding_window is 'given'; allowed: None for"),
        (([0.5] * HQ, None, "auto", None, "encoder_only"), "alibi_slopes is 'given'; allowed: No"),
    ):
        with pytest.raises(ArgumentError, match=message):
            PageantImpl(HQ, D, 0.3, HKV, *arguments)


ORDERS = [
    [("decode", 1), ("prefill", 9), ("decode", 1)],
    [("prefill", 5), ("decode", 1)],
    [("prefill", 1), ("long", 8), ("short", 1), ("decode", 1)],
    [("decode", 4), ("decode", 1), ("short", 3), ("prefill", 2)],
    [("long", 9), ("long", 7)],
    [("short", 1), ("decode", 4), ("decode", 1)],
    [("prefill", 3), ("prefill", 1), ("decode", 1), ("decode", 2), ("long", 5)],
]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_what_vllm_puts_first_decodes(
    monkeypatch: pytest.MonkeyPatch, order: list[tuple[str, int]], drafts: int
) -> None:
    """vLLM orders requests by our threshold; then our plan finds those that decode in front."""
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    scene = Scene(monkeypatch, speculative=speculative if drafts else None)
    threshold = scene.builder.reorder_batch_threshold
    assert threshold == 1 + drafts
    names, new = [f"r{i}" for i in range(len(order))], [m for _, m in order]
    cached = [0 if kind == "prefill" else 20 for kind, _ in order]
    batch = SimpleNamespace(
        req_ids=names,
        num_computed_tokens_cpu=np.array(cached),
        num_prompt_tokens=np.array([20 if kind == "decode" else 60 for kind, _ in order]),
    )
    place = list(range(len(order)))

    def swap(one: int, other: int) -> None:
        place[one], place[other] = place[other], place[one]

    batch.swap_states = swap
    scheduled = SimpleNamespace(num_scheduled_tokens=dict(zip(names, new, strict=True)))
    reorder_batch_to_split_decodes_and_prefills(batch, scheduled, threshold)
    new, cached = [new[i] for i in place], [cached[i] for i in place]
    total = [m + n for m, n in zip(new, cached, strict=True)]
    metadata = scene.builder.build(0, scene.common((new, total)))
    front = sum(m <= threshold and n > 0 for m, n in zip(new, cached, strict=True))
    short = [m <= threshold for m in new]
    first_long = short.index(False) if False in short else len(short)
    assert metadata.num_decodes == first_long >= front
    assert metadata.num_decode_tokens == sum(new[:first_long])
    assert metadata.num_prefill_tokens == sum(new[first_long:])


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
    for more in (
        {},
        {"head_size": 72},
        {"block_size": 7},
        {"kv_cache_dtype": "nvfp4_4over6"},
        {"attn_type": "encoder_only"},
    ):
        assert PageantBackend.validate_configuration(**asked | more) == []
    for more, word in (
        ({"head_size": 20}, "head_size"),
        ({"use_mla": True}, "MLA"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "kv_cache_dtype"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder"),
    ):
        reasons = PageantBackend.validate_configuration(**asked | more)
        assert any(word in reason for reason in reasons)
