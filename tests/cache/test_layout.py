"""Layouts: every byte of the cache has one place, and every place one byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageant import ArgumentError
from pageant.cache.layout import LAYOUTS, CacheLayout, split_combined

each_layout = pytest.mark.parametrize("order", LAYOUTS)


@st.composite
def layouts(draw, order):
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    return CacheLayout(order, *sizes, draw(st.integers(1, 9)), draw(st.integers(1, 9)))


def small(order):
    return CacheLayout(
        order,
        num_layers=2,
        num_pages=3,
        num_kv_heads=2,
        page_size=4,
        key_bytes=6,
        value_bytes=2,
    )


@each_layout
@settings(max_examples=50)
@given(st.data())
def test_offset_and_position_undo_each_other(order, data):
    layout = data.draw(layouts(order))
    offset = data.draw(st.integers(0, layout.num_bytes - 1))
    names = dict(zip("LBHNC", ("layer", "page", "head", "token", "byte"), strict=True))
    place = {names[axis]: at for axis, at in layout.position(offset).items()}
    assert layout.offset(**place) == offset
    place = {
        names[axis]: data.draw(st.integers(0, size - 1)) for axis, size in layout.sizes.items()
    }
    offset = layout.offset(**place)
    assert 0 <= offset < layout.num_bytes
    assert {names[axis]: at for axis, at in layout.position(offset).items()} == place


@each_layout
def test_every_byte_is_one_place(order):
    layout = small(order)
    places = {tuple(layout.position(offset).values()) for offset in range(layout.num_bytes)}
    assert len(places) == layout.num_bytes == 2 * 3 * 2 * 4 * 8
    for axis, at in zip("LBHNC", zip(*places, strict=True), strict=True):
        assert set(at) == set(range(layout.sizes[axis]))


@each_layout
def test_views_are_what_offsets_say(order):
    """Number every byte by its offset: each view element must be where `offset` puts it."""
    layout = small(order)
    storage = torch.arange(layout.num_bytes).to(torch.uint8)
    for layer in range(2):
        k, v = layout.views(storage, layer, torch.uint8)
        assert k.shape == (3, 4, 2, 6)
        assert v.shape == (3, 4, 2, 2)
        for view, first in ((k, 0), (v, 6)):
            for page, token, head, byte in torch.cartesian_prod(
                *map(torch.arange, view.shape)
            ).tolist():
                want = layout.offset(
                    layer=layer, page=page, head=head, token=token, byte=first + byte
                )
                assert view[page, token, head, byte] == want % 256


@each_layout
def test_views_of_all_layers_cover_the_storage_once(order):
    layout = small(order)
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for layer in range(layout.num_layers):
        for view in layout.views(storage, layer, torch.uint8):
            assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            view += 1
    assert (storage == 1).all()


# Strides of [page, head, token, content] of one of two layers, 2 heads, 32 tokens a page and
# 64 elements of content a row.
SEEN = {
    "LBHNC": (4096, 2048, 64, 1),
    "LBNHC": (4096, 64, 128, 1),
    "BLHNC": (8192, 2048, 64, 1),
    "BLNHC": (8192, 64, 128, 1),
    "BHLNC": (8192, 4096, 64, 1),
}


@pytest.mark.parametrize(("order", "strides"), SEEN.items())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_strides(order, strides, dtype):
    size = dtype.itemsize
    layout = CacheLayout(order, 2, 5, 2, 32, 48 * size, 16 * size)
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for layer in range(2):
        k, v = layout.views(storage, layer, dtype)
        page, head, token, content = strides
        assert k.stride() == v.stride() == (page, token, head, content)
        assert k.shape == (5, 32, 2, 48)
        assert v.shape == (5, 32, 2, 16)
        assert v.storage_offset() == k.storage_offset() + 48
    assert [layout.strides[axis] for axis in "BHNC"] == [
        strides[0] * size,
        strides[1] * size,
        strides[2] * size,
        1,
    ]


@pytest.mark.parametrize("pages", [3, 65536])
def test_strides_with_heads_outermost(pages):
    """A head's pages lie together: the stride between heads grows with the pool."""
    layout = CacheLayout("LHBNC", 2, pages, 2, 32, 48, 16)
    assert [layout.strides[axis] for axis in "BHNC"] == [2048, 2048 * pages, 64, 1]


@each_layout
def test_offsets_past_32_bits(order):
    layout = CacheLayout(order, 32, 1_000_000, 8, 16, 256, 256)
    last = layout.offset(layer=31, page=999_999, head=7, token=15, byte=511)
    assert last == layout.num_bytes - 1 == 32 * 1_000_000 * 8 * 16 * 512 - 1
    assert layout.position(last) == {"L": 31, "B": 999_999, "H": 7, "N": 15, "C": 511}
    assert layout.page_bytes == 8 * 16 * 512


SHAPES = {
    "LBHNC": (7, 2, 16, 24),
    "LBNHC": (7, 16, 2, 24),
    "LHBNC": (2, 7, 16, 24),
    "BLHNC": (7, 2, 16, 24),
    "BLNHC": (7, 16, 2, 24),
    "BHLNC": (7, 2, 16, 24),
}


@pytest.mark.parametrize(("order", "shape"), SHAPES.items())
def test_combined_tensors_are_cut_in_the_layouts_order(order, shape):
    combined = torch.arange(7 * 2 * 16 * 24).reshape(shape)
    k, v = split_combined(combined, order, (16, 8), (2, 16))
    assert k.shape == (7, 16, 2, 16)
    assert v.shape == (7, 16, 2, 8)
    at = {"B": 5, "N": 11, "H": 1}
    row = combined[tuple(at[axis] for axis in order if axis in at)]
    assert torch.equal(k[5, 11, 1], row[:16])
    assert torch.equal(v[5, 11, 1], row[16:])


@pytest.mark.parametrize(
    "shape",
    [
        (7, 16, 2, 24),
        (7, 2, 16, 25),
        (7, 2, 15, 24),
        (7, 3, 16, 24),
        (2, 16, 24),
        (1, 7, 2, 16, 24),
    ],
)
def test_combined_tensors_of_another_shape_are_refused(shape):
    with pytest.raises(ArgumentError) as caught:
        split_combined(torch.zeros(shape), "LBHNC", (16, 8), (2, 16))
    assert caught.value.argument == "combined"
    assert str(shape) in str(caught.value)
    assert "[pages, 2, 16, 24] for layout LBHNC" in str(caught.value)
