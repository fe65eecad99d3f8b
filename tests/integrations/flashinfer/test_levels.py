"""Cascades, POD, sinks as a wrapper and BatchAttention, against attention over all keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pageant.integrations import flashinfer
from tests.integrations.flashinfer.scene import LAYOUTS, Scene, assert_near, attend, i32, workspace


def two_levels(scene: Scene, shared: int) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Lists for plan, and what every request sees: `shared` keys of request 0, then its own."""
    pages = shared // scene.page_size
    lists = [
        [i32(0, len(scene.q)), scene.qo_indptr],
        [i32(0, pages), scene.indptr],
        [scene.indices[:pages], scene.indices],
        [i32(scene.page_size), scene.last],
    ]
    parts = []
    for a, b, k, v in zip(
        scene.qo_indptr[:-1], scene.qo_indptr[1:], scene.keys, scene.values, strict=True
    ):
        prefix = scene.keys[0][:shared], scene.values[0][:shared]
        both = torch.cat([prefix[0], k]), torch.cat([prefix[1], v])
        parts.append(attend(scene.q[a:b], *both, causal=True))
    outs, lses = zip(*parts, strict=True)
    return lists, (torch.cat(outs), torch.cat(lses))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_levels_equal_attention_over_both(layout: str) -> None:
    scene = Scene(((3, 9), (2, 6), (1, 5)))
    lists, want = two_levels(scene, shared=8)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), layout)
    wrapper.plan(*lists, *scene.heads, 4, causal=True, q_data_type=scene.dtype)
    assert_near(wrapper.run(scene.q, scene.cache(layout)), want[0])


def test_two_levels_with_graph_buffers() -> None:
    scene = Scene(((3, 9), (2, 6), (1, 5)))
    lists, want = two_levels(scene, shared=8)
    buffers = [[x.clone() for x in level] for level in lists]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD", True, *buffers)
    for _ in range(2):
        wrapper.plan(*lists, *scene.heads, 4, causal=True, q_data_type=scene.dtype)
        assert_near(wrapper.run(scene.q, scene.cache()), want[0])
    with pytest.raises(ValueError, match="buffer"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD", True)


def test_levels_refuse_what_needs_the_whole_sequence() -> None:
    scene = Scene(((3, 9), (2, 6), (1, 5)))
    lists, _ = two_levels(scene, shared=8)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    for options in ({"window_left": 4}, {"pos_encoding_mode": "ALIBI"}):
        with pytest.raises(NotImplementedError, match="levels"):
            wrapper.plan(*lists, *scene.heads, 4, **options)


def test_shared_prefix_wrappers() -> None:
    scene = Scene(((3, 9), (2, 6), (1, 5)), dtype=torch.float16)
    _, want = two_levels(scene, shared=8)
    prefix = scene.keys[0][:8], scene.values[0][:8]
    table = (scene.indptr, scene.indices, scene.last)
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(scene.qo_indptr, *table, *scene.heads, 4)
    got = wrapper.forward(scene.q, *prefix, scene.cache(), causal=True)
    assert_near(got, want[0])
    one = Scene(((1, 9), (1, 6)), dtype=torch.float16)
    _, want = two_levels(one, shared=4)
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace())
    decode.begin_forward(one.indptr, one.indices, one.last, *one.heads, 4)
    got = decode.forward(one.q, one.keys[0][:4], one.values[0][:4], one.cache())
    assert_near(got, want[0])


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_the_sink_wrapper(window_left: int, causal: bool) -> None:
    scene = Scene(((3, 9), (0, 4), (1, 12)))
    sinks = torch.tensor([0.0, 5.0, -2.0, 3.0])
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(), "NHD", backend="fa2", window_left=window_left
    )
    scene.plan_prefill(wrapper, causal=causal, sm_scale=9.0)
    got = wrapper.run(scene.q, scene.cache(), sinks, 0.2, v_scale=2.0, return_lse=True)
    out, lse = scene.expected(causal=causal, window_left=window_left, sinks=sinks, scale=0.2)
    assert_near(got, (out * 2.0, lse))
    with pytest.raises(ValueError, match="backend"):
        flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), backend="cudnn")


@pytest.mark.parametrize("causal", [True, False])
def test_batch_attention_always_returns_both(causal: bool) -> None:
    scene = Scene(((3, 9), (1, 0), (1, 12)))
    wrapper = flashinfer.BatchAttention(device="cpu")
    lens = i32(9, 0, 12)
    given = (*scene.heads, scene.dim, scene.page_size)
    options: dict[str, Any] = {"q_data_type": scene.dtype, "kv_data_type": scene.dtype}
    wrapper.plan(
        scene.qo_indptr,
        scene.indptr,
        scene.indices,
        lens,
        *given,
        causal,
        logits_soft_cap=4.0,
        **options,
    )
    got = wrapper.run(scene.q, scene.cache(), k_scale=0.5, v_scale=3.0, logits_soft_cap=4.0)
    out, lse = scene.expected(causal=causal, cap=4.0, scale=0.5 * 32**-0.5)
    assert_near(got, (out * 3.0, lse))
    with pytest.raises(ValueError, match="logits_soft_cap"):
        wrapper.run(scene.q, scene.cache())


def test_pod_runs_prefill_and_decode() -> None:
    scene, prompt = Scene(((1, 9), (1, 5))), Scene(((4, 7),), seed=1)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    scene.plan_decode(wrapper)
    first, second = wrapper.run(
        prompt.q,
        prompt.keys[0],
        prompt.values[0],
        scene.q,
        scene.cache(),
        causal_p=True,
        return_lse_p=True,
        return_lse_d=True,
    )
    assert_near(first, prompt.expected())
    assert_near(second, scene.expected())
    with pytest.raises(NotImplementedError, match="window_left_d"):
        wrapper.run(
            prompt.q, prompt.keys[0], prompt.values[0], scene.q, scene.cache(), window_left_d=3
        )


@pytest.mark.parametrize("masked", [False, True])
def test_batch_pod(masked: bool) -> None:
    prompts, scene = Scene(((4, 7), (2, 9))), Scene(((1, 9), (1, 5)), seed=2)
    mask = [torch.rand(m, n, generator=scene.rng) < 0.5 for m, n in prompts.lengths]
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    lists = [
        x
        for case in (prompts, scene)
        for x in (case.qo_indptr, case.indptr, case.indices, case.last)
    ]
    wrapper.plan(*lists, *scene.heads, 4, q_data_type=scene.dtype)
    first, second = wrapper.run(
        prompts.q,
        prompts.cache(),
        scene.q,
        scene.cache(),
        causal_p=True,
        return_lse=True,
        custom_mask_p=torch.cat([x.flatten() for x in mask]) if masked else None,
    )
    assert_near(first, prompts.expected(masks=mask) if masked else prompts.expected())
    assert_near(second, scene.expected())
