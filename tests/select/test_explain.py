import json
import re
from dataclasses import replace
from typing import Any

from pageant.ranks import ContextParallel
from pageant.select.explain import Explanation, explain, missing_in
from pageant.select.row import Row
from pageant.types import CacheSpec, Features, Options, Shape

FLAT = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
SHAPE = Shape(num_q_heads=32, num_kv_heads=8, head_dim=192, v_head_dim=128)
ANSWER_KEYS = [
    "ok", "prefill", "decode", "decode_threshold", "cuda_graph", "varlen_graph_max_q",
    "lens_mismatch", "page_sizes", "layouts", "draft_reuse", "refused",
]  # fmt: skip


def of_flashinfer(
    sm: str,
    cache: CacheSpec | None = None,
    features: Features | None = None,
    shape: Shape = FLAT,
    cubins: bool = True,
    **options: Any,
) -> Explanation:
    """What FlashInfer's backend would do on a device."""
    chosen = Options(kernels="flashinfer", **options)
    return explain(
        shape, cache, features, chosen, sm, cubins=cubins, missing=missing_in("flashinfer")
    )


def test_json_of_the_cpu() -> None:
    answer = explain(SHAPE, CacheSpec(format="fp8"), device="cpu").to_dict()
    assert list(answer) == ANSWER_KEYS
    refused = answer.pop("refused")
    assert [row["kernel"] for row in refused] == [
        "gluon_sm90.prefill",
        "triton.prefill",
        "gluon_sm90.decode",
        "gluon_sm90.decode_row_scales",
        "gluon_sm90.decode_nvfp4",
        "triton.decode",
    ]
    assert all("device of this family" in row["why"] for row in refused)
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
    }


def test_json_lists_refusals_by_phase() -> None:
    answer = of_flashinfer("sm90", table_kernels=False).to_dict()
    assert [(row["phase"], row["kernel"]) for row in answer["refused"]] == [
        ("prefill", "flashinfer.trtllm-gen"),
        ("decode", "flashinfer.xqa"),
        ("decode", "flashinfer.trtllm-gen"),
    ]
    assert answer["refused"][1]["why"] == (
        "serves no configuration with table_kernels off; would run with table_kernels auto or on"
    )


def test_json_where_nothing_runs() -> None:
    options = Options(kernels="reference", invariant=True)
    answer = explain(SHAPE, options=options).to_dict()
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
    answer = explain(
        SHAPE, CacheSpec(format="fp8"), Features(sinks=True), device="90", missing=only_reference
    )
    lines = [line.split() for line in str(answer).splitlines()]
    assert lines[0][:2] == ["device", "sm90"]
    assert "head size 192/128" in str(answer)
    assert "fp8_e4m3, 16 tokens a page" in str(answer)
    assert ["phase", "kernel", "because"] in lines
    assert ["decode", "reference.attention", "Last"] in [line[:3] for line in lines]
    assert re.search(r"decode   triton.decode +is not built", str(answer))
    assert "cpu.decode" not in str(answer)  # for another device
    assert all(line == line.rstrip() for line in str(answer).splitlines())


def only_reference(row: Row) -> str | None:
    return None if row.owner == "reference" else "is not built"


def test_text_names_the_types_of_queries_where_they_differ() -> None:
    text = str(of_flashinfer("90", CacheSpec(format="fp8"), Features(sinks=True)))
    assert "flashinfer.native-sink  float8_e4m3fn  Many" in text
    assert "flashinfer.xqa          bfloat16       A few" in text
    assert "queries" not in str(of_flashinfer("120", CacheSpec(format="fp8")))


def test_text_says_what_follows() -> None:
    options = {"speculative_tokens": 3, "adaptive": True}
    lines = str(of_flashinfer("100", **options)).splitlines()
    assert "Requests of up to 4 new tokens are decodes." in lines
    words = "CUDA graphs: UNIFORM_BATCH, of decodes that all bring the same number of tokens."
    assert words in lines
    assert "A graph also replays decodes of different lengths, up to 4 tokens." in lines
    words = "Tokens a page: 16, 32, 64, 128, 256, 512 or 1024. Layouts: LBHNC or BLHNC."
    assert words in lines
    lines = str(of_flashinfer("80", **options)).splitlines()
    assert "Tokens a page: 16, 32 or 64. Layouts: any." in lines
    assert "Requests of up to 1 new token are decodes." in lines


def test_text_says_why_prefixes_are_not_shared() -> None:
    ranks = ContextParallel(rank=0, world=2)
    for features, options, reason in (
        (Features(alibi=True), Options(context_parallel=ranks), "ALiBi on several ranks"),
        (Features(), Options(invariant=True), "invariant mode"),
        (Features(), Options(context_parallel=ranks), None),
        (Features(alibi=True), Options(), None),
        (Features(), Options(invariant=True, cascade=False), None),
    ):
        answer = explain(SHAPE, features=features, options=options)
        said = [line for line in str(answer).splitlines() if line.startswith("Prefixes")]
        assert said == ([f"Prefixes are not shared: {reason}."] if reason else [])
        assert answer.shares_prefixes == (reason is None and options.cascade)


def test_text_says_when_prefixes_are_shared_on_a_gpu() -> None:
    ranks = ContextParallel(rank=0, world=2)
    for options, said in (
        (Options(), ["Prefixes are shared in batches that bring shared_prefix_lens."]),
        (Options(cascade=False), []),
        (Options(invariant=True), ["Prefixes are not shared: invariant mode."]),
        (
            Options(context_parallel=ranks),
            ["Prefixes are not shared: several ranks, on a GPU."],
        ),
    ):
        answer = explain(SHAPE, options=replace(options, kernels="pageant"), device="sm90")
        lines = [line for line in str(answer).splitlines() if line.startswith("Prefixes")]
        assert lines == said
        assert answer.shares_prefixes == (options == Options())


def test_text_where_nothing_runs_says_which_devices_would() -> None:
    text = str(of_flashinfer("80", features=Features(sinks=True)))
    assert "refused: no prefill kernel: flashinfer.native serves no attention sinks" in text
    assert "flashinfer.native-sink  serves no device of this family; would run on sm90" in text
    assert "native-dcp" not in text  # for several ranks


def test_text_of_a_mistake_is_one_line() -> None:
    assert str(explain(SHAPE, CacheSpec(page_size=0))).startswith("refused: page_size is 0;")
    assert str(explain(SHAPE, device="sm77")).startswith("refused: sm is 'sm77';")
