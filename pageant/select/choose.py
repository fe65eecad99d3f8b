"""First row that serves every need wins; each earlier row says what it lacks.

``Options.kernels`` only leaves rows out, it never reorders them:

- "auto": own kernels, then the reference.
- "pageant", "reference", "flashinfer": that owner's rows alone.
- a row's name: that row alone, for every phase it has; its other phase is chosen as under "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch

from pageant.device import FAMILIES, Device
from pageant.select.needs import Need, needs_of
from pageant.select.rows import KERNELS, OWNERS, PHASES, ROWS, Phase, Row
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Features, Options, Shape, Support, bad


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why one row does not serve one phase.

    Attributes:
        kernel: the row's name.
        phase: "prefill" or "decode".
        why: what it lacks and what would make it run.
        arguments: the user's arguments that stand in the way; never empty.
    """

    kernel: str
    phase: Phase
    why: str
    arguments: tuple[str, ...]

    @property
    def argument(self) -> str:
        """The first argument in the way."""
        return self.arguments[0]


# Refusals that say least about a kernel: it was not asked, or is for another device.
DISTANT = ("kernels", "sm")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The row of one phase, or None, and every row refused before it."""

    phase: Phase
    kernels: str
    row: Row | None
    refused: tuple[Refusal, ...]

    @property
    def support(self) -> Support:
        """Whether there is a row; if not, the reason of the last one refused.

        Rows go from special to general, so the last one knows best what nobody serves. Rows of
        other devices, and rows left out, speak only where nobody else does.
        """
        if self.row is not None:
            return Support(True)
        refused = [r for r in self.refused if r.argument not in DISTANT]
        refused = refused or [r for r in self.refused if r.argument != "kernels"]
        if not refused:
            reason = f"kernels is {self.kernels!r}, which has no {self.phase} kernel yet"
            others = KERNELS.replace(f"{self.kernels}, ", "")
            return Support(False, f"{reason}; allowed: {others}", "kernels")
        last = refused[-1]
        return Support(False, f"no {self.phase} kernel: {last.kernel} {last.why}", last.argument)


def choose(
    needs: Iterable[Need], phase: Phase, kernels: str = "auto", rows: tuple[Row, ...] = ROWS
) -> Choice:
    """The first row of `phase` that serves every need.

    >>> choose([Need("families", "sm90")], "decode").row.name
    'reference.attention'
    >>> choose([Need("families", "sm90")], "decode").refused[0].why
    'serves no device of this family; would run on cpu'
    """
    needs = tuple(needs)
    refused: list[Refusal] = []
    for row in rows:
        if phase not in row.phases:
            continue
        refusal = _refuse(row, needs, phase, kernels, rows)
        if refusal is None:
            return Choice(phase=phase, kernels=kernels, row=row, refused=tuple(refused))
        refused.append(refusal)
    return Choice(phase=phase, kernels=kernels, row=None, refused=tuple(refused))


def _refuse(
    row: Row, needs: tuple[Need, ...], phase: Phase, kernels: str, rows: tuple[Row, ...]
) -> Refusal | None:
    if not _is_asked(row, phase, kernels, rows):
        why = f"is left out by kernels={kernels!r}; kernels={row.name!r} asks for it"
        return Refusal(kernel=row.name, phase=phase, why=why, arguments=("kernels",))
    lacking = [need for need in needs if not need.served_by(row)]
    if not lacking:
        return None
    lacks, cures = zip(*(need.refusal(row) for need in lacking), strict=True)
    why = f"serves no {' and no '.join(lacks)}; would run {' and '.join(dict.fromkeys(cures))}"
    arguments = tuple(dict.fromkeys(need.words.argument for need in lacking))
    return Refusal(kernel=row.name, phase=phase, why=why, arguments=arguments)


def _is_asked(row: Row, phase: Phase, kernels: str, rows: tuple[Row, ...]) -> bool:
    if kernels in OWNERS:
        return row.owner in OWNERS[kernels]
    named_has_phase = any(other.name == kernels and phase in other.phases for other in rows)
    return row.name == kernels if named_has_phase else row.owner in OWNERS["auto"]


def choose_each(
    shape: Shape, cache: CacheSpec, features: Features, options: Options, device: Device
) -> tuple[Choice, ...]:
    """The choice of each phase, prefill first, for a configuration `check_config` accepts."""
    needs = needs_of(shape, cache, features, options, device)
    return tuple(choose(needs, phase, options.kernels) for phase in PHASES)


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
    module, _, name = row.kernel.partition(":")
    launcher: Callable[..., None] = getattr(import_module(module), name)
    return launcher
