"""What the seed (vLLM's FlashInfer backend) resolves to, written a second time from the documents.

Plain if/else, no import of pageant, so that the rows table and this file can only agree by both
being right. `answer` gives the JSON of `pageant explain --json --kernels flashinfer` (without
`refused` and `reason`), `cases` random questions, `doubts` the readings below that touch a case.
Rules name their source: S7 = seed-behaviour.md, C3 = contracts.md section 3, D2 = design.md
section 2, `seed 941` = line of the seed's text.

Readings, where the documents leave a choice (the names are those `doubts` returns):

- heads: query heads that KV heads do not divide would reach the native kernels (C3 row 4, S7),
  which cannot serve them; refused as q_heads, which D2 lists and nothing else uses.
- v_head_dim: K and V sizes that differ are refused as head_dim (the seed has one head size).
- layout: a layout outside the SM10x pair is refused as cache, D2 having no argument for it.
  Elsewhere every layout is taken (S4), LHBNC too, though FlashInfer has no name for it.
- non-causal: `non_causal_drafts` is use_non_causal, which the seed reads for the graph level alone
  (seed 1009). Kernels, threshold and draft reuse stay those of causal batches, although on SM10x a
  non-causal batch goes to the native prefill whole. With DCP refused as dcp, with nvfp4 as cache.
- cap: "every derived report follows the corrected kernel" covers lens_mismatch and page_sizes too.
- q-dtype: it is the seed's, even where the native kernel left cannot read fp8 queries.
- nvfp4-dcp: accepted; the seed resolves it (trtllm-gen, DCP prefill wrapper) and fails in forward.
- big-pages: pages of 128 and more stay legal under DCP and with non-causal drafts on SM10x, where
  prefill is then native; the seed's check looks at decode alone (seed 818).
- adaptive: never refused. Where lengths may not mismatch, vLLM rejects it before asking us.
- alibi-dcp: accepted; D2 names no refusal, though native kernels would see local positions.
- invariant: not refused; it takes the table kernels away (C3), and so sinks and nvfp4.
"""

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

# Key: usual values, the first the default (D2); then values that some or every device refuses.
CHOICES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "sm": (("90", "100", "120", "80", "103", "100", "121", "86", "87", "89", "110"), ("75", "cpu")),
    "head_dim": ((128, 64, 256, 512), (20, 40, 80, 96)),
    "page_size": ((16, 32, 64), (1, 8, 48, 128, 128, 256, 512)),
    "dtype": (("bfloat16", "float16"), ("float32",)),
    "cache": (
        ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bf16", "fp16"),
        ("nvfp4", "nvfp4_4over6", "fp8_e4m3_token_head", "int8"),
    ),
    "layout": (("LBHNC", "BLHNC"), ("LBNHC", "BLNHC", "LHBNC", "BHLNC")),
    "dcp": ((1,), (2, 4)),
    "sinks": ((False,), (True,)),
    "window": ((None,), (128, 4096)),
    "soft_cap": ((0,), (30, 50.0)),
    "alibi": ((False,), (True,)),
    "spec": ((0, 1, 3, 7), (2,)),
    "non_causal_drafts": ((False,), (True,)),
    "adaptive": ((False, False, True), (True,)),
    "invariant": ((False,), (True,)),
    "q_quant": ((True,), (False,)),
    "table_kernels": (("auto", "on"), ("off",)),
    "cubins": ((True,), (False,)),
}
HEADS = ((32, 8), (8, 1), (16, 16), (24, 4), (7, 1), (64, 8), (5, 5))
ODD_HEADS = ((32, 6), (8, 16), (7, 2))
DEFAULTS: Case = {key: usual[0] for key, (usual, _) in CHOICES.items()}
DEFAULTS |= {"q_heads": 32, "kv_heads": 8, "v_head_dim": None}  # None: head_dim
# The order D2 lists them in; the first refused one is named.
ARGUMENTS = (
    *("sm", "dtype", "head_dim", "page_size", "cache", "sinks"),
    *("soft_cap", "alibi", "dcp", "q_heads", "q_quant"),
)
NATIVE = "flashinfer.native"
NATIVE_SINK = "flashinfer.native-sink"
NATIVE_DCP = "flashinfer.native-dcp"
XQA = "flashinfer.xqa"
TRTLLM_GEN = "flashinfer.trtllm-gen"


def answer(case: Case) -> Case:
    """The seed's answer to one case; a refusal also lists every argument refused on its own."""
    c = {**DEFAULTS, **case}
    wrong = refused(c)
    if wrong:
        return {"ok": False, "argument": wrong[0], "arguments": wrong}
    return {
        "ok": True,
        "prefill": {"kernel": prefill_kernel(c), "q_dtype": q_dtype(c, prefill=True)},
        "decode": {"kernel": decode_kernel(c), "q_dtype": q_dtype(c, prefill=False)},
        "decode_threshold": decode_threshold(c),
        "cuda_graph": cuda_graph(c),
        "varlen_graph_max_q": varlen_graph_max_q(c),
        "lens_mismatch": reads_device_lengths(c),  # S35
        "page_sizes": page_sizes(c),
        "layouts": ["LBHNC", "BLHNC"] if is_sm10x(c) else None,  # S4
        "draft_reuse": reads_device_lengths(c),  # S30
    }


def capability(c: Case) -> tuple[int, int]:
    """Compute capability, (0, 0) on a CPU."""
    return (0, 0) if c["sm"] == "cpu" else divmod(int(c["sm"]), 10)


def is_sm10x(c: Case) -> bool:
    return capability(c)[0] == 10


def is_xqa_arch(c: Case) -> bool:
    """C3: SM90 exactly, or the 12.x family."""
    return capability(c) == (9, 0) or capability(c)[0] == 12


def cache_kind(c: Case) -> str:
    """The cache format as the seed sees it: 'auto', 'fp8…' or 'nvfp4…'."""
    # S40: unquantised counts as "auto" everywhere.
    return "auto" if c["cache"] in ("auto", "fp16", "bf16") else c["cache"]


def capped(c: Case) -> bool:
    """Whether a feature is asked for that neither XQA nor trtllm-gen has (D2)."""
    return bool(c["soft_cap"]) or bool(c["alibi"])


def heads_divide(c: Case) -> bool:
    return c["kv_heads"] > 0 and c["q_heads"] % c["kv_heads"] == 0


def supports_table(c: Case, *, prefill: bool) -> bool:
    """C3, supports_trtllm_attention(is_prefill)."""
    if c["invariant"] or not c["cubins"]:
        return False
    if is_xqa_arch(c):
        return not prefill
    return is_sm10x(c)


def can_use_table_decode(c: Case) -> bool:
    """C3, can_use_trtllm_attention(hq, hkv, is_prefill=False)."""
    forced_off = c["table_kernels"] == "off"
    return not forced_off and supports_table(c, prefill=False) and heads_divide(c)


def seed_decode_kernel(c: Case) -> str:
    """S7, before D2's corrections."""
    if not can_use_table_decode(c):
        return NATIVE
    if is_sm10x(c):
        return TRTLLM_GEN
    # XQA returns no LSE, so no DCP (seed 846); its head sizes: seed 579.
    if c["dcp"] > 1 or not (16 <= c["head_dim"] <= 256 and c["head_dim"] % 16 == 0):
        return NATIVE
    return XQA


def decode_kernel(c: Case) -> str:
    # D2: soft cap and ALiBi never go to XQA or trtllm-gen.
    return NATIVE if capped(c) else seed_decode_kernel(c)


def use_table_prefill(c: Case) -> bool:
    """C3, use_trtllm_attention(is_prefill=True): rows 1 to 11, first match wins."""
    force = {"auto": None, "on": True, "off": False}[c["table_kernels"]]
    if c["page_size"] >= 128:
        force = True  # seed 1374
    if force is False:  # row 1
        return False
    if c["dcp"] > 1:  # row 2
        return False
    if not supports_table(c, prefill=True):  # row 3
        return False
    if not heads_divide(c):  # row 4
        return False
    # Row 5 is about decode.
    if q_dtype(c, prefill=True) == "float8_e4m3fn":  # row 6: the platform's fp8, never e5m2
        return True
    if c["sinks"]:  # row 7
        return True
    if force is None:  # row 8
        return cache_kind(c) == "auto"
    return True  # row 11


def prefill_kernel(c: Case) -> str:
    """S8."""
    if use_table_prefill(c) and not capped(c):  # D2: trtllm-gen has neither cap nor ALiBi
        return TRTLLM_GEN
    if c["dcp"] > 1:  # seed 1209: before sinks are looked at
        return NATIVE_DCP
    if c["sinks"] and is_xqa_arch(c):  # seed 1216
        return NATIVE_SINK
    return NATIVE


def q_dtype(c: Case, *, prefill: bool) -> str:
    """S6; get_q_data_type, seed 935."""
    kind = cache_kind(c)
    if not c["q_quant"]:
        return c["dtype"]
    if kind.startswith("fp8"):
        # Whatever the decode kernel turns out to be: only "off" is looked at (seed 955).
        if is_xqa_arch(c) and not prefill and c["table_kernels"] != "off":
            return c["dtype"]
        if capability(c) == (9, 0) or is_sm10x(c):
            return "float8_e5m2" if kind == "fp8_e5m2" else "float8_e4m3fn"
        return c["dtype"]
    if kind.startswith("nvfp4"):
        return "float8_e4m3fn"
    return c["dtype"]


def decode_threshold(c: Case) -> int:
    """S13, C1 _init_reorder_batch_threshold."""
    return 1 if c["dcp"] > 1 or decode_kernel(c) == NATIVE else 1 + c["spec"]


def cuda_graph(c: Case) -> str:
    """S10, C3; D2: a native decode has single-token graphs."""
    if c["dcp"] > 1 or decode_kernel(c) == NATIVE:
        return "UNIFORM_SINGLE_TOKEN_DECODE"
    if c["non_causal_drafts"] and not is_xqa_arch(c):
        return "UNIFORM_SINGLE_TOKEN_DECODE"
    return "UNIFORM_BATCH"


def varlen_graph_max_q(c: Case) -> int | None:
    """S10, seed 1017: trtllm-gen with adaptive verification, and only past the uniform gate."""
    if cuda_graph(c) != "UNIFORM_BATCH" or decode_kernel(c) != TRTLLM_GEN:
        return None
    return 1 + c["spec"] if c["adaptive"] and c["spec"] > 0 else None


def reads_device_lengths(c: Case) -> bool:
    """S35, seed 471; and S30, seed 865: the same condition."""
    return decode_kernel(c) == TRTLLM_GEN and c["dcp"] == 1


def page_sizes(c: Case) -> list[int]:
    """S2; D2: with a cap or ALiBi no kernel is left for the large ones."""
    large = decode_kernel(c) == TRTLLM_GEN and c["q_heads"] // c["kv_heads"] > 1
    return [16, 32, 64, 128, 256, 512, 1024] if large else [16, 32, 64]


def refused(c: Case) -> list[str]:
    """Every argument that something refuses, in the order of ARGUMENTS."""
    found = {
        "sm": not (8, 0) <= capability(c) <= (12, 1),  # S1
        "dtype": c["dtype"] not in ("float16", "bfloat16"),  # S1
        "head_dim": c["head_dim"] not in (64, 128, 256, 512)  # S1
        or c["v_head_dim"] not in (None, c["head_dim"]),
        "page_size": page_size_refused(c),
        "cache": cache_refused(c),
        "sinks": c["sinks"] and sinks_refused(c),
        "soft_cap": bool(c["soft_cap"]) and no_kernel_left(c),
        "alibi": bool(c["alibi"]) and no_kernel_left(c),
        "dcp": c["dcp"] > 1 and c["non_causal_drafts"],  # S42
        "q_heads": not heads_divide(c),
        "q_quant": c["cache"].startswith("nvfp4") and not c["q_quant"],  # S41
    }
    return [name for name in ARGUMENTS if found[name]]


def page_size_refused(c: Case) -> bool:
    """S2, of the seed's own decode kernel: a cap with large pages is refused as a cap (D2)."""
    if c["page_size"] in (16, 32, 64):
        return False
    if c["page_size"] not in (128, 256, 512, 1024):
        return True
    return not (is_sm10x(c) and can_use_table_decode(c) and c["q_heads"] // c["kv_heads"] > 1)


def cache_refused(c: Case) -> bool:
    cache, layout = c["cache"], c["layout"]
    if is_sm10x(c) and layout not in ("LBHNC", "BLHNC"):  # S4
        return True
    if cache in ("fp16", "bf16"):  # S40
        return {"fp16": "float16", "bf16": "bfloat16"}[cache] != c["dtype"]
    if cache in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):  # S1
        return False
    if cache in ("nvfp4", "nvfp4_4over6"):
        if c["non_causal_drafts"]:  # S42
            return True
        # S26, seed 781: SM10x with both phases' table kernels.
        both = supports_table(c, prefill=True) and supports_table(c, prefill=False)
        return not (is_sm10x(c) and both and c["table_kernels"] != "off")
    return True  # S1: int8, per-token-head and whatever else the seed has no name for


def sinks_refused(c: Case) -> bool:
    if c["dcp"] > 1 or c["table_kernels"] == "off":  # D2; S3, seed 531
        return True
    if is_xqa_arch(c):
        # S3; D2: head size 512 decodes natively, where the sink would be dropped.
        return not supports_table(c, prefill=False) or c["head_dim"] > 256
    return not (supports_table(c, prefill=False) and supports_table(c, prefill=True))  # S3


def no_kernel_left(c: Case) -> bool:
    """D2: what keeps a soft cap or ALiBi from the native kernels."""
    return bool(c["sinks"]) or c["cache"].startswith("nvfp4") or c["page_size"] >= 128


def doubts(case: Case) -> list[str]:
    """Names of the readings in the docstring above that this case's answer may rest on."""
    c = {**DEFAULTS, **case}
    fp8_q = [q_dtype(c, prefill=phase).startswith("float8") for phase in (True, False)]
    kernels = [prefill_kernel(c), decode_kernel(c)]
    fa3 = capability(c) == (9, 0) and c["head_dim"] <= 256 and not c["alibi"]
    odd_layout = c["layout"] not in ("LBHNC", "BLHNC") if is_sm10x(c) else c["layout"] == "LHBNC"
    touched = {
        "heads": not heads_divide(c),
        "v_head_dim": c["v_head_dim"] not in (None, c["head_dim"]),
        "layout": odd_layout,
        "non-causal": c["non_causal_drafts"]
        and (is_sm10x(c) or c["dcp"] > 1 or c["cache"].startswith("nvfp4")),
        "cap": capped(c) and seed_decode_kernel(c) == TRTLLM_GEN,
        "q-dtype": any(
            q and "native" in k and not fa3 for q, k in zip(fp8_q, kernels, strict=True)
        ),
        "nvfp4-dcp": c["cache"].startswith("nvfp4") and c["dcp"] > 1,
        "big-pages": is_sm10x(c) and (c["dcp"] > 1 or c["non_causal_drafts"]),
        "adaptive": c["adaptive"] and not reads_device_lengths(c),
        "alibi-dcp": c["alibi"] and c["dcp"] > 1,
        "invariant": bool(c["invariant"]),
    }
    return [name for name, true in touched.items() if true]


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` random cases: one in six takes anything, the rest few of the unusual values.

    A third of the keys that hold their default are left out, as a user would.
    """
    rng = random.Random(seed)
    for _ in range(count):
        unusual = rng.choice((0.03, 0.03, 0.06, 0.06, 0.12, 0.5))
        case: Case = {
            key: rng.choice(rest if rng.random() < unusual else usual)
            for key, (usual, rest) in CHOICES.items()
        }
        odd = rng.random() < unusual / 2
        case["q_heads"], case["kv_heads"] = rng.choice(ODD_HEADS if odd else HEADS)
        case["v_head_dim"] = rng.choice((64, 128)) if rng.random() < unusual / 4 else None
        if rng.random() > unusual:  # combinations that chance would rarely make
            if case["cache"] in ("bf16", "fp16"):
                case["dtype"] = "bfloat16" if case["cache"] == "bf16" else "float16"
            if is_sm10x(case) and rng.random() < 0.25:
                case["cache"] = rng.choice(("nvfp4", "nvfp4_4over6"))
            if is_sm10x(case) and rng.random() < 0.2:
                case["page_size"] = rng.choice((128, 256, 1024))
        yield {
            key: value
            for key, value in case.items()
            if key == "sm" or value != DEFAULTS[key] or rng.random() < 0.67
        }
