"""Which kernel, for whom, why: data only. The first row of a phase that serves every need wins.

A new kernel is a new row. Each field lists what the kernel serves; what is not listed is refused.
Families are listed one by one, never by comparison: a larger number is not a better device.
Rows whose kernel does not exist yet say what it will serve; until then they refuse.
"""

from __future__ import annotations

from typing import Any

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES
from pageant.select.flashinfer_rows import FLASHINFER_ONLY, FLASHINFER_ROWS
from pageant.select.needs import ONE_RANK, SEVERAL_RANKS
from pageant.select.row import PHASES, Owner, Phase, Reports, Row, Sizes

__all__ = ["EVERY_HEAD_DIM", "KERNELS", "NAMES", "OWNERS", "PHASES", "ROWS", "Phase", "Row"]

EVERY_FAMILY = tuple(FAMILIES)
TURING = ("sm75",)  # no bfloat16
SINCE_AMPERE = tuple(family for family in FAMILIES if family not in ("cpu", *TURING))
MODEL_DTYPES = ("float32", "float16", "bfloat16")
EVERY_FORMAT = tuple(FORMATS)
EVERY_HEAD_DIM = Sizes(16, 512, 8)

# What one softmax over masked scores can do; the things that FlashInfer alone refuses are no matter
# to other kernels.
PLAIN_FEATURES = FLASHINFER_ONLY | {
    "window",
    "mixed_windows",
    "soft_cap",
    "sinks",
    "alibi",
    "draft_masks",
    "non_causal",
    "lse",
    "fp32_over_quantized",
    "unquantized_query",
    "adaptive",
    "non_causal_drafts",
    "forced_splits",
}

# Read where they lie: lengths, offsets, tables. Any step may bring any of them.
HOST_RUN = Reports(
    graph="NEVER",
    takes_drafts=True,
    lens_mismatch=True,
    draft_reuse=True,
    varlen_graph="never",
    fp8_query="always",
)
PLANNED_ON_DEVICE = Reports(
    graph="ALWAYS",
    takes_drafts=True,
    lens_mismatch=True,
    draft_reuse=True,
    varlen_graph="always",
    fp8_query="always",
)

# What reads a page from the host: the CPU kernels, and the reference.
ON_HOST: dict[str, Any] = {
    "dtypes": MODEL_DTYPES,
    "head_dims": EVERY_HEAD_DIM,
    "page_sizes": None,
    "formats": EVERY_FORMAT,
    "layouts": None,
    "ranks": (ONE_RANK, SEVERAL_RANKS),
    "out_formats": ("model", "fp8_e4m3", "nvfp4"),
    "features": PLAIN_FEATURES,
    "reports": HOST_RUN,
}
# Own GPU kernels serve everything together.
ON_GPU: dict[str, Any] = {
    "owner": "pageant",
    "dtypes": MODEL_DTYPES,
    "head_dims": EVERY_HEAD_DIM,
    "page_sizes": None,
    "formats": EVERY_FORMAT,
    "layouts": None,
    "ranks": (ONE_RANK, SEVERAL_RANKS),
    "out_formats": ("model", "fp8_e4m3", "nvfp4"),
    "features": PLAIN_FEATURES - {"fp32_over_quantized"} | {"invariant"},
    "reports": PLANNED_ON_DEVICE,
}
GLUON_SM90: dict[str, Any] = {
    **ON_GPU,
    "packages": ("triton",),
    "families": ("sm90",),
    "dtypes": ("float16", "bfloat16"),
    "features": ON_GPU["features"] | {"fp32_over_quantized"},  # refused as float32
    "head_dims": (64, 96, 128, (192, 128), 256),
}
# Not measured yet: "decode:run_decode" in place of "decode_sm90:run" turns these rows on.
GLUON_DECODE: dict[str, Any] = {
    **GLUON_SM90,
    "kernel": "pageant.kernels.gluon.decode_sm90:run",
    "shared_kernel": "pageant.kernels.gluon.decode:run_shared",
    "tiles": "hopper",
    "phases": ("decode",),
    "features": GLUON_SM90["features"] - {"other_16_bit_cache"},
}
GLUON_DECODE_SCALED: dict[str, Any] = {
    **GLUON_DECODE,
    "page_sizes": (16, 32, 64, 128, 256),
    "layouts": ("LBHNC", "LHBNC", "BLHNC", "BHLNC"),
}
TRITON: dict[str, Any] = {**ON_GPU, "packages": ("triton",), "families": SINCE_AMPERE}
TRITON_DECODE: dict[str, Any] = {
    **TRITON,
    "name": "triton.decode",
    "kernel": "pageant.kernels.triton.attention:run_decode",
    "shared_kernel": "pageant.kernels.triton.attention:run_shared",
    "phases": ("decode",),
    "because": "A few new tokens on any GPU: each key is read once, where it lies in its page.",
}
TRITON_PREFILL: dict[str, Any] = {
    **TRITON,
    "name": "triton.prefill",
    "kernel": "pageant.kernels.triton.attention:run_prefill",
    "phases": ("prefill",),
    "because": "Many new tokens on any GPU: tiles of queries walk the keys page by page.",
}
# Two blocks of keys of 512 numbers in float32 exceed what a Turing program may hold.
BEFORE_BFLOAT16: dict[str, Any] = {
    "families": TURING,
    "dtypes": ("float32", "float16"),
    "head_dims": Sizes(16, 256, 8),
}

ROWS: tuple[Row, ...] = (
    *FLASHINFER_ROWS,
    Row(
        name="gluon_sm90.decode",
        because="Hopper: pages come by asynchronous copies, a warp a head multiplies them.",
        **{**GLUON_DECODE, "formats": ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")},
    ),
    Row(
        name="gluon_sm90.decode_row_scales",
        because="The same for rows with a scale each, where a head's scales lie together.",
        **{**GLUON_DECODE_SCALED, "formats": ("int8", "fp8_e4m3_token_head")},
    ),
    Row(
        name="gluon_sm90.decode_nvfp4",
        because="The same for nvfp4, widened in registers, where a head's scales lie together.",
        **{
            **GLUON_DECODE_SCALED,
            "formats": ("nvfp4", "nvfp4_4over6"),
            "head_dims": (64, 128, 256),  # copies bring powers of two of scales
        },
    ),
    Row(
        name="gluon_sm90.prefill",
        kernel="pageant.kernels.gluon.prefill_sm90:run",
        phases=("prefill",),
        because="Hopper: one group of warps copies ahead while others multiply.",
        **GLUON_SM90,
    ),
    Row(**TRITON_DECODE),
    Row(**{**TRITON_DECODE, **BEFORE_BFLOAT16}),
    Row(**TRITON_PREFILL),
    Row(**{**TRITON_PREFILL, **BEFORE_BFLOAT16}),
    Row(
        name="cpu.decode",
        kernel="pageant.kernels.cpu.attention:run",
        shared_kernel="pageant.kernels.cpu.shared:run",
        owner="pageant",
        phases=("decode",),
        families=("cpu",),
        because="A few new tokens: reads each key once, in equal shares of all requests.",
        **ON_HOST,
    ),
    Row(
        name="cpu.prefill",
        kernel="pageant.kernels.cpu.attention:run",
        owner="pageant",
        phases=("prefill",),
        families=("cpu",),
        because="Many new tokens: tiles of queries read the keys they see, page by page.",
        **ON_HOST,
    ),
    Row(
        name="cpu.invariant",
        kernel="pageant.kernels.cpu.attention:run_invariant",
        owner="pageant",
        phases=PHASES,
        families=("cpu",),
        because="Invariant mode: every row is computed alone, in the order of its keys.",
        **{**ON_HOST, "features": PLAIN_FEATURES - {"forced_splits"} | {"invariant"}},
    ),
    Row(
        name="reference.attention",
        kernel="pageant.kernels.reference:run",
        owner="reference",
        phases=PHASES,
        families=EVERY_FAMILY,
        because="Last resort: plain PyTorch in float64, right everywhere and fast nowhere.",
        **ON_HOST,
    ),
)

# What `Options.kernels` accepts besides a row's name, and whose rows it asks.
OWNERS: dict[str, tuple[Owner, ...]] = {
    "auto": ("pageant", "reference"),
    "pageant": ("pageant",),
    "flashinfer": ("flashinfer",),
    "reference": ("reference",),
}
NAMES = tuple(dict.fromkeys(row.name for row in ROWS))
KERNELS = f"{', '.join(OWNERS)}, or one of {', '.join(NAMES)}"
