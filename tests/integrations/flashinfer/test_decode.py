"""The decode wrapper against the definition: forms of caches, options, errors, graph buffers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pageant.integrations import flashinfer
from tests.integrations.flashinfer.scene import LAYOUTS, Scene, assert_near, attend, i32, workspace

LENGTHS = ((1, 9), (1, 0), (1, 4), (1, 1), (1, 23))


def decode(scene: Scene, cache: Any, layout: str = "NHD", **options: Any) -> Any:
    run = options.pop("run", {})
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
    scene.plan_decode(wrapper, **options)
    return wrapper.run(scene.q, cache, return_lse=True, **run)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["tuple", "5-D", "strided"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_form_of_cache(layout: str, form: str, page_size: int) -> None:
    scene = Scene(LENGTHS, page_size=page_size)
    assert_near(decode(scene, scene.cache(layout, form), layout), scene.expected())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_token_may_lack_their_axis(layout: str) -> None:
    scene = Scene(LENGTHS, page_size=1)
    k, v = scene.paged(scene.keys)[:, 0], scene.paged(scene.values)[:, 0]
    assert_near(decode(scene, (k, v), layout), scene.expected())
    assert_near(decode(scene, torch.stack([k, v], 1), layout), scene.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_dtypes_and_groups(dtype: torch.dtype) -> None:
    scene = Scene(LENGTHS, dtype=dtype, q_heads=16, kv_heads=2, dim=64)
    out, lse = decode(scene, scene.cache())
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_near((out, lse), scene.expected())


@pytest.mark.parametrize("window_left", [0, 3, 22, 23, 1000])
def test_window_left_counts_older_keys_only(window_left: int) -> None:
    scene = Scene(LENGTHS)
    got = decode(scene, scene.cache(), window_left=window_left)
    assert_near(got, scene.expected(window_left=window_left))


def test_window_of_zero_sees_the_newest_key_alone() -> None:
    scene = Scene(((1, 7),))
    out, lse = decode(scene, scene.cache(), window_left=0)
    torch.testing.assert_close(out[0], scene.values[0][-1].repeat_interleave(2, 0))
    scores = (scene.q[0] * scene.keys[0][-1].repeat_interleave(2, 0)).sum(-1) / math.sqrt(32)
    torch.testing.assert_close(lse[0], scores / math.log(2))


def test_lse_is_the_base_2_logarithm_of_the_number_of_equal_keys() -> None:
    scene = Scene(((1, 8), (1, 1)))
    scene.q = torch.zeros_like(scene.q)
    _, lse = decode(scene, scene.cache())
    assert lse[0].tolist() == pytest.approx([3.0] * 4)
    assert lse[1].tolist() == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.parametrize("cap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("sm_scale", [None, 0.7])
def test_soft_cap_and_scale(cap: float, sm_scale: float | None) -> None:
    scene = Scene(LENGTHS)
    got = decode(scene, scene.cache(), logits_soft_cap=cap, sm_scale=sm_scale)
    assert_near(got, scene.expected(cap=cap, scale=sm_scale))


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi(heads: int) -> None:
    scene = Scene(LENGTHS, q_heads=heads)
    slopes = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}
    got = decode(scene, scene.cache(), pos_encoding_mode="ALIBI")
    assert_near(got, scene.expected(slopes=torch.tensor(slopes[heads])))


def test_sinks_count_in_out_and_lse() -> None:
    scene = Scene(LENGTHS)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 3.0])
    got = decode(scene, scene.cache(), run={"sinks": sinks})
    assert_near(got, scene.expected(sinks=sinks))
    assert_near(got[1][1], sinks / math.log(2))


def test_scales_multiply_scores_and_output_of_any_cache() -> None:
    scene = Scene(LENGTHS)
    run = {"q_scale": 0.5, "k_scale": 3.0, "v_scale": 2.0}
    got = decode(scene, scene.cache(), run=run)
    out, lse = scene.expected(scale=1.5 * 32**-0.5)
    assert_near(got, (out * 2.0, lse))
    run = {name: torch.tensor([value]) for name, value in run.items()}
    assert_near(decode(scene, scene.cache(), run=run), (out * 2.0, lse))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8_caches(name: str, as_tensor: bool) -> None:
    fp8 = getattr(torch, name)
    scene = Scene(LENGTHS, dtype=torch.float16)
    k, v = (pages.to(fp8) for pages in scene.cache())
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    given = {n: torch.tensor(x) if as_tensor else x for n, x in scales.items()}
    got = decode(scene, (k, v), kv_data_type=name, run=given)
    scene.keys = [x.to(fp8).half() * 0.5 for x in scene.keys]
    scene.values = [x.to(fp8).half() * 3.0 for x in scene.values]
    assert_near(got, scene.expected())


def test_several_tokens_a_request_are_causal() -> None:
    scene = Scene(((3, 9), (3, 3), (3, 20)))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    scene.plan_decode(wrapper, q_len_per_req=3)
    assert_near(wrapper.run(scene.q, scene.cache(), return_lse=True), scene.expected())
    with pytest.raises(ValueError, match="q_len_per_req"):
        wrapper.run(scene.q[:8], scene.cache())


def test_out_and_lse_are_written_in_place() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    scene.plan_decode(wrapper)
    out, lse = torch.full_like(scene.q, 7.0), torch.full((5, 4), 7.0)
    got = wrapper.run(scene.q, scene.cache(), out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_near(got, scene.expected())


def test_output_of_another_type() -> None:
    scene = Scene(LENGTHS, dtype=torch.float16)
    out, _ = decode(scene, scene.cache(), o_data_type="float32")
    assert out.dtype == torch.float32
    assert_near(out, scene.expected()[0], 2e-3)


def test_a_second_plan_replaces_the_first() -> None:
    first, second = Scene(LENGTHS), Scene(((1, 40), (1, 2)), seed=1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for scene in (first, second, first):
        scene.plan_decode(wrapper)
        cache = scene.cache()
        for _ in range(2):
            assert_near(wrapper.run_return_lse(scene.q, cache), scene.expected())


def test_one_plan_serves_layers_with_caches_of_their_own() -> None:
    scene, other = Scene(LENGTHS), Scene(LENGTHS, seed=3)
    other.indices = scene.indices
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    scene.plan_decode(wrapper)
    assert_near(wrapper.run(scene.q, scene.cache()), scene.expected()[0])
    assert_near(wrapper.run(other.q, other.cache()), other.expected()[0])


def graph_wrapper(scene: Scene, spare: int = 3) -> tuple[Any, tuple[torch.Tensor, ...]]:
    requests = len(scene.lengths)
    buffers = i32(*[0] * (requests + 1)), i32(*[0] * (len(scene.indices) + spare))
    buffers = (*buffers, i32(*[0] * requests))
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers), buffers


def test_graph_buffers_hold_every_plan_and_tables_stay_where_they_are() -> None:
    scene = Scene(((1, 9), (1, 4), (1, 6)))
    shorter = Scene(((1, 2), (1, 5), (1, 7)), seed=2)
    wrapper, (indptr, indices, last) = graph_wrapper(scene)
    assert wrapper.is_cuda_graph_enabled
    addresses = set()
    for case in (scene, shorter, scene):
        case.plan_decode(wrapper)
        assert torch.equal(indptr, case.indptr)
        assert torch.equal(indices[: len(case.indices)], case.indices)
        assert torch.equal(last, case.last)
        assert_near(wrapper.run(case.q, case.cache(), return_lse=True), case.expected())
        addresses.add(wrapper.step.plan.batch.page_table.data_ptr())
    assert len(addresses) == 1


def test_graph_buffers_refuse_what_does_not_fit() -> None:
    scene = Scene(((1, 9), (1, 4)))
    wrapper, _ = graph_wrapper(scene, spare=0)
    scene.plan_decode(wrapper)
    with pytest.raises(ValueError, match="batch"):
        Scene(((1, 9),)).plan_decode(wrapper)
    with pytest.raises(ValueError, match="indices"):
        Scene(((1, 40), (1, 40))).plan_decode(wrapper)
    with pytest.raises(ValueError, match="indices_buffer"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=i32(0)
        )


def test_fast_plan_needs_a_plan_and_leaves_graph_buffers_alone() -> None:
    scene = Scene(((1, 9), (1, 4)))
    wrapper, (indptr, indices, last) = graph_wrapper(scene)
    given = (*scene.heads, scene.page_size)
    with pytest.raises(ValueError, match="prior plan"):
        flashinfer.fast_decode_plan(wrapper, indptr, indices, last, *given)
    scene.plan_decode(wrapper)
    other = Scene(((1, 3), (1, 8)), seed=5)
    for buffer, x in ((indptr, other.indptr), (last, other.last)):
        buffer.copy_(x)
    indices[: len(other.indices)] = other.indices
    flashinfer.fast_decode_plan(
        wrapper,
        scene.indptr,
        scene.indices,
        scene.last,
        *given,
        q_data_type=scene.dtype,
        kv_data_type=scene.dtype,
    )
    assert_near(wrapper.run(other.q, other.cache(), return_lse=True), other.expected())


def test_block_tables_stand_in_for_the_lists() -> None:
    scene = Scene(((1, 9), (1, 4)))
    table = torch.full((2, 5), 10**6, dtype=torch.int32)
    for row, (a, b) in enumerate(zip(scene.indptr[:-1], scene.indptr[1:], strict=True)):
        table[row, : b - a] = scene.indices[a:b]
    got = decode(scene, scene.cache(), block_tables=table)
    assert_near(got, scene.expected())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_decode(layout: str) -> None:
    scene = Scene(((1, 11),))
    k, v = scene.keys[0], scene.values[0]
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    options: dict[str, Any] = {"window_left": 5, "logits_soft_cap": 20.0}
    got = flashinfer.single_decode_with_kv_cache(
        scene.q[0], *given, layout, k_scale=2.0, q_scale=0.5, return_lse=True, **options
    )
    out, lse = attend(scene.q, k, v, window_left=5, cap=20.0)
    assert_near(got, (out[0], lse[0]))


def test_attributes_that_hosts_read() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    scene.plan_decode(wrapper, window_left=7, logits_soft_cap=None, sm_scale=0.3)
    assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (7, 0.0, 0.3)
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled


def test_options_by_position_are_deprecated() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.warns(DeprecationWarning, match="by position"):
        wrapper.plan(
            scene.indptr, scene.indices, scene.last, *scene.heads, 4, "NONE", 3, None, scene.dtype
        )
    got = wrapper.run(scene.q, scene.cache(), return_lse=True)
    assert_near(got, scene.expected(window_left=3))


def test_errors_of_types_and_sizes() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(scene.q, scene.cache())
    scene.plan_decode(wrapper)
    cache = scene.cache()
    bad = (
        ((scene.q.half(), cache), {}),
        ((scene.q, tuple(x.half() for x in cache)), {}),
        ((scene.q[:, :2], cache), {}),
        ((scene.q[:3], cache), {}),
        ((scene.q, cache), {"out": torch.empty(5, 4, 16)}),
        ((scene.q, cache), {"out": torch.empty(5, 4, 32).half()}),
        ((scene.q, cache), {"lse": torch.empty(5, 3), "return_lse": True}),
        ((scene.q, cache), {"lse": torch.empty(5, 4).half(), "return_lse": True}),
    )
    for args, options in bad:
        with pytest.raises(ValueError, match="allowed"):
            wrapper.run(*args, **options)
    with pytest.raises(AssertionError, match="window_left"):
        wrapper.run(scene.q, cache, window_left=3)
    with pytest.raises(KeyError):
        wrapper.run(scene.q, "cache")
    with pytest.raises(KeyError):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NDH")
    with pytest.raises(KeyError):
        scene.plan_decode(wrapper, pos_encoding_mode="ROTARY")
    with pytest.raises(ValueError, match="16"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()[1:])


def test_what_is_refused_says_why() -> None:
    scene = Scene(LENGTHS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for options in ({"window_right": 1}, {"pos_encoding_mode": "ROPE_LLAMA"}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            scene.plan_decode(wrapper, **options)
    with pytest.raises(ValueError, match="use_tensor_cores"):
        scene.plan_decode(wrapper, q_len_per_req=2)
    with pytest.raises(ValueError, match="use_tensor_cores"):
        scene.plan_decode(wrapper, fixed_split_size=2)
    cores = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    with pytest.raises(ValueError, match="empty KV range"):
        scene.plan_decode(cores, q_len_per_req=2)
    with pytest.raises(NotImplementedError, match="jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=["mine"])
    scene.plan_decode(wrapper)
    with pytest.raises(NotImplementedError, match="skip_softmax"):
        wrapper.run(scene.q, scene.cache(), skip_softmax_threshold_scale_factor=0.1)


def test_empty_batch() -> None:
    scene = replace(Scene(((1, 4),)), lengths=())
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(i32(0), i32(), i32(), *scene.heads, 4, q_data_type=torch.float32)
    out = wrapper.run(scene.q[:0], (torch.zeros(3, 4, 2, 32), torch.zeros(3, 4, 2, 32)))
    assert out.shape == (0, 4, 32)
