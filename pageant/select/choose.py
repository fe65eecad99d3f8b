"""First row that serves every need wins; each earlier row says what it lacks.

``Options.kernels`` only leaves rows out, it never reorders them. Rows left out are not refused:

- "auto": own kernels, then the reference; before them FlashInfer's, where its rows ask for that.
- "pageant", "reference", "flashinfer": that owner's rows alone.
- a row's name: that kernel alone, for every phase it has; its other phase as under "auto", for a
  kernel of FlashInfer's as under "flashinfer".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

import torch

from pageant.device import FAMILIES, Device
from pageant.select.built import missing_here
from pageant.select.needs import Need, needs_of
from pageant.select.refusal import Refusal, distance, miss, refuse
from pageant.select.row import PHASES, Phase, Row
from pageant.select.rows import OWNERS, ROWS
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Features, Options, Shape, Support, bad

Missing = Callable[[Row], str | None]
STORES = (
    "pageant.kernels.cpu.write_pages:write_pages",
    "pageant.kernels.cpu.quantize_out:quantize_out",
)
STORES_ON_DEVICE = (
    "pageant.kernels.triton.write_pages:write_planned",
    "pageant.kernels.triton.quantize_out:quantize_out",
)

# Steps beside attention that no row speaks of: where each device's kernel is.
STEPS = {
    "merge_states": (
        "pageant.kernels.cpu.merge:merge_states",
        "pageant.kernels.triton.merge:merge_states",
    ),
    "write_pages": (STORES[0], STORES_ON_DEVICE[0]),
    "page_indices": (
        "pageant.kernels.cpu.page_indices:page_indices",
        "pageant.kernels.triton.page_indices:page_indices",
    ),
    "dequantize_pages": (
        "pageant.kernels.cpu.dequantize_pages:dequantize_pages",
        "pageant.kernels.triton.dequantize_pages:dequantize_pages",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The row of one phase, or None, and every row refused before it."""

    phase: Phase
    row: Row | None
    refused: tuple[Refusal, ...]

    @property
    def support(self) -> Support:
        """Whether there is a row; if not, the reason of the one that came closest.

        That is the one whose arguments in the way are given up most easily, the hardest of them
        compared first; of several, the one for most devices; then the last, for rows go from
        special to general.
        """
        if self.row is not None:
            return Support(True)
        closest = min(reversed(self.refused), key=distance)
        reason = f"no {self.phase} kernel: {closest.kernel} {closest.why}"
        return Support(False, reason, closest.argument)


def choose(
    needs: Iterable[Need],
    phase: Phase,
    kernels: str = "auto",
    rows: tuple[Row, ...] = ROWS,
    missing: Missing = missing_here,
) -> Choice:
    """The first row of `phase` that serves every need and is not missing.

    >>> choose([Need("families", "cpu")], "decode").row.name
    'cpu.decode'
    >>> choose([Need("families", "cpu")], "decode").refused[0].why
    'serves no device of this family; would run on sm90'
    """
    needs = tuple(needs)
    family = next((need.value for need in needs if need.field == "families"), None)
    refused: list[Refusal] = []
    for row in asked_rows(phase, kernels, family, rows):
        lacking = tuple([need for need in needs if not need.served_by(row)])
        if not lacking and missing(row) is None:
            return Choice(phase=phase, row=row, refused=tuple(refused))
        if lacking:
            refused.append(refuse(row, lacking, phase, rows))
        else:
            refused.append(miss(row, phase, missing(row) or "", rows))
    return Choice(phase=phase, row=None, refused=tuple(refused))


@lru_cache(maxsize=1 << 14)
def has_kernels(needs: tuple[Need, ...], kernels: str, missing: Missing = missing_here) -> bool:
    """Whether `choose` finds a row in every phase, without the reasons."""
    family = next((need.value for need in needs if need.field == "families"), None)
    return all(
        any(
            all(need.served_by(row) for need in needs) and missing(row) is None
            for row in asked_rows(phase, kernels, family)
        )
        for phase in PHASES
    )


@lru_cache(maxsize=1 << 10)
def asked_rows(
    phase: Phase, kernels: str, family: str | None, rows: tuple[Row, ...] = ROWS
) -> tuple[Row, ...]:
    """The rows of a phase that `kernels` leaves in, one for each kernel.

    Of a kernel's rows for different devices it is the one for this family; if it has none, the
    first.
    """
    rows = tuple(row for row in rows if phase in row.phases)
    named = [row for row in rows if row.name == kernels]
    if kernels in OWNERS or not named:
        owners = OWNERS.get(kernels, OWNERS["auto"])
        by_itself = kernels not in OWNERS or kernels == "auto"
        named = [row for row in rows if row.owner in owners or (by_itself and family in row.auto)]
    chosen: dict[str, Row] = {}
    for row in named:
        if row.name not in chosen or family in row.families:
            chosen[row.name] = row
    return tuple(chosen.values())


def choose_each(
    shape: Shape,
    cache: CacheSpec,
    features: Features,
    options: Options,
    device: Device,
    *,
    cubins: bool = True,
    missing: Missing = missing_here,
) -> tuple[Choice, ...]:
    """The choice of each phase, prefill first, for a configuration `check_config` accepts."""
    needs = needs_of(shape, cache, features, options, device, cubins)
    return choose_together(needs, options.kernels, missing)


def choose_together(needs: tuple[Need, ...], kernels: str, missing: Missing) -> tuple[Choice, ...]:
    """The choice of each phase, prefill first: FlashInfer's kernels serve both or neither."""
    made = [choose(needs, phase, kernels, missing=missing) for phase in PHASES]
    owners = [choice.row.owner for choice in made if choice.row]
    if len(owners) < 2 or owners.count("flashinfer") != 1:
        return tuple(made)
    other = 1 - owners.index("flashinfer")
    theirs = made[1 - other]
    if theirs.row is not None and theirs.row.name == kernels:  # that kernel or none
        made[other] = choose(needs, PHASES[other], "flashinfer", missing=missing)
    else:

        def lacking(row: Row) -> str | None:
            apart = "needs a plan of its own; would run if it served both phases"
            return apart if row.owner == "flashinfer" else missing(row)

        made[1 - other] = choose(needs, theirs.phase, kernels, missing=lacking)
    return tuple(made)


def supports(
    shape: Shape,
    cache: CacheSpec | None = None,
    features: Features | None = None,
    options: Options | None = None,
    device: Device | torch.device | str = "cpu",
) -> Support:
    """Whether an Attention of this configuration can be built; no kernel is loaded or compiled.

    Args:
        shape, cache, features, options: as for ``Attention``.
        device: a device of this machine, or any family: a Device, "sm90" or "90".

    >>> supports(Shape(num_q_heads=32, num_kv_heads=8, head_dim=20)).reason
    'head_dim is 20; allowed: a multiple of 8 from 16 to 512'
    """
    valid = check_config(shape, cache, features, options)
    if not valid.ok:
        return valid
    cache, features, options = cache or CacheSpec(), features or Features(), options or Options()
    try:
        known = device_of(device)
    except ArgumentError as error:
        return Support(False, str(error), error.argument)
    choices = choose_each(shape, cache, features, options, known)
    return next((c.support for c in choices if c.row is None), Support(True))


def device_of(device: Device | torch.device | str) -> Device:
    """The Device meant by a device of this machine or the name of a family.

    >>> device_of("90").family, device_of("cpu").family
    ('sm90', 'cpu')
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str) and (device in FAMILIES or device.removeprefix("sm").isdigit()):
        return Device.of(device)
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):  # torch's words for a name it does not know
        raise bad("device", device, f"cpu, cuda, or one of {', '.join(FAMILIES)}") from None
    return Device.detect(place)


def load(row: Row) -> Callable[..., None]:
    """The row's kernel launcher; its module is imported now."""
    return _load(row.kernel)


def load_shared(row: Row) -> Callable[..., None]:
    """What computes decodes that share prefixes by means of the row's kernel."""
    return _load(row.shared_kernel)


def load_stores(row: Row) -> tuple[Callable[..., None], Callable[..., None]]:
    """What writes pages and what quantises outputs where the row's kernel runs."""
    on_device = row.is_planned_on_device or row.owner == "flashinfer"
    write, quantize = STORES_ON_DEVICE if on_device else STORES
    return _load(write), _load(quantize)


def load_step(name: str, device: torch.device) -> Callable[..., None]:
    """What does a step of STEPS to tensors on the device; on GPUs it waits for nothing."""
    on_host, on_device = STEPS[name]
    return _load(on_device if device.type == "cuda" else on_host)


@lru_cache(maxsize=64)
def _load(place: str) -> Callable[..., None]:
    module, _, name = place.partition(":")
    launcher: Callable[..., None] = getattr(import_module(module), name)
    return launcher
