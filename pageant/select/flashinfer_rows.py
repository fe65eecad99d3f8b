"""What vLLM's FlashInfer backend (0.31) decides, as rows: its five kernels. Data only.

"Table kernels" read the page table themselves: XQA (sm90, sm12x) and trtllm-gen (sm10x). The
native kernels are planned on the host. Where that backend drops something a kernel does not know
(soft cap, ALiBi, sinks), the rows refuse instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pageant.select.needs import FP8, NVFP4, ONE_RANK, SEVERAL_RANKS
from pageant.select.row import QueryRule, Reports, Row

SM10X = ("sm100", "sm103")
XQA_FAMILIES = ("sm90", "sm120", "sm121")
OTHERS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm110", "sm120", "sm121")
PAGES = (16, 32, 64)
TABLE_PAGES = (*PAGES, 128, 256, 512, 1024)
HEAD_MAJOR = ("LBHNC", "BLHNC")  # one head's part of a page lies together

# Features other kernels need not know of: options of FlashInfer's, and things it serves only apart.
FLASHINFER_ONLY = frozenset(
    {
        "table_kernels_off",
        "no_cubins",
        "large_pages_of_lone_heads",
        "large_pages_without_table_kernels",
        "other_16_bit_cache",
        "nvfp4_without_table_kernels",
        "nvfp4_non_causal",
        "fp8_left_to_native",
        "sinks_on_ranks",
        "non_causal_on_ranks",
        "nvfp4_unquantized_query",
        "quantized_out_of_plain_cache",
        "quantized_out_of_plain_query",
        "nvfp4_out_of_nvfp4_cache",
        "all_inputs",
    }
)
TABLE_KERNELS_WANTED = {"table_kernels_off", "no_cubins"}
ON_RANKS = {"sinks_on_ranks", "non_causal_on_ranks"}
LARGE_PAGES = {"large_pages_of_lone_heads", "large_pages_without_table_kernels"}
# Pairs are listed where another field of the row refuses one half of them: one reason is enough.
PAIRS = FLASHINFER_ONLY - {*TABLE_KERNELS_WANTED, "other_16_bit_cache", "all_inputs"}

EVERY = {"window", "unquantized_query", "adaptive", "non_causal_drafts", "fp32_over_quantized"}
NATIVE = PAIRS | EVERY | TABLE_KERNELS_WANTED
NATIVE |= {"soft_cap", "alibi", "lse", "invariant", "non_causal"}
NATIVE_ON_RANKS = NATIVE - {"non_causal_on_ranks"}
NATIVE_DCP = NATIVE_ON_RANKS - LARGE_PAGES - {"nvfp4_without_table_kernels", "nvfp4_non_causal"}
NATIVE_SINK = PAIRS | EVERY | {"sinks", "non_causal"}
TABLE = PAIRS | EVERY | {"mixed_windows", "sinks"}
# The kernel for nvfp4 caches and quantised outputs: its pairs are all its own.
TRTLLM = TABLE - PAIRS | {"large_pages_without_table_kernels", "nvfp4_without_table_kernels"}

SINGLE_TOKEN = Reports(
    graph="UNIFORM_SINGLE_TOKEN_DECODE",
    takes_drafts=False,
    lens_mismatch=False,
    draft_reuse=False,
    varlen_graph="never",
    fp8_query="never",
)
UNIFORM = replace(SINGLE_TOKEN, graph="UNIFORM_BATCH", takes_drafts=True)
ON_DEVICE = replace(
    UNIFORM, lens_mismatch=True, draft_reuse=True, varlen_graph="adaptive", fp8_query="planned"
)
DRAFTER = replace(ON_DEVICE, graph="UNIFORM_SINGLE_TOKEN_DECODE", varlen_graph="never")

# XQA takes 16-bit queries only, and is assumed unless table kernels are off; fa3 (sm90) and
# trtllm-gen compute on fp8 tensor cores, so queries take the cache's type.
QUERIES = (
    QueryRule(needs=frozenset({"unquantized_query"}), dtype="model"),
    QueryRule(
        phases=("decode",),
        families=XQA_FAMILIES,
        unless=frozenset({"table_kernels_off"}),
        dtype="model",
    ),
    QueryRule(families=("sm90", *SM10X), formats=("fp8_e4m3",), dtype="float8_e4m3fn"),
    QueryRule(families=("sm90", *SM10X), formats=("fp8_e5m2",), dtype="float8_e5m2"),
    QueryRule(formats=NVFP4, dtype="float8_e4m3fn"),
)

COMMON: dict[str, Any] = {
    "owner": "flashinfer",
    "packages": ("flashinfer",),
    "auto": SM10X,
    "dtypes": ("float16", "bfloat16"),
    "head_dims": (64, 128, 256, 512),
    "page_sizes": PAGES,
    "formats": ("fp16", "bf16", *FP8),
    "layouts": None,
    "ranks": (ONE_RANK,),
    "out_formats": ("model",),
    "reports": SINGLE_TOKEN,
    "queries": QUERIES,
}
VENDOR = "pageant.kernels.vendor.flashinfer"
SM10X_ONLY: dict[str, Any] = {**COMMON, "families": SM10X, "layouts": HEAD_MAJOR}
OTHERS_ONLY: dict[str, Any] = {**COMMON, "families": OTHERS}
XQA_ONLY: dict[str, Any] = {**COMMON, "families": XQA_FAMILIES}
WITH_NVFP4: dict[str, Any] = {"formats": (*COMMON["formats"], *NVFP4), "page_sizes": TABLE_PAGES}

TRTLLM_GEN: dict[str, Any] = {
    **SM10X_ONLY,
    **WITH_NVFP4,
    "name": "flashinfer.trtllm-gen",
    "out_formats": ("model", "fp8_e4m3", "nvfp4"),
}
NATIVE_PREFILL: dict[str, Any] = {
    "name": "flashinfer.native",
    "kernel": f"{VENDOR}:native_prefill",
    "phases": ("prefill",),
    "features": NATIVE,
    "because": "Many new tokens: planned on the host, one window and cap for all layers.",
}
NATIVE_DCP_PREFILL: dict[str, Any] = {
    "name": "flashinfer.native-dcp",
    "kernel": f"{VENDOR}:native_on_ranks",
    "phases": ("prefill",),
    "ranks": (SEVERAL_RANKS,),
    "features": NATIVE_DCP,
    "because": "Several ranks: context and new tokens apart, then merged by their log-sum-exp.",
}
NATIVE_DECODE: dict[str, Any] = {
    "name": "flashinfer.native",
    "kernel": f"{VENDOR}:native_decode",
    "phases": ("decode",),
    "ranks": (ONE_RANK, SEVERAL_RANKS),
    "features": NATIVE_ON_RANKS,
    "because": "One new token a request: planned on the host, without drafts or sinks.",
}

FLASHINFER_ROWS: tuple[Row, ...] = (
    Row(
        kernel=f"{VENDOR}:trtllm_prefill",
        phases=("prefill",),
        features=TRTLLM | ON_RANKS,
        because="Datacentre Blackwell: reads the page table on the device, quantises outputs.",
        **TRTLLM_GEN,
    ),
    Row(**{**SM10X_ONLY, **NATIVE_PREFILL}),
    Row(**{**OTHERS_ONLY, **NATIVE_PREFILL, "features": NATIVE | {"draft_masks"}}),
    Row(
        name="flashinfer.native-sink",
        kernel=f"{VENDOR}:native_sink",
        phases=("prefill",),
        features=NATIVE_SINK,
        because="Many new tokens with sinks: planned on the host, no soft cap.",
        **XQA_ONLY,
    ),
    Row(**{**SM10X_ONLY, **WITH_NVFP4, **NATIVE_DCP_PREFILL}),
    Row(**{**OTHERS_ONLY, **NATIVE_DCP_PREFILL}),
    Row(
        **{
            **XQA_ONLY,
            "name": "flashinfer.xqa",
            "kernel": f"{VENDOR}:xqa",
            "phases": ("decode",),
            "head_dims": (64, 128, 256),
            "features": TABLE | {"non_causal", "draft_masks"},
            "reports": UNIFORM,
            "because": "A few new tokens, drafts among them: reads the page table on the device.",
        }
    ),
    Row(
        **{
            **TRTLLM_GEN,
            "kernel": f"{VENDOR}:trtllm_decode",
            "phases": ("decode",),
            "ranks": (ONE_RANK, SEVERAL_RANKS),
            "features": TRTLLM | {"lse", "fp8_left_to_native"},
            "reports": ON_DEVICE,
            "reports_with": (
                (SEVERAL_RANKS, replace(SINGLE_TOKEN, fp8_query="planned")),
                ("non_causal_drafts", DRAFTER),
            ),
            "because": "Datacentre Blackwell: reads lengths and pages on the device, with drafts.",
        }
    ),
    Row(**{**SM10X_ONLY, **NATIVE_DECODE}),
    Row(**{**OTHERS_ONLY, **NATIVE_DECODE}),
)
