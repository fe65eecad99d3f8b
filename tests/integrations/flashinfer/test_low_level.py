"""The calls below the wrappers: XQA itself, merges of any number of parts, pages as rows, sizes."""

from __future__ import annotations

import pytest
import torch

from pageant.integrations import flashinfer
from pageant.integrations.flashinfer.triton.cascade import variable_length_merge_states
from pageant.plan.masks import pack_mask
from tests.integrations.flashinfer.scene import Scene, assert_near, workspace
from tests.integrations.flashinfer.test_calls import random_drafts, tables, whole_masks


def xqa(scene: Scene, layout: str, output: torch.Tensor, **options: torch.Tensor | float) -> None:
    """FlashInfer's ``xqa`` over a scene's pages; ``q`` among the options is shaped as needed."""
    table, lens = tables(scene)
    flashinfer.xqa(
        options.pop("q"), *scene.cache(layout), table, lens[:, None].to(torch.uint32), output,
        workspace(), workspace(), scene.kv_heads, scene.page_size, kv_layout=layout, **options,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_xqa_of_one_token(layout: str) -> None:
    scene = Scene(((1, 9), (1, 20)))
    sinks, output = torch.tensor([0.0, 1.0, -1.0, 2.0]), torch.zeros(2, 1, 4, 32)
    options = {"q_scale": 3.0, "kv_scale": 0.5, "sliding_win_size": 7, "rcp_out_scale": 4.0}
    xqa(scene, layout, output, q=scene.q[:, None], sinks=sinks.view(2, 2), **options)
    want = scene.expected(scale=1.5 * 32**-0.5, sinks=sinks, window_left=6)[0]
    assert_near(output[:, 0], want * 2.0)


def test_xqa_with_drafts() -> None:
    scene = Scene(((3, 9), (3, 20)))
    drafts, output = random_drafts(scene), torch.zeros(2, 1, 3, 4, 32)
    words = torch.stack([pack_mask(draft) for draft in drafts])
    xqa(scene, "NHD", output, q=scene.q.view(2, 1, 3, 4, 32), q_seq_len=3, mask=words)
    want = scene.expected(scale=32**-0.5, masks=whole_masks(scene, drafts))[0]
    assert_near(output.view(6, 4, 32), want)


def test_xqa_with_ragged_drafts() -> None:
    scene = Scene(((2, 9), (4, 6), (1, 20)))
    drafts, output = random_drafts(scene), torch.zeros(7, 4, 32)
    wide = [torch.nn.functional.pad(draft, (0, 4 - len(draft))) for draft in drafts]
    options = {"q_seq_len": 4, "mask": pack_mask(torch.cat(wide)), "q_cu_seq_lens": scene.qo_indptr}
    xqa(scene, "HND", output, q=scene.q, **options)
    assert_near(output, scene.expected(scale=32**-0.5, masks=whole_masks(scene, drafts))[0])


def test_xqa_of_another_page_size() -> None:
    scene = Scene(((1, 9),))
    cache, output, scene.page_size = scene.cache(), torch.zeros(1, 1, 4, 32), 8
    rooms = workspace(), workspace()
    with pytest.raises(ValueError, match="allowed for this cache: 4 and 2"):
        flashinfer.xqa(scene.q[:, None], *cache, *tables(scene), output, *rooms, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_states_for_each_row(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    counts = [3, 0, 1, 5]
    v = torch.randn(11, 2, 8, generator=rng).to(dtype)
    s = torch.randn(11, 2, generator=rng) * 9
    s[4] = -torch.inf  # an empty part, and below a row of nothing else
    s[3] = -torch.inf
    v[4] = torch.nan
    indptr = torch.tensor([0, *counts]).cumsum(0).int()  # two states belong to no row
    out, lse = variable_length_merge_states(v, s, indptr)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.shape == (4, 2, 8)
    for row, count in enumerate(counts):
        part = slice(int(indptr[row]), int(indptr[row]) + count)
        want, want_lse = flashinfer.merge_states(v[None, part], s[None, part])
        torch.testing.assert_close(out[row], want[0])
        torch.testing.assert_close(lse[row], want_lse[0])
    assert (out[1:3] == 0).all()
    assert (lse[1:3] == -torch.inf).all()


def test_states_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"allowed: \[N, H, D\], \[N, H\]"):
        variable_length_merge_states(torch.zeros(3, 2, 8), torch.zeros(3, 1), torch.tensor([0, 3]))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nvfp4_pages_as_rows(layout: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(2)
    k, v = (torch.randn(6, 4, 2, dim, generator=rng) for dim in (32, 64))
    packed = [flashinfer.nvfp4_kv_quantize(x.flatten(0, 2), torch.tensor([0.5])) for x in (k, v)]
    codes = [part[0].view(6, 4, 2, -1) for part in packed]
    blocks = [part[1].view(6, 4, 2, -1) for part in packed]
    if layout == "HND":
        codes, blocks = ([x.transpose(1, 2).contiguous() for x in part] for part in (codes, blocks))
    table = torch.tensor([[5, 0, 999], [2, 999, 999], [999, 999, 999]])
    lens = torch.tensor([7, 4, 0], dtype=torch.int32)
    outs = [torch.full((3, 10, 2, dim), 7.0, dtype=dtype) for dim in (32, 64)]
    scales = torch.tensor([0.5]), torch.tensor([0.25])
    flashinfer.nvfp4_kv_dequantize_paged(
        tuple(codes), tuple(blocks), table, lens, *scales, *outs, layout
    )
    for (code, block), scale, out in zip(packed, scales, outs, strict=True):
        rows = flashinfer.nvfp4_kv_dequantize(code, block, scale, dtype).view(6, 4, 2, -1)
        want = torch.full_like(out, 7.0)
        want[0, :7] = torch.cat([rows[5], rows[0]])[:7]
        want[1, :4] = rows[2]
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({3: torch.tensor([4])}, "seq_lens is of torch.int64"),
        ({4: torch.tensor([1.0, 2.0])}, "k_scale is"),
        ({7: torch.zeros(1, 4, 2, 32)}, "output_v is torch.float32"),
    ],
)
def test_nvfp4_pages_that_are_refused(changed: dict[int, torch.Tensor], match: str) -> None:
    codes, blocks = torch.zeros(1, 4, 2, 16).byte(), torch.zeros(1, 4, 2, 2).byte()
    sf, one, out = blocks.view(torch.float8_e4m3fn), torch.ones(1), torch.zeros(1, 4, 2, 32).half()
    table, lens = torch.zeros(1, 1).int(), torch.tensor([4], dtype=torch.int32)
    given = [(codes, codes), (sf, sf), table, lens, one, one, out, out.clone()]
    with pytest.raises(ValueError, match=match):
        flashinfer.nvfp4_kv_dequantize_paged(*[changed.get(i, x) for i, x in enumerate(given)])


@pytest.mark.parametrize("phase", ["Decode", "Prefill"])
def test_workspace_sizes_suffice(phase: str) -> None:
    scene = Scene(((1, 9), (1, 20)))
    make = getattr(flashinfer, f"Batch{phase}WithPagedKVCacheWrapper")
    starts = () if phase == "Decode" else (scene.qo_indptr,)
    plan = (*starts, scene.indptr, scene.indices, scene.last, *scene.heads, scene.page_size)
    sizes = make(workspace()).workspace_size(*plan, q_data_type=torch.float32)
    rooms = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    wrapper = make(workspace())
    wrapper.reset_workspace_buffer(*rooms)
    wrapper.plan(*plan, q_data_type=torch.float32)
    assert_near(wrapper.run(scene.q, scene.cache()), scene.expected()[0])
    with pytest.raises(TypeError, match="no_such_argument"):
        wrapper.workspace_size(*plan, no_such_argument=1)
