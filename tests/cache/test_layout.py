"""Layouts: every byte of the cache has one place, and every place one byte."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS, PARTS, CacheLayout, swizzled, unswizzled

each_layout = pytest.mark.parametrize("order", LAYOUTS)


@st.composite
def layouts(draw, order):
    sizes = [draw(st.integers(1, 5)) for _ in range(4)]
    scales = (0, 0) if draw(st.booleans()) else (draw(st.integers(0, 5)), draw(st.integers(0, 5)))
    return CacheLayout(order, *sizes, draw(st.integers(1, 9)), draw(st.integers(1, 9)), *scales)


def small(order, scales=(0, 0)):
    return CacheLayout(
        order,
        num_layers=2,
        num_pages=3,
        num_kv_heads=2,
        page_size=4,
        key_bytes=6,
        value_bytes=2,
        key_scale_bytes=scales[0],
        value_scale_bytes=scales[1],
    )


# Bytes of a row's key scales and value scales; scales for one side only work too.
each_scales = pytest.mark.parametrize("scales", [(0, 0), (3, 1), (4, 4), (0, 2), (1, 0)])


@each_layout
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
@each_scales
def test_every_byte_is_one_place(order, scales):
    layout = small(order, scales)
    row = 8 + sum(scales)
    places = [layout.position(offset) for offset in range(layout.num_bytes)]
    assert len({tuple(at.values()) for at in places}) == layout.num_bytes == 2 * 3 * 2 * 4 * row
    for axis in "LBHNC":
        assert {at[axis] for at in places} == set(range(layout.sizes[axis]))
    for offset, at in enumerate(places):
        names = {"layer": "L", "page": "B", "head": "H", "token": "N", "byte": "C"}
        assert layout.offset(**{name: at[axis] for name, axis in names.items()}) == offset


def parts_of(layout, storage, layer):
    return {part: layout.view(storage, layer, part, torch.uint8) for part in layout.parts}


@each_layout
@each_scales
def test_views_are_what_offsets_say(order, scales):
    """Number every byte by its offset: each view element must be where `offset` puts it."""
    layout = small(order, scales)
    storage = torch.arange(layout.num_bytes, dtype=torch.int32)
    low, high = (storage % 256).to(torch.uint8), (storage // 256).to(torch.uint8)
    sizes = {"k": 6, "k_scales": scales[0], "v": 2, "v_scales": scales[1]}
    assert {part: size for part, (_, size) in layout.parts.items()} == {
        part: size for part, size in sizes.items() if size
    }
    for layer in range(2):
        first = 0
        for part, view in parts_of(layout, low, layer).items():
            assert view.shape == (3, 4, 2, sizes[part])
            upper = layout.view(high, layer, part, torch.uint8)
            seen = view.int() + 256 * upper.int()
            for page, token, head, byte in itertools.product(*map(range, view.shape)):
                want = layout.offset(
                    layer=layer, page=page, head=head, token=token, byte=first + byte
                )
                assert seen[page, token, head, byte] == want
            first += sizes[part]


@each_layout
@each_scales
def test_views_of_all_layers_cover_the_storage_once(order, scales):
    layout = small(order, scales)
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for layer in range(layout.num_layers):
        for view in parts_of(layout, storage, layer).values():
            assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            view += 1
    assert (storage == 1).all()


@each_layout
@given(st.data())
def test_views_of_any_size_cover_the_storage_once(order, data):
    layout = data.draw(layouts(order))
    storage = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for layer in range(layout.num_layers):
        for view in parts_of(layout, storage, layer).values():
            view += 1
    assert (storage == 1).all()


@each_layout
@pytest.mark.parametrize("name", FORMATS)
def test_a_page_is_four_regions(order, name):
    """[K data | K scales | V data | V scales], of all heads where those lie inside the page."""
    fmt, heads, size, dims = FORMATS[name], 2, 4, (32, 24)
    layout = CacheLayout(
        order,
        2,
        3,
        heads,
        size,
        *(fmt.data_bytes(dim) for dim in dims),
        *(fmt.scale_bytes(dim) for dim in dims),
    )
    widths = {
        "k": fmt.data_bytes(32),
        "k_scales": fmt.scale_bytes(32),
        "v": fmt.data_bytes(24),
        "v_scales": fmt.scale_bytes(24),
    }
    assert tuple(widths) == PARTS
    order_inside = {"LBHNC": "HN", "LBNHC": "NH", "BLHNC": "HN", "BLNHC": "NH"}.get(order, "N")
    rows_inside = size if order_inside == "N" else heads * size
    outer = [axis for axis in order[:-1] if axis not in order_inside]
    counts = {"L": 2, "B": 3, "H": heads}
    for at in itertools.product(range(2), range(3), range(heads), range(size)):
        layer, page, head, token = at
        where = {"L": layer, "B": page, "H": head}
        region = 0
        for axis in outer:
            region = region * counts[axis] + where[axis]
        row = {"HN": head * size + token, "NH": token * heads + head, "N": token}[order_inside]
        begin, byte = region * rows_inside * layout.row_bytes, 0
        for width in widths.values():
            for column in (0, width - 1) if width else ():
                if widths["k_scales"]:
                    want = begin + row * width + column
                else:  # without scales a row's key and value lie together
                    want = begin + row * layout.row_bytes + byte + column
                got = layout.offset(
                    layer=layer, page=page, head=head, token=token, byte=byte + column
                )
                assert got == want
            begin += rows_inside * width if widths["k_scales"] else 0
            byte += width


def test_bytes_of_a_page_worked_out_by_hand():
    """nvfp4, LBHNC, 2 heads of 32, 4 tokens: rows of 16 + 2 bytes, regions 128, 16, 128 and 16."""
    layout = CacheLayout("LBHNC", 1, 2, 2, 4, 16, 16, 2, 2)
    assert layout.region_rows == 8
    assert layout.page_bytes == 288
    assert {part: layout.place(part)[0] for part in PARTS} == {
        "k": 0,
        "k_scales": 128,
        "v": 144,
        "v_scales": 272,
    }
    assert layout.place("v_scales")[1] == {"L": 576, "B": 288, "H": 8, "N": 2, "C": 1}
    # Page 1, head 1, token 2: its last key byte, and the second of its value scales.
    assert layout.offset(layer=0, page=1, head=1, token=2, byte=15) == 288 + 64 + 32 + 15
    assert layout.offset(layer=0, page=1, head=1, token=2, byte=35) == 288 + 272 + 8 + 4 + 1
    assert layout.position(288 + 272 + 8 + 4 + 1) == {"L": 0, "B": 1, "H": 1, "N": 2, "C": 35}


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
        k, v = (layout.view(storage, layer, part, dtype) for part in ("k", "v"))
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


@each_layout
def test_offsets_past_32_bits_with_scales(order):
    layout = CacheLayout(order, 32, 4_000_000, 8, 16, 64, 64, 8, 8)
    last = layout.offset(layer=31, page=3_999_999, head=7, token=15, byte=143)
    assert last == layout.num_bytes - 1 == 32 * 4_000_000 * 8 * 16 * 144 - 1
    assert layout.position(last) == {"L": 31, "B": 3_999_999, "H": 7, "N": 15, "C": 143}


each_plane = pytest.mark.parametrize("tokens", [4, 8, 16, 48])
each_width = pytest.mark.parametrize("scales", [4, 8, 16, 32])


@each_plane
@each_width
def test_the_swizzle_is_a_reshape_and_its_inverse_undoes_it(tokens, scales):
    """A plane [T, S] is seen as [T/4, 4, 4, S/4] and stored as [T/4, 4, S/4, 4]."""
    plane = torch.arange(tokens * scales).reshape(tokens, scales)
    rows, columns = swizzled(torch.arange(tokens), scales)
    assert rows.shape == columns.shape == (tokens, scales)
    stored = torch.full_like(plane, -1)
    stored[rows, columns] = plane
    want = plane.reshape(tokens // 4, 4, 4, scales // 4).permute(0, 2, 3, 1)
    assert torch.equal(stored, want.reshape(tokens, scales))
    token, scale = unswizzled(
        torch.arange(tokens)[:, None].expand(tokens, scales),
        torch.arange(scales).expand(tokens, scales),
        scales,
    )
    assert torch.equal(stored, plane[token, scale])
    again = unswizzled(rows, columns, scales)
    assert torch.equal(again[0], torch.arange(tokens)[:, None].expand(tokens, scales))
    assert torch.equal(again[1], torch.arange(scales).expand(tokens, scales))


def test_the_swizzle_of_one_token_by_hand():
    """Token 6, scales 0 to 7: rows 4 to 7, two columns each, of the four tokens the third place."""
    rows, columns = swizzled(torch.tensor(6), 8)
    assert rows.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert columns.tolist() == [2, 6] * 4
