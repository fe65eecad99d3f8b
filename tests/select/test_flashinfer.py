"""What vLLM's FlashInfer backend resolves to, decision by decision, and our corrections."""

import itertools
from typing import Any

import pytest

from pageant.device import FAMILIES
from pageant.select.cases import answer_case, explain_case
from pageant.types import ArgumentError

XQA, SM10X = ("90", "120", "121"), ("100", "103")
NATIVE_ONLY = ("80", "86", "87", "89", "110")
ALL = (*NATIVE_ONLY, *XQA, *SM10X)
SMALL, LARGE = [16, 32, 64], [16, 32, 64, 128, 256, 512, 1024]
SINGLE, UNIFORM = "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"


def ask(sm: str, **case: Any) -> dict[str, Any]:
    return answer_case({"sm": sm, "kernels": "flashinfer", **case})


def kernels(sm: str, **case: Any) -> tuple[str, str]:
    answer = ask(sm, **case)
    assert answer["ok"], answer["reason"]
    names = (answer[phase]["kernel"] for phase in ("prefill", "decode"))
    prefill, decode = (name.removeprefix("flashinfer.") for name in names)
    return prefill, decode


def queries(sm: str, **case: Any) -> tuple[str, str]:
    answer = ask(sm, **case)
    return answer["prefill"]["q_dtype"], answer["decode"]["q_dtype"]


def refused(sm: str, **case: Any) -> str:
    answer = ask(sm, **case)
    assert not answer["ok"], answer
    return str(answer["argument"])


@pytest.mark.parametrize("sm", ALL)
def test_plain(sm: str) -> None:
    decode = "xqa" if sm in XQA else "trtllm-gen" if sm in SM10X else "native"
    assert kernels(sm) == ("trtllm-gen" if sm in SM10X else "native", decode)
    answer = ask(sm, spec=3)
    assert answer["decode_threshold"] == (1 if decode == "native" else 4)
    assert answer["cuda_graph"] == (SINGLE if decode == "native" else UNIFORM)
    assert answer["varlen_graph_max_q"] is None
    assert answer["lens_mismatch"] == answer["draft_reuse"] == (sm in SM10X)
    assert answer["page_sizes"] == (LARGE if sm in SM10X else SMALL)
    assert answer["layouts"] == (["LBHNC", "BLHNC"] if sm in SM10X else None)


@pytest.mark.parametrize("sm", ["cpu", "75"])
def test_devices_it_does_not_serve(sm: str) -> None:
    assert refused(sm) == "sm"


@pytest.mark.parametrize("sm", ALL)
def test_models_it_does_not_serve(sm: str) -> None:
    assert refused(sm, dtype="float32") == "dtype"
    assert refused(sm, head_dim=96) == "head_dim"
    assert refused(sm, head_dim=128, v_head_dim=64) == "head_dim"
    assert refused(sm, q_heads=12) == "q_heads"
    assert refused(sm, cache="int8") == "cache"
    assert refused(sm, cache="fp8_e4m3_token_head") == "cache"
    assert refused(sm, page_size=48) == "page_size"


@pytest.mark.parametrize("sm", ALL)
@pytest.mark.parametrize(
    ("dtype", "fmt", "other"), [("bfloat16", "bf16", "fp16"), ("float16", "fp16", "bf16")]
)
def test_an_unquantised_cache_has_the_type_of_the_model(
    sm: str, dtype: str, fmt: str, other: str
) -> None:
    assert ask(sm, dtype=dtype, cache=fmt) == ask(sm, dtype=dtype, cache="auto")
    assert refused(sm, dtype=dtype, cache=other) == "cache"
    assert refused(sm, dtype=dtype, cache="fp32") == "cache"


@pytest.mark.parametrize("page_size", LARGE[3:])
def test_large_pages_need_table_kernels_and_groups(page_size: int) -> None:
    for sm in (*NATIVE_ONLY, *XQA):
        assert refused(sm, page_size=page_size) == "page_size"
    for sm in SM10X:
        assert kernels(sm, page_size=page_size) == ("trtllm-gen", "trtllm-gen")
        for less in (
            {"q_heads": 8},
            {"cubins": False},
            {"table_kernels": "off"},
            {"invariant": True},
        ):
            assert refused(sm, page_size=page_size, **less) == "page_size"
            assert ask(sm, **less)["page_sizes"] == SMALL
        assert refused(sm, page_size=page_size, layout="LBNHC") == "cache"


def test_large_pages_force_table_kernels_for_prefill() -> None:
    for cache, q_quant in (("fp8", False), ("fp8_e5m2", True)):
        case = {"cache": cache, "q_quant": q_quant}
        assert kernels("100", page_size=64, **case) == ("native", "trtllm-gen")
        assert kernels("100", page_size=128, **case) == ("trtllm-gen", "trtllm-gen")
        assert kernels("100", table_kernels="on", **case) == ("trtllm-gen", "trtllm-gen")
        assert kernels("100", sinks=True, **case) == ("trtllm-gen", "trtllm-gen")


@pytest.mark.parametrize("sm", ALL)
def test_types_of_queries(sm: str) -> None:
    e4m3, e5m2, model = "float8_e4m3fn", "float8_e5m2", "bfloat16"
    fp8_prefill, fp8_decode = sm in ("90", *SM10X), sm in SM10X
    for cache, fp8 in (("fp8_e4m3", e4m3), ("fp8_e5m2", e5m2)):
        expected = (fp8 if fp8_prefill else model, fp8 if fp8_decode else model)
        assert queries(sm, cache=cache) == expected
        assert queries(sm, cache=cache, soft_cap=30.0) == expected
        assert queries(sm, cache=cache, cubins=False) == expected
        assert queries(sm, cache=cache, q_quant=False) == (model, model)
        # Forced off, decode is like prefill: XQA is out of the question.
        assert queries(sm, cache=cache, table_kernels="off") == (expected[0], expected[0])
    assert queries(sm, dtype="float16") == ("float16", "float16")


@pytest.mark.parametrize("cache", ["nvfp4", "nvfp4_4over6"])
def test_nvfp4_is_for_both_table_kernels(cache: str) -> None:
    for sm in (*NATIVE_ONLY, *XQA):
        assert refused(sm, cache=cache) == "cache"
    for sm in SM10X:
        assert kernels(sm, cache=cache) == ("trtllm-gen", "trtllm-gen")
        assert queries(sm, cache=cache) == ("float8_e4m3fn", "float8_e4m3fn")
        assert kernels(sm, cache=cache, sinks=True) == ("trtllm-gen", "trtllm-gen")
        assert kernels(sm, cache=cache, dcp=2) == ("native-dcp", "trtllm-gen")
        assert refused(sm, cache=cache, q_quant=False) == "q_quant"
        assert refused(sm, cache=cache, non_causal_drafts=True) == "cache"
        for less in ({"cubins": False}, {"table_kernels": "off"}, {"invariant": True}):
            assert refused(sm, cache=cache, **less) == "cache"
            assert refused(sm, cache=cache, dcp=2, **less) == "cache"


@pytest.mark.parametrize("sm", [*XQA, *SM10X])
@pytest.mark.parametrize("less", [{"cubins": False}, {"table_kernels": "off"}, {"invariant": True}])
def test_without_table_kernels(sm: str, less: dict[str, Any]) -> None:
    assert kernels(sm, **less) == ("native", "native")
    answer = ask(sm, spec=3, adaptive=True, **less)
    assert (answer["decode_threshold"], answer["cuda_graph"]) == (1, SINGLE)
    assert not answer["lens_mismatch"]
    assert not answer["draft_reuse"]
    assert answer["varlen_graph_max_q"] is None
    assert refused(sm, sinks=True, **less) == "sinks"


@pytest.mark.parametrize("sm", ALL)
def test_several_ranks(sm: str) -> None:
    decode = "trtllm-gen" if sm in SM10X else "native"
    assert kernels(sm, dcp=2) == ("native-dcp", decode)
    answer = ask(sm, dcp=2, spec=3, adaptive=True)
    assert (answer["decode_threshold"], answer["cuda_graph"]) == (1, SINGLE)
    assert not answer["lens_mismatch"]
    assert not answer["draft_reuse"]
    assert answer["varlen_graph_max_q"] is None
    assert refused(sm, dcp=2, sinks=True) == "sinks"
    assert refused(sm, dcp=2, non_causal_drafts=True) == "dcp"
    assert kernels(sm, dcp=2, soft_cap=30.0) == ("native-dcp", "native")
    assert kernels(sm, dcp=2, alibi=True) == ("native-dcp", "native")


@pytest.mark.parametrize("sm", ALL)
def test_sinks(sm: str) -> None:
    if sm in NATIVE_ONLY:
        assert refused(sm, sinks=True) == "sinks"
        return
    expected = ("native-sink", "xqa") if sm in XQA else ("trtllm-gen", "trtllm-gen")
    assert kernels(sm, sinks=True) == expected
    if sm in XQA:
        assert refused(sm, sinks=True, head_dim=512) == "sinks"
    else:
        assert kernels(sm, sinks=True, head_dim=512) == expected


@pytest.mark.parametrize("sm", ALL)
@pytest.mark.parametrize("feature", [{"soft_cap": 30.0}, {"alibi": True}])
def test_cap_and_alibi_go_to_native_kernels_and_so_do_the_reports(
    sm: str, feature: dict[str, Any]
) -> None:
    assert kernels(sm, **feature) == ("native", "native")
    answer = ask(sm, spec=3, adaptive=True, **feature)
    assert (answer["decode_threshold"], answer["cuda_graph"]) == (1, SINGLE)
    assert not answer["lens_mismatch"]
    assert not answer["draft_reuse"]
    assert answer["varlen_graph_max_q"] is None
    assert answer["page_sizes"] == SMALL
    (argument,) = feature
    if sm not in NATIVE_ONLY:
        assert refused(sm, sinks=True, **feature) == argument
    if sm in SM10X:
        assert refused(sm, cache="nvfp4", **feature) == argument
        assert refused(sm, page_size=128, **feature) == argument
        assert refused(sm, page_size=128, dcp=2, **feature) == argument


@pytest.mark.parametrize("sm", ALL)
def test_head_size_512(sm: str) -> None:
    decode = "trtllm-gen" if sm in SM10X else "native"
    assert kernels(sm, head_dim=512)[1] == decode
    answer = ask(sm, head_dim=512, spec=3)
    assert answer["decode_threshold"] == (4 if sm in SM10X else 1)
    assert answer["cuda_graph"] == (UNIFORM if sm in SM10X else SINGLE)


@pytest.mark.parametrize("sm", [*XQA, *SM10X])
def test_non_causal_drafts(sm: str) -> None:
    answer = ask(sm, spec=3, non_causal_drafts=True, adaptive=True)
    assert answer["cuda_graph"] == (UNIFORM if sm in XQA else SINGLE)
    assert answer["decode_threshold"] == 4
    assert answer["varlen_graph_max_q"] is None
    assert answer["draft_reuse"] == answer["lens_mismatch"] == (sm in SM10X)


def test_lengths_read_on_the_device() -> None:
    for sm in ALL:
        expected = 4 if sm in SM10X else None
        assert ask(sm, spec=3, adaptive=True)["varlen_graph_max_q"] == expected
        assert ask(sm, adaptive=True)["varlen_graph_max_q"] is None


def explained(sm: str, **case: Any) -> Any:
    return explain_case({"sm": sm, "kernels": "flashinfer", **case})


def test_other_reports() -> None:
    fp8 = explained("100", cache="fp8")
    assert fp8.fused_out_formats == ("fp8_e4m3", "nvfp4")
    assert explained("100", cache="nvfp4").fused_out_formats == ("fp8_e4m3",)
    assert explained("100").fused_out_formats == ()
    assert explained("100", cache="fp8", q_quant=False).fused_out_formats == ()
    assert explained("100", cache="fp8", dcp=2).fused_out_formats == ()
    assert explained("90", cache="fp8").fused_out_formats == ()
    assert fp8.takes_fp8_query
    assert not explained("100").takes_fp8_query
    assert not explained("100", cache="fp8", q_quant=False).takes_fp8_query
    assert not explained("100", cache="fp8", soft_cap=30.0).takes_fp8_query
    assert not explained("90", cache="fp8").takes_fp8_query
    assert [explained(sm).serves_sinks for sm in ("80", "90", "100")] == [False, True, True]
    assert not explained("90", head_dim=512).serves_sinks
    assert not explained("100", dcp=2).serves_sinks
    assert explained("80").serves_non_causal
    assert not explained("80", dcp=2).serves_non_causal
    assert not explained("100", cache="nvfp4").serves_non_causal
    assert explained("100", cache="nvfp4").nvfp4_cache_shape == (16, 16, 72)
    assert [explained(sm).layers_may_differ for sm in ("80", "90", "100")] == [False, False, True]
    assert explained("100", spec=3).graph_tokens(max_requests=64) == 256
    assert explained("100", spec=3).graph_tokens(max_requests=64, largest=200) == 200
    assert fp8.nvfp4_cache_shape is None


@pytest.mark.parametrize("sm", ["80", "90", "100"])
def test_page_sizes_are_those_that_run(sm: str) -> None:
    axes = itertools.product(("auto", "fp8_e5m2", "nvfp4"), (1, 2), (False, True), (8, 32))
    for cache, dcp, sinks, q_heads in axes:
        case = {"cache": cache, "dcp": dcp, "sinks": sinks, "q_heads": q_heads}
        answer = ask(sm, **case)
        runs = [size for size in LARGE if ask(sm, **case, page_size=size)["ok"]]
        assert not answer["ok"] or answer["page_sizes"] == runs


def test_one_kernel_by_name() -> None:
    """It runs or is refused; the other phase is FlashInfer's too: they have one plan."""
    for sm, name in (("90", "xqa"), ("90", "native-sink"), ("100", "trtllm-gen")):
        case = {"sm": sm, "kernels": f"flashinfer.{name}", "sinks": name == "native-sink"}
        answer = answer_case(case)
        kernels = answer["prefill"]["kernel"], answer["decode"]["kernel"]
        assert f"flashinfer.{name}" in kernels
        assert all(kernel.startswith("flashinfer.") for kernel in kernels)
    answer = answer_case({"sm": "80", "kernels": "flashinfer.xqa"})
    assert (answer["ok"], answer["argument"]) == (False, "sm")


@pytest.mark.parametrize("family", FAMILIES)
def test_refusals_name_only_arguments_there_are(family: str) -> None:
    allowed = {"sm", "dtype", "head_dim", "page_size", "cache", "sinks", "soft_cap", "alibi",
               "dcp", "q_heads", "q_quant"}  # fmt: skip
    axes = {
        "dtype": ("float16", "float32"), "head_dim": (96, 512), "page_size": (16, 128),
        "cache": ("auto", "fp8", "nvfp4", "bf16"), "sinks": (False, True), "dcp": (1, 2),
        "soft_cap": (0, 30.0), "table_kernels": ("auto", "off"), "cubins": (True, False),
        "q_quant": (True, False), "non_causal_drafts": (False, True),
    }  # fmt: skip
    for values in itertools.product(*axes.values()):
        case = dict(zip(axes, values, strict=True))
        try:
            answer = explain_case({"sm": family, "kernels": "flashinfer", **case})
            said = answer.support.argument
        except ArgumentError as error:
            said = error.argument
        assert said is None or said in allowed, case
