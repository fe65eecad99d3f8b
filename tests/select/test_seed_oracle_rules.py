"""The oracle against answers worked out by hand from the documents: one case a rule."""

import ast
from pathlib import Path

import pytest

from tests.select.seed_oracle import ARGUMENTS, Case, answer, cases, doubts

E4M3, E5M2, BF16, FP16 = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"
SMALL = [16, 32, 64]
LARGE = [*SMALL, 128, 256, 512, 1024]
SINGLE, UNIFORM = "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"


def whole(prefill: str, decode: str, **rest: object) -> Case:
    (prefill, prefill_q), (decode, decode_q) = prefill.split(), decode.split()
    return {
        "ok": True,
        "prefill": {"kernel": f"flashinfer.{prefill}", "q_dtype": prefill_q},
        "decode": {"kernel": f"flashinfer.{decode}", "q_dtype": decode_q},
        "decode_threshold": 1,
        "cuda_graph": SINGLE,
        "varlen_graph_max_q": None,
        "lens_mismatch": False,
        "page_sizes": SMALL,
        "layouts": None,
        "draft_reuse": False,
        **rest,
    }


HEAD_MAJOR = ["LBHNC", "BLHNC"]
SM10X = {"cuda_graph": UNIFORM, "lens_mismatch": True, "page_sizes": LARGE, "draft_reuse": True}
SM10X |= {"layouts": HEAD_MAJOR}

WHOLE = {
    "hopper fp8, spec": (
        {"sm": "90", "cache": "fp8", "spec": 3},
        whole(f"native {E4M3}", f"xqa {BF16}", decode_threshold=4, cuda_graph=UNIFORM),
    ),
    "hopper forced off: decode takes fp8 queries": (
        {"sm": "90", "cache": "fp8", "spec": 3, "table_kernels": "off"},
        whole(f"native {E4M3}", f"native {E4M3}"),
    ),
    "hopper head size 512 falls back": (
        {"sm": "90", "cache": "fp8", "head_dim": 512, "spec": 3},
        whole(f"native {E4M3}", f"native {BF16}"),
    ),
    "hopper DCP: XQA has no LSE": (
        {"sm": "90", "dcp": 2, "spec": 3},
        whole(f"native-dcp {BF16}", f"native {BF16}"),
    ),
    "hopper sinks": (
        {"sm": "90", "sinks": True},
        whole(f"native-sink {BF16}", f"xqa {BF16}", cuda_graph=UNIFORM),
    ),
    "hopper non-causal drafts stay on XQA": (
        {"sm": "90", "spec": 7, "non_causal_drafts": True},
        whole(f"native {BF16}", f"xqa {BF16}", decode_threshold=8, cuda_graph=UNIFORM),
    ),
    "hopper soft cap": (
        {"sm": "90", "cache": "fp8", "soft_cap": 30, "spec": 3},
        whole(f"native {E4M3}", f"native {BF16}"),
    ),
    "hopper without cubins": (
        {"sm": "90", "cubins": False},
        whole(f"native {BF16}", f"native {BF16}"),
    ),
    "ada fp8 keeps the model dtype": (
        {"sm": "89", "cache": "fp8", "spec": 3},
        whole(f"native {BF16}", f"native {BF16}"),
    ),
    "thor is its own family": ({"sm": "110"}, whole(f"native {BF16}", f"native {BF16}")),
    "consumer blackwell fp8": (
        {"sm": "121", "cache": "fp8", "dtype": FP16},
        whole(f"native {FP16}", f"xqa {FP16}", cuda_graph=UNIFORM),
    ),
    "blackwell bf16": ({"sm": "100"}, whole(f"trtllm-gen {BF16}", f"trtllm-gen {BF16}", **SM10X)),
    "blackwell fp8, adaptive": (
        {"sm": "103", "cache": "fp8", "spec": 3, "adaptive": True},
        whole(
            f"trtllm-gen {E4M3}",
            f"trtllm-gen {E4M3}",
            **SM10X,
            decode_threshold=4,
            varlen_graph_max_q=4,
        ),
    ),
    "blackwell e5m2: row 6 wants e4m3, row 8 an unquantised cache": (
        {"sm": "100", "cache": "fp8_e5m2"},
        whole(f"native {E5M2}", f"trtllm-gen {E5M2}", **SM10X),
    ),
    "blackwell e5m2 forced: row 11": (
        {"sm": "100", "cache": "fp8_e5m2", "table_kernels": "on"},
        whole(f"trtllm-gen {E5M2}", f"trtllm-gen {E5M2}", **SM10X),
    ),
    "blackwell e5m2, pages of 128: forced": (
        {"sm": "100", "cache": "fp8_e5m2", "page_size": 128},
        whole(f"trtllm-gen {E5M2}", f"trtllm-gen {E5M2}", **SM10X),
    ),
    "blackwell fp8, 16-bit queries": (
        {"sm": "100", "cache": "fp8", "q_quant": False},
        whole(f"native {BF16}", f"trtllm-gen {BF16}", **SM10X),
    ),
    "blackwell fp8, 16-bit queries, sinks: row 7": (
        {"sm": "100", "cache": "fp8", "q_quant": False, "sinks": True},
        whole(f"trtllm-gen {BF16}", f"trtllm-gen {BF16}", **SM10X),
    ),
    "blackwell non-causal drafts: single-token graphs": (
        {"sm": "100", "spec": 3, "adaptive": True, "non_causal_drafts": True},
        whole(
            f"trtllm-gen {BF16}",
            f"trtllm-gen {BF16}",
            **{**SM10X, "cuda_graph": SINGLE},
            decode_threshold=4,
        ),
    ),
    "blackwell DCP": (
        {"sm": "100", "dcp": 4, "spec": 3, "adaptive": True},
        whole(f"native-dcp {BF16}", f"trtllm-gen {BF16}", page_sizes=LARGE, layouts=HEAD_MAJOR),
    ),
    "blackwell nvfp4": (
        {"sm": "100", "cache": "nvfp4_4over6"},
        whole(f"trtllm-gen {E4M3}", f"trtllm-gen {E4M3}", **SM10X),
    ),
    "blackwell multi-head: no large pages": (
        {"sm": "100", "q_heads": 16, "kv_heads": 16},
        whole(f"trtllm-gen {BF16}", f"trtllm-gen {BF16}", **{**SM10X, "page_sizes": SMALL}),
    ),
    "blackwell ALiBi": (
        {"sm": "100", "alibi": True, "spec": 3, "adaptive": True},
        whole(f"native {BF16}", f"native {BF16}", layouts=HEAD_MAJOR),
    ),
    "blackwell invariant": (
        {"sm": "100", "cache": "fp8", "invariant": True},
        whole(f"native {E4M3}", f"native {E4M3}", layouts=HEAD_MAJOR),
    ),
}


@pytest.mark.parametrize(("case", "expected"), WHOLE.values(), ids=list(WHOLE))
def test_answer(case: Case, expected: Case) -> None:
    assert answer(case) == expected


REFUSED = [
    ({"sm": "75"}, "sm"),
    ({"sm": "cpu"}, "sm"),
    ({"sm": "90", "dtype": "float32"}, "dtype"),
    ({"sm": "90", "head_dim": 96}, "head_dim"),
    ({"sm": "90", "v_head_dim": 64}, "head_dim"),
    ({"sm": "90", "page_size": 8}, "page_size"),
    ({"sm": "90", "page_size": 128}, "page_size"),
    ({"sm": "100", "page_size": 128, "q_heads": 8}, "page_size"),
    ({"sm": "100", "page_size": 128, "table_kernels": "off"}, "page_size"),
    ({"sm": "100", "page_size": 2048}, "page_size"),
    ({"sm": "90", "cache": "int8"}, "cache"),
    ({"sm": "90", "cache": "fp8_e4m3_token_head"}, "cache"),
    ({"sm": "90", "cache": "fp16"}, "cache"),
    ({"sm": "120", "cache": "nvfp4"}, "cache"),
    ({"sm": "100", "cache": "nvfp4", "table_kernels": "off"}, "cache"),
    ({"sm": "100", "cache": "nvfp4", "non_causal_drafts": True}, "cache"),
    ({"sm": "100", "layout": "LBNHC"}, "cache"),
    ({"sm": "80", "sinks": True}, "sinks"),
    ({"sm": "90", "sinks": True, "head_dim": 512}, "sinks"),
    ({"sm": "90", "sinks": True, "table_kernels": "off"}, "sinks"),
    ({"sm": "100", "sinks": True, "dcp": 2}, "sinks"),
    ({"sm": "100", "sinks": True, "invariant": True}, "sinks"),
    ({"sm": "90", "sinks": True, "soft_cap": 30}, "soft_cap"),
    ({"sm": "100", "cache": "nvfp4", "soft_cap": 30}, "soft_cap"),
    ({"sm": "100", "page_size": 256, "alibi": True}, "alibi"),
    ({"sm": "90", "dcp": 2, "non_causal_drafts": True}, "dcp"),
    ({"sm": "90", "q_heads": 6, "kv_heads": 4}, "q_heads"),
    ({"sm": "100", "cache": "nvfp4", "q_quant": False}, "q_quant"),
]


@pytest.mark.parametrize(("case", "argument"), REFUSED, ids=str)
def test_refused_for_one_reason(case: Case, argument: str) -> None:
    assert answer(case) == {"ok": False, "argument": argument, "arguments": [argument]}


def test_every_argument_has_a_refusal() -> None:
    assert {argument for _, argument in REFUSED} == set(ARGUMENTS)


def test_several_reasons_are_all_named() -> None:
    case = {"sm": "80", "sinks": True, "soft_cap": 30, "alibi": True, "page_size": 8}
    assert answer(case)["arguments"] == ["page_size", "sinks", "soft_cap", "alibi"]
    assert answer(case)["argument"] == "page_size"


@pytest.mark.parametrize(
    "case",
    [
        {"sm": "90", "window": 128, "layout": "BHLNC"},
        {"sm": "90", "cache": "bf16", "v_head_dim": 128},
        {"sm": "100", "head_dim": 512, "sinks": True, "layout": "BLHNC"},
    ],
)
def test_served(case: Case) -> None:
    assert answer(case)["ok"]


def test_sinks_never_meet_a_kernel_without_them() -> None:
    served = 0
    for case in cases(4000, seed=7):
        got = answer(case)
        if got["ok"] and case.get("sinks"):
            served += 1
            used = {got["prefill"]["kernel"], got["decode"]["kernel"]}
            assert used <= {"flashinfer.native-sink", "flashinfer.xqa", "flashinfer.trtllm-gen"}
    assert served > 10


def test_cases_cover_the_ground() -> None:
    asked = list(cases(8000, seed=1))
    assert asked == list(cases(8000, seed=1))
    answers = [answer(case) for case in asked]
    valid = [got for got in answers if got["ok"]]
    assert 0.4 < len(valid) / len(answers) < 0.8
    pairs = {(got["prefill"]["kernel"][11:], got["decode"]["kernel"][11:]) for got in valid}
    assert pairs == {
        ("native", "native"),
        ("native", "xqa"),
        ("native", "trtllm-gen"),
        ("native-sink", "xqa"),
        ("native-dcp", "native"),
        ("native-dcp", "trtllm-gen"),
        ("trtllm-gen", "trtllm-gen"),
    }
    assert {got["argument"] for got in answers if not got["ok"]} == set(ARGUMENTS)
    assert len({case["sm"] for case in asked}) == 12
    assert sum(not doubts(case) for case in asked) > 2000


def test_the_oracle_stands_alone() -> None:
    tree = ast.parse((Path(__file__).parent / "seed_oracle.py").read_text())
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"random", "collections.abc", "typing"}
