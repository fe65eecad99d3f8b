"""The calls without a wrapper: trtllm decode and prefill, XQA with drafts, quantised output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pageant.cache.out_scales import out_of_tiles
from pageant.integrations import flashinfer
from pageant.ops import dequantize
from pageant.plan.masks import pack_mask
from tests.integrations.flashinfer.scene import LAYOUTS, Scene, assert_near, i32, workspace


def tables(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    width = int(scene.indptr.diff().max()) + 2
    table = torch.full((len(scene.lengths), width), 10**6, dtype=torch.int32)
    for row, (a, b) in enumerate(zip(scene.indptr[:-1], scene.indptr[1:], strict=True)):
        table[row, : b - a] = scene.indices[a:b]
    return table, i32(*[n for _, n in scene.lengths])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_has_no_default_scale(layout: str) -> None:
    scene = Scene(((2, 9), (2, 3), (2, 15)))
    sinks, space = torch.tensor([0.0, 1.0, -1.0, 2.0]), workspace()
    for _ in range(2):
        got = flashinfer.trtllm_batch_decode_with_kv_cache(
            scene.q,
            scene.cache(layout),
            space,
            *tables(scene),
            15,
            0.3,
            2.0,
            5,
            sinks=sinks,
            kv_layout=layout,
            q_len_per_req=2,
            return_lse=True,
        )
        out, lse = scene.expected(scale=0.3, sinks=sinks, window_left=5)
        assert_near(got, (out * 2.0, lse))


def test_decode_of_requests_that_differ_in_length() -> None:
    scene = Scene(((2, 9), (1, 3), (0, 4), (3, 15)))
    got = flashinfer.trtllm_batch_decode_with_kv_cache(
        scene.q,
        scene.cache(),
        workspace(),
        *tables(scene),
        15,
        torch.tensor(0.3),
        kv_layout="NHD",
        q_len_per_req=None,
        max_q_len=3,
        cum_seq_lens_q=scene.qo_indptr,
    )
    assert_near(got, scene.expected(scale=0.3)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(causal: bool) -> None:
    scene = Scene(((4, 9), (3, 3)))
    got = flashinfer.trtllm_batch_context_with_kv_cache(
        scene.q,
        scene.cache("HND"),
        workspace(),
        *tables(scene),
        4,
        9,
        0.2,
        3.0,
        2,
        scene.qo_indptr,
        i32(0, 3, 4),
        causal=causal,
        return_lse=True,
    )
    out, lse = scene.expected(scale=0.2, causal=causal)
    assert_near(got, (out * 3.0, lse))


def random_drafts(scene: Scene) -> list[torch.Tensor]:
    return [torch.rand(m, m, generator=scene.rng) < 0.5 for m, _ in scene.lengths]


def whole_masks(scene: Scene, drafts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.cat([torch.ones(m, n - m).bool(), draft], 1)
        for (m, n), draft in zip(scene.lengths, drafts, strict=True)
    ]


@pytest.mark.parametrize("length", [2, 35])
def test_xqa_with_uniform_drafts(length: int) -> None:
    scene = Scene(((length, length + 9), (length, length + 2)))
    drafts = random_drafts(scene)
    words = torch.stack([pack_mask(draft) for draft in drafts])
    assert words.shape == (2, length, 2 * -(-length // 32))
    got = flashinfer.xqa_batch_decode_with_kv_cache(
        scene.q,
        scene.cache(),
        workspace(),
        *tables(scene),
        length + 9,
        0.3,
        2.0,
        q_len_per_req=length,
        mask=words,
    )
    assert_near(got, scene.expected(scale=0.3, masks=whole_masks(scene, drafts))[0] * 2.0)


def test_xqa_with_ragged_drafts_sinks_and_a_window() -> None:
    scene = Scene(((2, 9), (4, 6), (1, 20)))
    drafts, sinks = random_drafts(scene), torch.tensor([0.0, 1.0, -1.0, 2.0])
    wide = [torch.nn.functional.pad(draft, (0, 4 - len(draft))) for draft in drafts]
    got = flashinfer.xqa_batch_decode_with_kv_cache(
        scene.q,
        scene.cache("HND"),
        workspace(),
        *tables(scene),
        20,
        0.3,
        1.0,
        6,
        sinks=sinks,
        kv_layout="HND",
        q_len_per_req=4,
        mask=pack_mask(torch.cat(wide)),
        q_cu_seq_lens=scene.qo_indptr,
    )
    masks = whole_masks(scene, drafts)
    assert_near(got, scene.expected(scale=0.3, masks=masks, sinks=sinks, window_left=6)[0])


def test_xqa_needs_a_mask_for_drafts() -> None:
    scene = Scene(((2, 9),))
    with pytest.raises(ValueError, match="mask"):
        flashinfer.xqa_batch_decode_with_kv_cache(
            scene.q, scene.cache(), workspace(), *tables(scene), 9, q_len_per_req=2
        )


@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_output(scaled: bool) -> None:
    scene = Scene(((1, 9), (1, 3)), dtype=torch.float16)
    out = torch.empty(2, 4, 32, dtype=torch.float8_e4m3fn)
    got = flashinfer.trtllm_batch_decode_with_kv_cache(
        scene.q,
        scene.cache(),
        workspace(),
        *tables(scene),
        9,
        0.2,
        2.0 if scaled else 1.0,
        kv_layout="NHD",
        out=out,
        o_scale=0.5,
    )
    assert got is out
    want = scene.expected(scale=0.2)[0] * (2.0 if scaled else 1.0)
    assert_near(got.float() * 0.5, want, 5e-2)


def test_nvfp4_output_in_tiles() -> None:
    scene = Scene(((1, 9), (1, 3), (1, 5)), dtype=torch.float16)
    got = flashinfer.trtllm_batch_decode_with_kv_cache(
        scene.q,
        scene.cache(),
        workspace(),
        *tables(scene),
        9,
        0.2,
        2.0,
        kv_layout="NHD",
        out_dtype="nvfp4",
        o_sf_scale=4.0,
    )
    assert isinstance(got, flashinfer.FP4Tensor)
    assert got.dtype == "nvfp4"
    assert got.scale.shape == (128, 8)
    rows, blocks = out_of_tiles(torch.arange(128 * 8), 8)
    linear = torch.empty(128, 8)
    linear[rows, blocks] = got.scale.flatten().float()
    scales = linear[:3].view(3, 4, 2).to(torch.float8_e4m3fn)
    want = scene.expected(scale=0.2)[0] * 2.0
    assert_near(dequantize(got.data, scales, "nvfp4") / 4.0, want, 0.15)
    with pytest.raises(ValueError, match="o_sf_scale"):
        flashinfer.trtllm_batch_decode_with_kv_cache(
            scene.q, scene.cache(), workspace(), *tables(scene), 9, out_dtype="nvfp4"
        )


@pytest.mark.parametrize("call", ["trtllm-gen", "xqa"])
def test_nvfp4_caches_swizzled_and_linear(call: str) -> None:
    scene = Scene(((1, 9), (1, 14)), dtype=torch.float16, dim=64)
    k, v = (torch.nan_to_num(x) for x in scene.cache("HND"))
    pages, scales, *factors = flashinfer.nvfp4_quantize_paged_kv_cache(k, v)
    keys, values = (
        flashinfer.nvfp4_kv_dequantize(*flashinfer.nvfp4_kv_quantize(x, f), f, torch.float32)
        for x, f in zip((k, v), factors, strict=True)
    )
    if call == "xqa":
        linear = tuple(
            flashinfer.nvfp4_kv_quantize(x, f)[1] for x, f in zip((k, v), factors, strict=True)
        )
        assert torch.equal(linear[0].float(), scales[0].float())
        assert not torch.equal(linear[1].float(), scales[1].float())
        scales = linear
    for request, (_, n) in enumerate(scene.lengths):
        ids = scene.indices[int(scene.indptr[request]) : int(scene.indptr[request + 1])].long()
        for rows, whole in ((scene.keys, keys), (scene.values, values)):
            rows[request] = whole[ids].transpose(1, 2).flatten(0, 1)[:n]
    options: dict[str, Any] = {"kv_layout": "HND", "kv_cache_sf": scales}
    given = (scene.q, pages, workspace(), *tables(scene), 14, 0.1 * factors[0], factors[1])
    if call == "xqa":
        got = flashinfer.xqa_batch_decode_with_kv_cache(*given, **options)
    else:
        got = flashinfer.trtllm_batch_decode_with_kv_cache(*given, backend=call, **options)
    assert_near(got, scene.expected(scale=0.1)[0])


def test_fp4_tensor_checks_its_parts() -> None:
    data, scale = torch.zeros(3, 4, 16).byte(), torch.zeros(128, 8).to(torch.float8_e4m3fn)
    assert flashinfer.FP4Tensor(data, scale).original_shape == (3, 4, 32)
    bad: tuple[tuple[Any, ...], ...] = (
        (data.float(), scale),
        (data, scale.float()),
        (data, scale[:100]),
        (data, scale, 126),
        (data, scale, -1),
        (data, scale, 0, (3, 4, 40)),
    )
    for given in bad:
        with pytest.raises(ValueError, match="allowed"):
            flashinfer.FP4Tensor(*given)


def test_what_is_refused_says_why() -> None:
    scene = Scene(((1, 9),))
    given = (scene.q, scene.cache(), workspace(), *tables(scene), 9)
    for options in (
        {"uses_shared_paged_kv_idx": False},
        {"enable_block_sparse_attention": True},
        {"skip_softmax_threshold_scale_factor": 0.1},
    ):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flashinfer.trtllm_batch_decode_with_kv_cache(*given, **options)
    one = torch.zeros(3, 1, 4, 2, 32)
    with pytest.raises(NotImplementedError, match="dimension 1"):
        flashinfer.trtllm_batch_decode_with_kv_cache(given[0], one, *given[2:])
