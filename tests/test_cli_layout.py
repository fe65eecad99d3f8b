"""`pageant layout`: the byte map it prints, of pageant.cache.describe, is the one caches have."""

import itertools
import json
import re

import pytest
import torch

from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS, CacheLayout, swizzled
from pageant.cache.pages import PagedCache, layout_for
from pageant.cli import main
from pageant.types import CacheSpec, Shape

Capture = pytest.CaptureFixture[str]
SMALL = ["--kv-heads", "2", "--page-size", "4", "--head-dim", "24", "--v-head-dim", "16"]
PLACES = list(itertools.product((0, 2), (0, 3), (0, 1), (0, 9)))  # page, token, head, element
TEXT = """\
fp16: 2 bytes an element. Layout LBHNC, outermost axis first: layer, page, head, token, content.

A page holds 4 tokens of 2 heads. A row is one token of one head: its key, then its value.
Bytes of one layer, and where each element lies:

       row  token  page  element i begins at byte
key    48   96     384   layer * 640 + page * 640 + head * 320 + token * 80 + i * 2
value  32   64     256   layer * 640 + page * 640 + head * 320 + token * 80 + i * 2 + 48
both   80   160    640

axis             layer  page  head  token  element
stride in bytes  640    640   320   80     2

The first rows in memory, and the last of 640 bytes:

bytes     layer  page  head  token
0..47     0      0     0     0      key
48..79    0      0     0     0      value
80..127   0      0     0     1      key
128..159  0      0     0     1      value
160..207  0      0     0     2      key
208..239  0      0     0     2      value
240..287  0      0     0     3      key
288..319  0      0     0     3      value
560..607  0      0     1     3      key
608..639  0      0     1     3      value
"""


NVFP4 = """\
nvfp4: 2 elements a byte, the even one in the low four bits (1 sign, 2 exponent and 1 mantissa bit).
One float8_e4m3fn scale for each 16 elements.
Element i reads as code[i] * scale[i // 16], times the layer's k_scale or v_scale.
Layout LBHNC, outermost axis first: layer, page, head, token, content.

A page holds 4 tokens of 2 heads. A row is one token of one head.
A page, 184 bytes, is four regions that begin at its bytes
0 (key), 96 (key scales), 112 (value), 176 (value scales).
Bytes of one layer, and where each element lies:

              row  token  page  element i, or scale s, begins at byte
key           12   24     96    layer * 184 + page * 184 + head * 48 + token * 12 + i // 2
key scales    2    4      16    layer * 184 + page * 184 + head * 8 + token * 2 + s + 96
value         8    16     64    layer * 184 + page * 184 + head * 32 + token * 8 + i // 2 + 112
value scales  1    2      8     layer * 184 + page * 184 + head * 4 + token * 1 + s + 176
all           23   46     184

stride in bytes  layer  page  head  token  element    scale
key              184    184   48    12     1 for two
key scales       184    184   8     2                 1
value            184    184   32    8      1 for two
value scales     184    184   4     1                 1

The first rows of each region, and the last of 184 bytes:

bytes     layer  page  head  token
0..11     0      0     0     0      key
12..23    0      0     0     1      key
96..97    0      0     0     0      key scales
98..99    0      0     0     1      key scales
112..119  0      0     0     0      value
120..127  0      0     0     1      value
176..176  0      0     0     0      value scales
177..177  0      0     0     1      value scales
183..183  0      0     1     3      value scales
"""
PARTS = {"k": "key", "k_scales": "key_scales", "v": "value", "v_scales": "value_scales"}


def asked(capsys: Capture, *arguments: str) -> str:
    assert main(["layout", *arguments]) == 0
    return capsys.readouterr().out


def layout_of(name: str, order: str, dims: tuple[int, int] = (24, 16)) -> CacheLayout:
    shape = Shape(num_q_heads=2, num_kv_heads=2, head_dim=dims[0], v_head_dim=dims[1])
    return layout_for(shape, CacheSpec(format=name, page_size=4, layout=order), 2, 3)


def test_layout_json(capsys: Capture) -> None:
    order = ["--layout", "LBNHC", "--layers", "2", "--pages", "3"]
    said = json.loads(asked(capsys, "fp16", *SMALL, *order, "--json"))
    where = "layer * 1920 + page * 640 + token * 160 + head * 80 + i * 2"
    strides = {"L": 1920, "B": 640, "H": 80, "N": 160, "C": 1}
    assert said == {
        "format": "fp16",
        "element_bits": 16,
        "elements_per_byte": 1,
        "scale_dtype": None,
        "scale_block": 0,
        "v_scale_order": "linear",
        "layout": "LBNHC",
        "sizes": {"L": 2, "B": 3, "H": 2, "N": 4, "C": 80},
        "strides_bytes": strides,
        "region_rows": 1,
        "key": {
            "first_byte": 0,
            "row_bytes": 48,
            "token_bytes": 96,
            "page_bytes": 384,
            "strides_bytes": strides,
            "formula": where,
        },
        "value": {
            "first_byte": 48,
            "row_bytes": 32,
            "token_bytes": 64,
            "page_bytes": 256,
            "strides_bytes": strides,
            "formula": f"{where} + 48",
        },
        "row_bytes": 80,
        "token_bytes": 160,
        "page_bytes": 640,
        "cache_bytes": 3840,
    }


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_layout_json_numbers_are_the_layouts(capsys: Capture, name: str, order: str) -> None:
    arguments = [*SMALL, "--layout", order, "--layers", "2", "--pages", "3", "--json"]
    said, layout, fmt = (
        json.loads(asked(capsys, name, *arguments)),
        layout_of(name, order),
        FORMATS[name],
    )
    assert {part for part in PARTS.values() if part in said} == {
        PARTS[part] for part in layout.parts
    }
    for part, (_, size) in layout.parts.items():
        first, strides = layout.place(part)
        numbers = said[PARTS[part]]
        assert (numbers["first_byte"], numbers["strides_bytes"]) == (first, strides)
        assert numbers["row_bytes"] == size
        assert numbers["token_bytes"] == 2 * size
        assert numbers["page_bytes"] == 8 * size
    assert said["row_bytes"] * 2 == said["token_bytes"]
    assert said["token_bytes"] * 4 == said["page_bytes"] == layout.page_bytes
    assert said["page_bytes"] * 6 == said["cache_bytes"] == layout.num_bytes
    assert said["elements_per_byte"] * said["element_bits"] in (8, 16, 32)
    assert said["scale_block"] == fmt.scale_block
    assert said["scale_dtype"] == (str(fmt.scale_dtype)[6:] if fmt.scale_dtype else None)


@pytest.mark.parametrize(("name", "text"), [("fp16", TEXT), ("nvfp4", NVFP4)])
def test_layout_text(capsys: Capture, name: str, text: str) -> None:
    assert asked(capsys, name, *SMALL) == text


def formulas(text: str) -> dict[str, str]:
    """What the printed table says, by part."""
    found = re.findall(r"^(key|value)( scales)?  .*?([a-z]+ \*.*)$", text, re.MULTILINE)
    return {f"{side[0]}{scales.replace(' ', '_')}": formula for side, scales, formula in found}


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_layout_formula_is_where_the_cache_has_it(capsys: Capture, name: str, order: str) -> None:
    fmt, layout = FORMATS[name], layout_of(name, order)
    text = asked(capsys, name, *SMALL, "--layout", order, "--layers", "2", "--pages", "3")
    cache = PagedCache(layout, fmt, torch.device("cpu"))
    base = cache.storage.data_ptr()
    said = formulas(text)
    assert set(said) == set(layout.parts)
    for part, formula in said.items():
        for layer, (page, token, head, i) in itertools.product((0, 1), PLACES):
            s = min(i, layout.parts[part][1] - 1)
            row = getattr(cache[layer], part)[page, token, head]
            at = {"layer": layer, "page": page, "token": token, "head": head, "i": i, "s": s}
            if part.endswith("scales"):
                element = row[s] if fmt.scale_block else row
            else:
                element = row[i // fmt.per_byte]
            assert element.data_ptr() - base == eval(formula, at)


@pytest.mark.parametrize("order", LAYOUTS)
def test_layout_formula_of_swizzled_scales(capsys: Capture, order: str) -> None:
    dims = ["--kv-heads", "2", "--page-size", "8", "--head-dim", "64", "--v-head-dim", "128"]
    places = ["--layout", order, "--pages", "2", "--v-scale-order", "swizzled"]
    text = asked(capsys, "nvfp4", *dims, *places)
    assert "swizzled" in text
    assert "0..3   value scales" in text
    shape = Shape(num_q_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=128)
    spec = CacheSpec(format="nvfp4", page_size=8, layout=order, v_scale_order="swizzled")
    cache = PagedCache(layout_for(shape, spec, 1, 2), FORMATS["nvfp4"], torch.device("cpu"))
    rows, columns = swizzled(torch.arange(8), 8)
    formula = formulas(text)["v_scales"]
    for page, token, head, s in itertools.product(range(2), range(8), range(2), range(8)):
        at = {"layer": 0, "page": page, "token": token, "head": head, "s": s}
        place = cache[0].v_scales[page, rows[token, s], head, columns[token, s]]
        assert place.data_ptr() - cache.storage.data_ptr() == eval(formula, at)


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_layout_rows_are_where_the_layout_has_them(capsys: Capture, name: str, order: str) -> None:
    layout = layout_of(name, order)
    text = asked(capsys, name, *SMALL, "--layout", order, "--layers", "2", "--pages", "3")
    rows = re.findall(r"^(\d+)\.\.(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(.*)$", text, re.MULTILINE)
    assert len(rows) >= 9
    for first, last, *numbers, part in rows:
        key = {"key": "k", "value": "v"}[part.split()[0]] + ("_scales" if "scales" in part else "")
        begin, size = layout.parts[key]
        assert int(last) - int(first) + 1 == size
        want = dict(zip("LBHN", map(int, numbers), strict=True))
        for offset in (int(first), int(last)):
            at = layout.position(offset)
            assert begin <= at.pop("C") < begin + size
            assert at == want
    assert int(rows[-1][1]) == layout.num_bytes - 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nvfp4", "--v-scale-order", "zigzag"], "v_scale_order is 'zigzag'"),
        (["bf16", "--v-scale-order", "swizzled"], "v_scale_order is 'swizzled'"),
        (["fp7"], "cache is 'fp7'"),
        (["bf16", "--page-size", "0"], "page_size is 0"),
        (["bf16", "--layout", "NHD"], "layout is 'NHD'"),
        (["bf16", "--pages", "0"], "--pages"),
        ([], "FORMAT"),
    ],
)
def test_layout_mistake_is_one_line(capsys: Capture, arguments: list[str], words: str) -> None:
    assert main(["layout", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
