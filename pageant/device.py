"""What a device is. The only file that asks CUDA; everything else takes a Device value.

Any family can be made by name on any machine, so that choices for a B200 can be read on a laptop:

>>> Device.of("sm100").shared_memory_bytes
232448
>>> Device.of("90").family, Device.of("cpu").native_fp8
('sm90', False)
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pageant.types import bad

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device family, and where it is real, the device itself.

    Attributes:
        family: "cpu" or "sm75" … "sm121".
        capability: compute capability as major * 10 + minor; 0 for the CPU.
        name: what the driver calls it, or a typical part of the family.
        num_sms: multiprocessors (CPU: threads torch uses).
        shared_memory_bytes: most that one thread block can use; 0 for the CPU.
        native_fp8: fp8 conversions in hardware.
        native_bf16: bfloat16 arithmetic in hardware.
    """

    family: str
    capability: int
    name: str
    num_sms: int
    shared_memory_bytes: int
    native_fp8: bool
    native_bf16: bool

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on the host."""
        return self.family == "cpu"

    @classmethod
    def of(cls, name: str) -> Device:
        """The family called `name` ("cpu", "90", "sm90"), without hardware."""
        family = name if name in FAMILIES else f"sm{name}"
        if family not in FAMILIES:
            raise bad("sm", name, ", ".join(FAMILIES))
        return FAMILIES[family]

    @classmethod
    def detect(cls, device: torch.device | str) -> Device:
        """The family and sizes of a device of this machine."""
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):  # torch's words for a name it does not know
            raise bad("device", device, "cpu, or a CUDA device of this machine") from None
        if device.type == "cpu":
            return _cpu()
        if device.type != "cuda" or torch.version.hip is not None:
            raise bad("device", str(device), "cpu, or a CUDA device")
        if not torch.cuda.is_available():
            raise bad("device", str(device), "cpu (this machine has no usable CUDA device)")
        properties = torch.cuda.get_device_properties(device)
        known = cls.of(f"{properties.major}{properties.minor}")
        return cls(
            family=known.family,
            capability=known.capability,
            name=properties.name,
            num_sms=properties.multi_processor_count,
            shared_memory_bytes=getattr(
                properties, "shared_memory_per_block_optin", known.shared_memory_bytes
            ),
            native_fp8=known.native_fp8,
            native_bf16=known.native_bf16,
        )


def present() -> tuple[str, ...]:
    """The devices of this machine, as torch names them, whether or not we know their family.

    >>> present()[0]
    'cpu'
    """
    count = torch.cuda.device_count() if torch.version.hip is None else 0
    return "cpu", *(f"cuda:{index}" for index in range(count))


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of NVIDIA's driver; None without one, or where it does not say."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[0] if found else None


def _cpu() -> Device:
    return Device(
        family="cpu",
        capability=0,
        name=platform.machine(),  # platform.processor() starts a process
        num_sms=torch.get_num_threads(),
        shared_memory_bytes=0,
        native_fp8=False,
        native_bf16=False,
    )


def _sm(capability: int, name: str, num_sms: int, shared_kib: int) -> Device:
    return Device(
        family=f"sm{capability}",
        capability=capability,
        name=name,
        num_sms=num_sms,
        shared_memory_bytes=shared_kib * KIB,
        native_fp8=capability >= 89,
        native_bf16=capability >= 80,
    )


# Shared memory a block: CUDA C++ programming guide, table of technical specifications.
FAMILIES: dict[str, Device] = {
    device.family: device
    for device in (
        _cpu(),
        _sm(75, "T4", num_sms=40, shared_kib=64),
        _sm(80, "A100", num_sms=108, shared_kib=163),
        _sm(86, "RTX 3090", num_sms=82, shared_kib=99),
        _sm(87, "Jetson Orin", num_sms=16, shared_kib=163),
        _sm(89, "RTX 4090", num_sms=128, shared_kib=99),
        _sm(90, "H200", num_sms=132, shared_kib=227),
        _sm(100, "B200", num_sms=148, shared_kib=227),
        _sm(103, "B300", num_sms=148, shared_kib=227),
        _sm(110, "Jetson Thor", num_sms=20, shared_kib=227),
        _sm(120, "RTX 5090", num_sms=170, shared_kib=99),
        _sm(121, "GB10", num_sms=48, shared_kib=99),
    )
}
