"""The prefill wrappers and single prefill against the definition, custom masks among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pageant.integrations import flashinfer
from tests.integrations.flashinfer.scene import (
    LAYOUTS,
    Scene,
    assert_near,
    attend,
    i32,
    workspace,
)

LENGTHS = ((3, 9), (0, 5), (2, 0), (5, 5), (1, 17), (4, 2))


def prefill(scene: Scene, cache: Any, layout: str = "NHD", **options: Any) -> Any:
    run = options.pop("run", {})
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
    scene.plan_prefill(wrapper, **options)
    return wrapper.run(scene.q, cache, return_lse=True, **run)


def ragged(scene: Scene, **options: Any) -> Any:
    run = options.pop("run", ())
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    starts = i32(0, *torch.tensor([n for _, n in scene.lengths]).cumsum(0).tolist())
    options = {"q_data_type": scene.dtype, "head_dim_vo": scene.value_dim, **options}
    wrapper.plan(scene.qo_indptr, starts, *scene.heads, **options)
    keys, values = torch.cat(scene.keys), torch.cat(scene.values)
    return wrapper.run(scene.q, keys, values, *run, return_lse=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["tuple", "5-D", "strided"])
@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_every_form_of_cache(layout: str, form: str, page_size: int, causal: bool) -> None:
    scene = Scene(LENGTHS, page_size=page_size)
    got = prefill(scene, scene.cache(layout, form), layout, causal=causal)
    assert_near(got, scene.expected(causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window_left", [0, 2, 40])
def test_windows_limit_the_left_side_alone(causal: bool, window_left: int) -> None:
    scene = Scene(LENGTHS)
    options = {"causal": causal, "window_left": window_left}
    assert_near(prefill(scene, scene.cache(), **options), scene.expected(**options))
    assert_near(ragged(scene, **options), scene.expected(**options))


def test_options_together_on_both_wrappers() -> None:
    scene = Scene(LENGTHS, q_heads=6, kv_heads=2, dim=64, value_dim=32)
    options: dict[str, Any] = {"causal": True, "logits_soft_cap": 5.0, "sm_scale": 0.3}
    want = scene.expected(cap=5.0, scale=0.3)
    assert_near(prefill(scene, scene.cache(), **options), want)
    assert_near(ragged(scene, **options), want)


def test_rows_without_visible_keys_are_zero_and_minus_infinity() -> None:
    scene = Scene(((4, 2), (2, 0)))
    out, lse = prefill(scene, scene.cache(), causal=True)
    assert (out[[0, 1, 4, 5]] == 0).all()
    assert (lse[[0, 1, 4, 5]] == -torch.inf).all()
    assert_near((out, lse), scene.expected())


def test_alibi() -> None:
    scene = Scene(LENGTHS, q_heads=2, kv_heads=2)
    options = {"pos_encoding_mode": "ALIBI", "causal": True}
    want = scene.expected(slopes=torch.tensor([2**-4, 2**-8]))
    assert_near(prefill(scene, scene.cache(), **options), want)
    assert_near(ragged(scene, **options), want)


def random_masks(scene: Scene, *, sees_older: bool) -> list[torch.Tensor]:
    masks = []
    for m, n in scene.lengths:
        mask = torch.rand(m, n, generator=scene.rng) < 0.5
        if sees_older:
            mask[:, : max(0, n - m)] = True
        masks.append(mask)
    return masks


@pytest.mark.parametrize("sees_older", [True, False])
@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["tuple", "5-D"])
def test_custom_masks(sees_older: bool, window_left: int, layout: str, form: str) -> None:
    scene = Scene(LENGTHS, page_size=3)
    masks = random_masks(scene, sees_older=sees_older)
    flat = torch.cat([mask.flatten() for mask in masks])
    options = {"custom_mask": flat, "window_left": window_left, "causal": True}
    got = prefill(scene, scene.cache(layout, form), layout, **options)
    assert_near(got, scene.expected(masks=masks, window_left=window_left))
    assert_near(ragged(scene, **options), scene.expected(masks=masks, window_left=window_left))


@pytest.mark.parametrize("sees_older", [True, False])
def test_packed_masks_equal_plain_ones(sees_older: bool) -> None:
    scene = Scene(LENGTHS)
    masks = random_masks(scene, sees_older=sees_older)
    flat = torch.cat([mask.flatten() for mask in masks])
    starts = i32(0, *torch.tensor([mask.numel() for mask in masks]).cumsum(0).tolist())
    packed, _ = flashinfer.segment_packbits(flat, starts, bitorder="little")
    got = prefill(scene, scene.cache(), packed_custom_mask=packed)
    assert_near(got, scene.expected(masks=masks))


def test_a_mask_of_draft_tokens_runs_as_one_and_others_row_by_row() -> None:
    for sees_older, requests in ((True, 6), (False, 15)):
        scene = Scene(LENGTHS)
        flat = torch.cat([m.flatten() for m in random_masks(scene, sees_older=sees_older)])
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
        scene.plan_prefill(wrapper, custom_mask=flat)
        wrapper.run(scene.q, scene.cache())
        assert wrapper.step is not None
        assert wrapper.step.plan is not None
        assert wrapper.step.plan.batch.num_requests == requests


def test_masks_of_a_wrong_size_and_masks_with_alibi_are_refused() -> None:
    scene = Scene(LENGTHS)
    with pytest.raises(ValueError, match="custom_mask"):
        prefill(scene, scene.cache(), custom_mask=torch.ones(5).bool())
    flat = torch.cat([m.flatten() for m in random_masks(scene, sees_older=False)])
    with pytest.raises(NotImplementedError, match="ALiBi"):
        prefill(scene, scene.cache(), custom_mask=flat, pos_encoding_mode="ALIBI")


def test_the_number_of_tokens_must_be_as_planned() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    scene.plan_prefill(wrapper)
    with pytest.raises(ValueError, match="qo_indptr"):
        wrapper.run(scene.q[:-1], scene.cache())
    with pytest.raises(ValueError, match="requests"):
        wrapper.plan(i32(0, 4), scene.indptr, scene.indices, scene.last, *scene.heads, 4)


@pytest.mark.parametrize("masked", [False, True])
def test_graph_buffers(masked: bool) -> None:
    first, second = Scene(((3, 9), (5, 6))), Scene(((1, 4), (6, 8)), seed=4)
    buffers = i32(0, 0, 0), i32(0, 0, 0), i32(*[0] * 9), i32(0, 0)
    mask_buffers = (torch.zeros(64).bool(), i32(0, 0, 0)) if masked else (None, None)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), "NHD", True, *buffers, *mask_buffers
    )
    addresses = set()
    for scene in (first, second, first):
        options: dict[str, Any] = {"causal": True}
        masks = [None, None]
        if masked:
            masks = random_masks(scene, sees_older=False)
            options = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
        scene.plan_prefill(wrapper, **options)
        assert torch.equal(buffers[0], scene.qo_indptr)
        q = torch.zeros(8, 4, 32)
        q[: len(scene.q)] = scene.q
        out, lse = wrapper.run(q, scene.cache(), return_lse=True)
        rows = slice(0, len(scene.q))
        assert_near((out[rows], lse[rows]), scene.expected(masks=masks))
        assert wrapper.step is not None
        assert wrapper.step.plan is not None
        addresses.add(wrapper.step.plan.batch.page_table.data_ptr())
    assert len(addresses) == 1
    with pytest.raises(ValueError, match="first planned"):
        Scene(((4, 9), (5, 6))).plan_prefill(wrapper)


def test_fp8_per_head_scales() -> None:
    scene = Scene(LENGTHS, dtype=torch.float16)
    fp8 = torch.float8_e4m3fn
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25]), torch.tensor([2.0, 0.5]), torch.tensor([3.0, 0.5])
    cache = tuple(x.to(fp8) for x in scene.cache())
    q, scene.q = scene.q.to(fp8), scene.q.to(fp8).float() * scales[0][:, None]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    scene.plan_prefill(
        wrapper, q_data_type=fp8, kv_data_type=fp8, o_data_type=torch.float16, causal=True
    )
    got = wrapper.run(q, cache, *scales, return_lse=True)
    scene.keys = [x.to(fp8).float() * scales[1][:, None] for x in scene.keys]
    scene.values = [x.to(fp8).float() * scales[2][:, None] for x in scene.values]
    assert got[0].dtype == torch.float16
    assert_near(got, scene.expected())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nvfp4_caches(layout: str) -> None:
    scene = Scene(LENGTHS, dtype=torch.float16)
    factors = (0.5, 2.0)
    pages, scales, sides = [], [], (scene.keys, scene.values)
    from pageant.ops import dequantize, quantize

    for rows, factor in zip(sides, factors, strict=True):
        stored = [quantize(x, "nvfp4", factor) for x in rows]
        codes, blocks = (scene.paged([pair[i] for pair in stored], 0) for i in (0, 1))
        axes = (
            (codes, blocks) if layout == "NHD" else (codes.transpose(1, 2), blocks.transpose(1, 2))
        )
        pages.append(axes[0].contiguous())
        scales.append(axes[1].contiguous())
        rows[:] = [dequantize(*pair, "nvfp4", factor) for pair in stored]
    run = {"k_scale": factors[0], "v_scale": factors[1], "kv_cache_sf": tuple(scales)}
    options: dict[str, Any] = {"kv_data_type": torch.uint8, "causal": True}
    got = prefill(scene, tuple(pages), layout, run=run, **options)
    assert_near(got, scene.expected())
    with pytest.raises(ValueError, match="kv_cache_sf"):
        prefill(scene, tuple(pages), layout, **options)
    run["kv_cache_sf"] = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in scales)
    with pytest.raises(ValueError, match="innermost stride"):
        prefill(scene, tuple(pages), layout, run=run, **options)


def test_sinks_by_the_attention_sink_variant() -> None:
    scene = Scene(LENGTHS)
    sinks = torch.tensor([0.0, 1.0, -2.0, 3.0])
    jit_args = ["uri", *[torch.float16] * 3, torch.int32, 32, 32, [], [], [], [], "AttentionSink"]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), jit_args=jit_args)
    scene.plan_prefill(wrapper, causal=True, sm_scale=9.0)
    got = wrapper.run(scene.q, scene.cache(), sinks, 0.2, return_lse=True)
    assert_near(got, scene.expected(sinks=sinks, scale=0.2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_single_prefill(layout: str, masked: bool) -> None:
    scene = Scene(((5, 11),), value_dim=16)
    k, v = scene.keys[0], scene.values[0]
    mask = torch.rand(5, 11, generator=scene.rng) < 0.5 if masked else None
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    got = flashinfer.single_prefill_with_kv_cache_return_lse(
        scene.q, *given, custom_mask=mask, causal=True, kv_layout=layout, v_scale=2.0
    )
    out, lse = attend(scene.q, k, v, mask=mask)
    assert_near(got, (out * 2.0, lse))


def rotate(x: torch.Tensor, first: int, scale: float, theta: float) -> torch.Tensor:
    """As complex numbers, in float64."""
    half = x.shape[-1] // 2
    position = torch.arange(first, first + x.shape[0], dtype=torch.float64) / scale
    angle = position[:, None] * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def test_rope_over_rows_of_keys() -> None:
    scene = Scene(((3, 9), (5, 5), (1, 4)))
    got = ragged(scene, causal=True, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=1e3)
    rows = [scene.q[a:b] for a, b in zip(scene.qo_indptr, scene.qo_indptr[1:], strict=False)]
    scene.q = torch.cat(
        [rotate(q, n - m, 2.0, 1e3) for q, (m, n) in zip(rows, scene.lengths, strict=True)]
    )
    scene.keys = [rotate(k, 0, 2.0, 1e3) for k in scene.keys]
    assert_near(got, scene.expected(), 1e-4)


def test_what_is_refused_says_why() -> None:
    scene = Scene(LENGTHS)
    with pytest.raises(NotImplementedError, match="multi-item"):
        prefill(scene, scene.cache(), prefix_len_ptr=i32(1))
    with pytest.raises(NotImplementedError, match="ROPE_LLAMA"):
        prefill(scene, scene.cache(), pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotImplementedError, match="v_indptr"):
        ragged(scene, v_indptr=i32(0))
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), use_cuda_graph=True)
