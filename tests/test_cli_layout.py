"""`pageant layout`: the byte map it prints is the one caches have."""

import itertools
import json
import re

import pytest
import torch

from pageant.cache.formats import FORMATS
from pageant.cache.layout import LAYOUTS
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


def test_layout_json(capsys: Capture) -> None:
    order = ["--layout", "LBNHC", "--layers", "2", "--pages", "3"]
    assert main(["layout", "fp16", *SMALL, *order, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "format": "fp16",
        "element_bits": 16,
        "layout": "LBNHC",
        "sizes": {"L": 2, "B": 3, "H": 2, "N": 4, "C": 80},
        "strides_bytes": {"L": 1920, "B": 640, "H": 80, "N": 160, "C": 1},
        "key": {"first_byte": 0, "row_bytes": 48, "token_bytes": 96, "page_bytes": 384},
        "value": {"first_byte": 48, "row_bytes": 32, "token_bytes": 64, "page_bytes": 256},
        "row_bytes": 80,
        "token_bytes": 160,
        "page_bytes": 640,
        "cache_bytes": 3840,
    }


def test_layout_text(capsys: Capture) -> None:
    assert main(["layout", "fp16", *SMALL]) == 0
    assert capsys.readouterr().out == TEXT


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_layout_formula_is_where_the_cache_has_it(capsys: Capture, name: str, order: str) -> None:
    arguments = [*SMALL, "--layout", order, "--layers", "2", "--pages", "3"]
    assert main(["layout", name, *arguments]) == 0
    text = capsys.readouterr().out
    shape = Shape(num_q_heads=2, num_kv_heads=2, head_dim=24, v_head_dim=16)
    spec = CacheSpec(format=name, page_size=4, layout=order)
    cache = PagedCache(layout_for(shape, spec, 2, 3), FORMATS[name], torch.device("cpu"))
    base = cache.storage.data_ptr()
    for part in ("key", "value"):
        (formula,) = re.findall(rf"^{part} .*?([a-z]+ \*.*)$", text, re.MULTILINE)
        for layer, (page, token, head, i) in itertools.product((0, 1), PLACES):
            view = cache[layer].k if part == "key" else cache[layer].v
            at = {"layer": layer, "page": page, "token": token, "head": head, "i": i}
            assert view[page, token, head, i].data_ptr() - base == eval(formula, at)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nvfp4"], "nvfp4 is reserved"),
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
