"""Appending, positions, packed bits and merging, against loops and numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pageant.integrations import flashinfer
from pageant.ops import quantize
from tests.integrations.flashinfer.scene import LAYOUTS, Scene, assert_near, attend, i32

STARTS, LENS = i32(0, 2, 2, 5), i32(6, 3, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["float32", "float16", "bytes", "quantised"])
def test_append(layout: str, kind: str) -> None:
    scene = Scene(((2, 6), (0, 3), (3, 3)))
    fp8 = torch.float8_e4m3fn
    scene.dtype = torch.float32 if kind == "float32" else torch.float16
    new = [scene.randn(5, 2, 32) for _ in "kv"]
    stored = [x.to(fp8) if kind in ("bytes", "quantised") else x for x in new]
    given = stored if kind == "bytes" else new
    size = (scene.num_pages, 4, 2, 32) if layout == "NHD" else (scene.num_pages, 2, 4, 32)
    cache = [torch.zeros(size).to(stored[0].dtype) for _ in "kv"]
    where = flashinfer.get_batch_indices_positions(
        STARTS, flashinfer.get_seq_lens(scene.indptr, scene.last, 4), 5
    )
    flashinfer.append_paged_kv_cache(
        *given, *where, tuple(cache), scene.indices, scene.indptr, scene.last, layout
    )
    for pages, rows in zip(cache, stored, strict=True):
        want = torch.zeros(size)
        for token, (b, p) in enumerate([(0, 4), (0, 5), (2, 0), (2, 1), (2, 2)]):
            page = int(scene.indices[int(scene.indptr[b]) + p // 4])
            at = (page, p % 4) if layout == "NHD" else (page, slice(None), p % 4)
            want[at] = rows[token].float()
        assert torch.equal(pages.float(), want)


def test_append_skips_negative_requests() -> None:
    cache = torch.zeros(2, 2, 4, 1, 16)
    rows = torch.ones(2, 1, 16)
    flashinfer.append_paged_kv_cache(
        rows, rows * 2, i32(-1, 0), i32(0, 1), cache, i32(1), i32(0, 1), i32(2)
    )
    assert cache[:, 0].sum() == 16
    assert cache[1, 1, 1].sum() == 32


def test_append_refuses_other_types() -> None:
    rows = torch.ones(1, 1, 16)
    cache = torch.zeros(2, 2, 4, 1, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="append_key"):
        flashinfer.append_paged_kv_cache(
            rows, rows, i32(0), i32(0), cache, i32(1), i32(0, 1), i32(1)
        )


def test_positions_are_aligned_to_the_end() -> None:
    owner, place = flashinfer.get_batch_indices_positions(STARTS, LENS, 7)
    assert owner.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert place.tolist() == [4, 5, 0, 1, 2, 0, 0]
    assert owner.dtype == place.dtype == torch.int32
    buffers = i32(*[9] * 7), i32(*[9] * 7)
    got = flashinfer.get_batch_indices_positions(STARTS, LENS, 7, *buffers)
    assert got[0] is buffers[0]
    assert torch.equal(buffers[1], place)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_to_nvfp4(by_slot: bool, layout: str) -> None:
    rows = [torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(1)) for _ in "kv"]
    axes = (4, 2) if layout == "NHD" else (2, 4)
    cache = tuple(torch.full((5, *axes, 16), 99, dtype=torch.uint8) for _ in "kv")
    scales = tuple(torch.zeros(5, *axes, 2).to(torch.float8_e4m3fn) for _ in "kv")
    factors: Any = (0.5, torch.tensor([2.0]))
    if by_slot:
        slots = torch.tensor([13, -1, 4 * 5])  # page 3, row 1; none; past the last page
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *rows, slots, cache, scales, *factors, kv_layout=layout
        )
    else:
        table = (i32(3), i32(0, 1), i32(2))
        flashinfer.nvfp4_quantize_append_paged_kv_cache(
            *rows, i32(0, -1, -1), i32(1, 0, 0), cache, scales, *table, *factors, layout
        )
    at = (3, 1) if layout == "NHD" else (3, slice(None), 1)
    for pages, blocks, x, factor in zip(cache, scales, rows, factors, strict=True):
        codes, want = quantize(x, "nvfp4", factor)
        assert want is not None
        assert torch.equal(pages[at], codes[0])
        assert torch.equal(blocks[at].float(), want[0].float())
        assert (pages != 99).sum() == (codes[0] != 99).sum()
    with pytest.raises(ValueError, match="positive finite global decode scale"):
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *rows, torch.tensor([0, 0, 0]), cache, scales, 0.0, 1.0, kv_layout=layout
        )


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 8, 37])
def test_packbits(bitorder: Any, count: int) -> None:
    x = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.5
    want = np.packbits(x.numpy(), bitorder=bitorder)
    assert flashinfer.packbits(x, bitorder).tolist() == want.tolist()


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_segment_packbits(bitorder: Any) -> None:
    x = torch.rand(40, generator=torch.Generator().manual_seed(2)) < 0.5
    starts = [0, 3, 3, 19, 40]
    parts = [np.packbits(x[a:b].numpy(), bitorder=bitorder) for a, b in pairwise(starts)]
    y, indptr = flashinfer.segment_packbits(x, torch.tensor(starts), bitorder)
    assert y.tolist() == np.concatenate(parts).tolist()
    assert indptr.tolist() == [0, 1, 1, 3, 6]
    with pytest.raises(ValueError, match="bitorder"):
        flashinfer.packbits(x, "middle")


def states(dtype: torch.dtype = torch.float32) -> Any:
    """Attention over three parts of one request's keys, and over all of them."""
    scene = Scene(((4, 12),))
    cut = [slice(0, 5), slice(5, 7), slice(7, 12)]
    parts = [attend(scene.q, scene.keys[0][c], scene.values[0][c], causal=False) for c in cut]
    whole = attend(scene.q, scene.keys[0], scene.values[0], causal=False)
    return [(v.to(dtype), s.float()) for v, s in parts], whole


def test_merging_parts_gives_attention_over_all_keys() -> None:
    (a, b, c), whole = states()
    got = flashinfer.merge_state(*flashinfer.merge_state(*a, *b), *c)
    assert_near(got, whole)
    v, s = (torch.stack(x, 1) for x in zip(a, b, c, strict=True))
    assert_near(flashinfer.merge_states(v, s), whole)
    assert got[1].dtype == torch.float32


def test_merging_in_place_where_the_mask_says() -> None:
    (a, b, _), _ = states(torch.float16)
    v, s = a[0].clone(), a[1].clone()
    want = flashinfer.merge_state(*a, *b)
    mask = torch.tensor([True, False, True, False])
    flashinfer.merge_state_in_place(v, s, *b, mask=mask)
    assert torch.equal(v[mask], want[0][mask])
    assert torch.equal(v[~mask], a[0][~mask])
    assert torch.equal(s, torch.where(mask[:, None], want[1], a[1]))


def test_merging_nothing_and_empty_parts() -> None:
    v, s = flashinfer.merge_states(torch.zeros(3, 0, 2, 16), torch.zeros(3, 0, 2))
    assert (v == 0).all()
    assert (s == -torch.inf).all()
    empty = torch.full((1, 2), -torch.inf)
    v, s = flashinfer.merge_state(torch.ones(1, 2, 16), empty, torch.ones(1, 2, 16), empty)
    assert (v == 0).all()
    assert (s == -torch.inf).all()
