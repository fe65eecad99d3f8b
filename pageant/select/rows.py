"""Which kernel, for whom, why: data only. The first row of a phase that serves every need wins.

A new kernel is a new row. Each field lists what the kernel serves; what is not listed is refused.
Families are listed one by one, never by comparison: a larger number is not a better device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pageant.cache.formats import FORMATS
from pageant.device import FAMILIES

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Owner = Literal["pageant", "reference", "flashinfer"]
GraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]


@dataclass(frozen=True)
class Sizes:
    """Sizes from `first` to `last` in steps.

    >>> 24 in Sizes(16, 512, 8), 20 in Sizes(16, 512, 8), str(Sizes(16, 512, 8))
    (True, False, '16 to 512 in steps of 8')
    """

    first: int
    last: int
    step: int = 1

    def __contains__(self, size: object) -> bool:
        return (
            isinstance(size, int)
            and self.first <= size <= self.last
            and (size - self.first) % self.step == 0
        )

    def __str__(self) -> str:
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.first} to {self.last}{steps}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel and everything it serves.

    Attributes:
        name: what ``explain`` prints and ``Options.kernels`` accepts.
        kernel: "module:function", imported when first used.
        owner: "pageant" (own kernels), "reference", or the library that brings the kernel.
        phases: "prefill", "decode" or both.
        families: device families.
        dtypes: model dtypes.
        formats: cache formats.
        head_dims: head sizes, of keys as of values.
        page_sizes: tokens a page; None means any.
        layouts: cache layouts; None means any.
        out_formats: output formats.
        features: names from ``pageant.select.needs.FEATURES``.
        graph: which CUDA graphs can capture it.
        takes_drafts: a decode may bring draft tokens; if not, such requests go to prefill.
        lens_mismatch: lengths on the device may differ from the host's.
        draft_reuse: one plan serves all fused draft steps, lengths advancing in place.
        because: the reason for its place in the table.
    """

    name: str
    kernel: str
    owner: Owner
    phases: tuple[Phase, ...]
    families: tuple[str, ...]
    dtypes: tuple[str, ...]
    formats: tuple[str, ...]
    head_dims: Sizes
    page_sizes: tuple[int, ...] | None
    layouts: tuple[str, ...] | None
    out_formats: tuple[str, ...]
    features: frozenset[str]
    graph: GraphLevel
    takes_drafts: bool
    lens_mismatch: bool
    draft_reuse: bool
    because: str


CPU = ("cpu",)
EVERY_FAMILY = tuple(FAMILIES)
MODEL_DTYPES = ("float32", "float16", "bfloat16")
EVERY_FORMAT = tuple(FORMATS)
EVERY_HEAD_DIM = Sizes(16, 512, 8)

# What one softmax over masked scores can do. Not here: invariant, context_parallel.
PLAIN_FEATURES = frozenset(
    {
        "window",
        "soft_cap",
        "sinks",
        "alibi",
        "draft_masks",
        "non_causal",
        "lse",
        "v_head_dim",
        "fp32_over_quantized",
        "unquantized_query",
        "adaptive",
        "non_causal_drafts",
        "forced_splits",
    }
)

ROWS: tuple[Row, ...] = (
    Row(
        name="cpu.decode",
        kernel="pageant.kernels.cpu.decode:run",
        owner="pageant",
        phases=("decode",),
        families=CPU,
        dtypes=MODEL_DTYPES,
        formats=EVERY_FORMAT,
        head_dims=EVERY_HEAD_DIM,
        page_sizes=None,
        layouts=None,
        out_formats=("model",),
        features=PLAIN_FEATURES,
        graph="NEVER",
        takes_drafts=True,
        lens_mismatch=True,
        draft_reuse=True,
        because="A few new tokens: reads each key once, where it lies in its page.",
    ),
    Row(
        name="cpu.prefill",
        kernel="pageant.kernels.cpu.prefill:run",
        owner="pageant",
        phases=("prefill",),
        families=CPU,
        dtypes=MODEL_DTYPES,
        formats=EVERY_FORMAT,
        head_dims=EVERY_HEAD_DIM,
        page_sizes=None,
        layouts=None,
        out_formats=("model",),
        features=PLAIN_FEATURES,
        graph="NEVER",
        takes_drafts=True,
        lens_mismatch=True,
        draft_reuse=True,
        because="Many new tokens: gathers keys once, then multiplies matrices.",
    ),
    Row(
        name="reference.attention",
        kernel="pageant.kernels.reference:run",
        owner="reference",
        phases=PHASES,
        families=EVERY_FAMILY,
        dtypes=MODEL_DTYPES,
        formats=EVERY_FORMAT,
        head_dims=EVERY_HEAD_DIM,
        page_sizes=None,
        layouts=None,
        out_formats=("model",),
        features=PLAIN_FEATURES,
        graph="NEVER",
        takes_drafts=True,
        lens_mismatch=True,
        draft_reuse=True,
        because="Last resort: plain PyTorch in float64, right everywhere and fast nowhere.",
    ),
)

# What `Options.kernels` accepts besides a row's name, and whose rows it asks.
OWNERS: dict[str, tuple[Owner, ...]] = {
    "auto": ("pageant", "reference"),
    "pageant": ("pageant",),
    "flashinfer": ("flashinfer",),
    "reference": ("reference",),
}
KERNELS = f"{', '.join(OWNERS)}, or one of {', '.join(row.name for row in ROWS)}"
