"""What a row of the kernel table says; the rows themselves are in ``rows.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
Owner = Literal["pageant", "reference", "flashinfer"]
Tiles = Literal["triton", "hopper"]
GraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
GRAPH_LEVELS: tuple[GraphLevel, ...] = (
    "NEVER",
    "UNIFORM_SINGLE_TOKEN_DECODE",
    "UNIFORM_BATCH",
    "ALWAYS",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes from `first` to `last` in steps; of a pair, both.

    >>> 24 in Sizes(16, 512, 8), 20 in Sizes(16, 512, 8), (192, 128) in Sizes(16, 512, 8)
    (True, False, True)
    >>> str(Sizes(16, 512, 8))
    '16 to 512 in steps of 8'
    """

    first: int
    last: int
    step: int = 1

    def __contains__(self, size: object) -> bool:
        if isinstance(size, tuple):
            return all(one in self for one in size)
        return (
            isinstance(size, int)
            and self.first <= size <= self.last
            and (size - self.first) % self.step == 0
        )

    def __str__(self) -> str:
        steps = f" in steps of {self.step}" if self.step > 1 else ""
        return f"{self.first} to {self.last}{steps}"


@dataclass(frozen=True, kw_only=True)
class Reports:
    """What a host may build on when a row decodes.

    Attributes:
        graph: which CUDA graphs can capture it.
        takes_drafts: a decode may bring draft tokens; if not, such requests go to prefill.
        lens_mismatch: lengths on the device may differ from the host's.
        draft_reuse: one plan serves all fused draft steps, lengths advancing in place.
        varlen_graph: a full graph replays decodes of different lengths: never, always, or only
            for hosts that verify adaptively.
        fp8_query: the layer may hand over an fp8 query: never, always, or only where the kernels of
            both phases would quantise it anyway.
    """

    graph: GraphLevel
    takes_drafts: bool
    lens_mismatch: bool
    draft_reuse: bool
    varlen_graph: Literal["never", "adaptive", "always"]
    fp8_query: Literal["never", "planned", "always"]


@dataclass(frozen=True, kw_only=True)
class QueryRule:
    """The type queries are given to a kernel in. A row's first rule that fits decides.

    Attributes:
        dtype: a torch dtype's name, or "model".
        phases, families, formats: where the rule holds; None: everywhere.
        needs: features that must be asked for.
        unless: features that must not be.
    """

    dtype: str
    phases: tuple[Phase, ...] = PHASES
    families: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None
    needs: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()

    def fits(self, phase: Phase, values: set[Any]) -> bool:
        """Whether the rule holds in a phase, for needs of these values."""
        return (
            phase in self.phases
            and (self.families is None or not values.isdisjoint(self.families))
            and (self.formats is None or not values.isdisjoint(self.formats))
            and values.issuperset(self.needs)
            and values.isdisjoint(self.unless)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One kernel and everything it serves. A kernel may have several rows, for different devices.

    Attributes:
        name: what ``explain`` prints and ``Options.kernels`` accepts.
        kernel: "module:function", imported when first used; until the module exists the row
            refuses everything.
        tiles: whose rules say how large the kernel's tiles are, where it is planned on the device.
        shared_kernel: "module:function" that computes decodes of which several share keys, by
            means of the kernel; "" if it has none.
        packages: importable names the kernel needs besides torch.
        owner: "pageant" (own kernels), "reference", or the library that brings the kernel.
        auto: families where kernels="auto" asks a row of another library.
        phases: "prefill", "decode" or both.
        families: device families.
        dtypes: model dtypes.
        head_dims: head sizes; (D, Dv) where those of keys and values differ.
        page_sizes: tokens a page; None means any.
        formats: cache formats.
        layouts: cache layouts; None means any.
        ranks: "one rank", "several ranks" (a sequence shared among them), or both.
        out_formats: output formats.
        features: names from ``pageant.select.words.FEATURES``.
        reports: what a host may build on.
        reports_with: the same where a value is needed: the first one decides.
        queries: the types of queries; where no rule fits, the model's.
        because: the reason for its place in the table.
    """

    name: str
    kernel: str
    tiles: Tiles = "triton"
    shared_kernel: str = ""
    packages: tuple[str, ...] = ()
    owner: Owner
    auto: tuple[str, ...] = ()
    phases: tuple[Phase, ...]
    families: tuple[str, ...]
    dtypes: tuple[str, ...]
    head_dims: Sizes | tuple[int | tuple[int, int], ...]
    page_sizes: tuple[int, ...] | None
    formats: tuple[str, ...]
    layouts: tuple[str, ...] | None
    ranks: tuple[str, ...]
    out_formats: tuple[str, ...]
    features: frozenset[str]
    reports: Reports
    reports_with: tuple[tuple[str, Reports], ...] = ()
    queries: tuple[QueryRule, ...] = ()
    because: str

    @property
    def is_planned_on_device(self) -> bool:
        """Whether the kernel finds its work on the device, where planning put it."""
        return self.owner == "pageant" and "triton" in self.packages

    def __repr__(self) -> str:
        return f"<row {self.name}>"
