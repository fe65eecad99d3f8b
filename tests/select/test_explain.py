import json

from pageant.select.explain import explain
from pageant.types import CacheSpec, Features, Options, Shape

SHAPE = Shape(num_q_heads=32, num_kv_heads=8, head_dim=192, v_head_dim=128)
ANSWER_KEYS = [
    "ok", "prefill", "decode", "decode_threshold", "cuda_graph", "varlen_graph_max_q",
    "lens_mismatch", "page_sizes", "layouts", "draft_reuse", "refused",
]  # fmt: skip


def test_json_of_the_cpu() -> None:
    answer = explain(SHAPE, CacheSpec(format="fp8"), device="cpu").to_dict()
    assert list(answer) == ANSWER_KEYS
    assert json.loads(json.dumps(answer)) == {
        "ok": True,
        "prefill": {"kernel": "cpu.prefill", "q_dtype": "bfloat16"},
        "decode": {"kernel": "cpu.decode", "q_dtype": "bfloat16"},
        "decode_threshold": 1,
        "cuda_graph": "NEVER",
        "varlen_graph_max_q": None,
        "lens_mismatch": True,
        "page_sizes": None,
        "layouts": None,
        "draft_reuse": True,
        "refused": [],
    }


def test_json_lists_refusals_by_phase() -> None:
    why = "serves no device of this family; would run on cpu"
    assert explain(SHAPE, device="sm90").to_dict()["refused"] == [
        {"kernel": "cpu.prefill", "phase": "prefill", "why": why},
        {"kernel": "cpu.decode", "phase": "decode", "why": why},
    ]


def test_json_where_nothing_runs() -> None:
    answer = explain(SHAPE, options=Options(invariant=True)).to_dict()
    assert answer == {
        "ok": False,
        "reason": "no prefill kernel: reference.attention serves no invariant mode; "
        "would run with invariant off",
        "argument": "invariant",
    }


def test_decode_takes_drafts_causal_or_not() -> None:
    for non_causal in (False, True):
        options = Options(speculative_tokens=3, non_causal_drafts=non_causal)
        assert explain(SHAPE, options=options).decode_threshold == 4


def test_text_names_device_cache_kernels_and_refusals() -> None:
    text = str(explain(SHAPE, CacheSpec(format="fp8"), Features(sinks=True), device="90"))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:2] == ["device", "sm90"]
    assert "head size 192/128" in text
    assert "fp8_e4m3, 16 tokens a page" in text
    assert ["phase", "kernel", "because"] in lines
    assert ["decode", "reference.attention", "Last"] in [line[:3] for line in lines]
    assert "cpu.decode   serves no device of this family; would run on cpu" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_text_where_nothing_runs() -> None:
    text = str(explain(SHAPE, options=Options(kernels="pageant"), device="90"))
    assert "refused: no prefill kernel: cpu.prefill serves no device of this family" in text
    assert "reference.attention  is left out by kernels='pageant'" in text


def test_text_of_a_mistake_is_one_line() -> None:
    assert str(explain(SHAPE, CacheSpec(page_size=0))).startswith("refused: page_size is 0;")
    assert str(explain(SHAPE, device="sm77")).startswith("refused: sm is 'sm77';")
