import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageant.device import FAMILIES, Device
from pageant.select.cases import DEFAULTS, DTYPES, answer_case, answer_file, explain_case
from pageant.select.explain import explain
from pageant.types import (
    ArgumentError,
    CacheSpec,
    ContextParallel,
    Features,
    Options,
    Shape,
)

CPU = {"sm": "cpu"}


def test_every_key_reaches_the_configuration() -> None:
    case = {
        "sm": "cpu", "q_heads": 12, "kv_heads": 4, "head_dim": 64, "v_head_dim": 32,
        "page_size": 48, "dtype": "float16", "cache": "fp8", "layout": "BHLNC", "spec": 3,
        "non_causal_drafts": True, "adaptive": True, "invariant": True, "q_quant": False,
        "table_kernels": "off", "kernels": "reference", "dcp": 2, "sinks": True, "window": 7,
        "soft_cap": 30.0, "alibi": True, "cubins": False,
    }  # fmt: skip
    assert set(case) == set(DEFAULTS)
    assert all(case[key] != DEFAULTS[key] for key in case)
    assert explain_case(case) == explain(
        Shape(num_q_heads=12, num_kv_heads=4, head_dim=64, v_head_dim=32, dtype=torch.float16),
        CacheSpec(format="fp8", page_size=48, layout="BHLNC"),
        Features(windows=(7,), soft_cap=True, sinks=True, alibi=True),
        Options(
            kernels="reference",
            invariant=True,
            speculative_tokens=3,
            context_parallel=ContextParallel(rank=0, world=2),
            quantize_query=False,
            table_kernels=False,
            adaptive=True,
            non_causal_drafts=True,
        ),
        Device.of("cpu"),
        cubins=False,
    )


@pytest.mark.parametrize("key", DEFAULTS)
def test_absent_is_the_default(key: str) -> None:
    assert explain_case({key: DEFAULTS[key]}) == explain_case({})


@pytest.mark.parametrize("family", FAMILIES)
def test_family_by_name_and_by_number(family: str) -> None:
    names = [family] if family == "cpu" else [family, family[2:], int(family[2:])]
    for name in names:
        device = explain_case({"sm": name}).device
        assert device is not None
        assert device.family == family


def test_absent_family_is_this_machine() -> None:
    here = Device.detect("cuda" if torch.cuda.is_available() else "cpu")
    assert explain_case({}).device == here


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_has_the_dtype_of_the_model(dtype: str) -> None:
    answer = answer_case({**CPU, "dtype": dtype, "cache": "fp8"})
    assert answer["prefill"]["q_dtype"] == answer["decode"]["q_dtype"] == dtype


@pytest.mark.parametrize("absent", [0, None])
def test_no_window_and_no_cap_can_be_said(absent: int | None) -> None:
    assert explain_case({"window": absent, "soft_cap": absent}) == explain_case({})


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        *(("sm", value, "sm") for value in ("77", "9.0", "", 9, True, [90])),
        *(("dtype", value, "dtype") for value in ("fp8", "", None, 16, ["float16"])),
        *(("soft_cap", value, "soft_cap") for value in (-1, True, "30", float("nan"), [30.0])),
        *(("window", value, "window") for value in (-1, True, False, 1.5, "128", [])),
        *(("table_kernels", value, "table_kernels") for value in ("maybe", True, None)),
        *(("cubins", value, "cubins") for value in ("no", 0, None)),
        *(("dcp", value, "dcp") for value in (0, -1, None, "2", True)),
        *(("spec", value, "spec") for value in (-1, True, None, "3")),
        *((key, "wide", "q_heads") for key in ("q_heads", "kv_heads")),
        *((key, 20, "head_dim") for key in ("head_dim", "v_head_dim")),
        *((key, "yes", key) for key in ("sinks", "alibi", "adaptive", "invariant")),
        ("q_quant", 1, "q_quant"),
        ("non_causal_drafts", None, "non_causal_drafts"),
        ("page_size", 0, "page_size"),
        ("cache", "fp7", "cache"),
        ("layout", "NHD", "layout"),
        ("kernels", "best", "kernels"),
    ],
)
def test_wrong_value_names_its_argument(key: str, value: Any, argument: str) -> None:
    answer = answer_case({**CPU, key: value})
    assert list(answer) == ["ok", "reason", "argument"]
    assert (answer["ok"], answer["argument"]) == (False, argument)
    assert "; allowed: " in answer["reason"]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda some: st.lists(some, max_size=2) | st.dictionaries(st.text(max_size=2), some),
    max_leaves=3,
)


@given(case=st.dictionaries(st.sampled_from(list(DEFAULTS)), JUNK))
def test_junk_is_answered_in_json(case: dict[str, Any]) -> None:
    answer = json.loads(json.dumps(answer_case(case)))
    assert answer["ok"] is False or "decode" in answer


def test_file_is_answered_line_by_line_until_one_is_no_case(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"sm": "cpu"}\n\n{"sm": "77"}\n{"head": 1}\n{"sm": "cpu"}\n')
    answers = answer_file(path)
    assert next(answers) == answer_case(CPU)
    assert next(answers) == answer_case({"sm": "77"})
    with pytest.raises(ArgumentError, match=r"line 4: unknown key 'head'") as caught:
        next(answers)
    assert caught.value.argument == "cases"


def test_file_takes_what_its_cases_leave_out_from_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{}\n{"sm": "80"}\n{"kernels": "auto"}\n')
    absent = {**DEFAULTS, "sm": "90", "kernels": "flashinfer"}
    kernels = [answer["decode"]["kernel"] for answer in answer_file(path, absent)]
    assert kernels == ["flashinfer.xqa", "flashinfer.native", "triton.decode"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("9" * 10_000, "line 2: not "),
        ("[1]", "line 2: not a JSON object"),
        ('{"head_size": 64}', "line 2: unknown key 'head_size'; allowed: sm, q_heads"),
    ],
)
def test_line_that_is_no_case_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{{}}\n{line}\n")
    with pytest.raises(ArgumentError, match=re.escape(words)):
        list(answer_file(path))


@pytest.mark.parametrize("content", [None, b"\xff\xfe{}"])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cases.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"cases\.jsonl' cannot be read"):
        list(answer_file(path))
