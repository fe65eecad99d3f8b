"""Devices: every family by name on any machine, and this machine's own."""

import pytest
import torch

from pageant import ArgumentError, Device
from pageant.device import FAMILIES, driver_version, present

NUMBERS = (75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
KIB = 1024


def test_the_families_are_these():
    assert tuple(FAMILIES) == ("cpu", *(f"sm{number}" for number in NUMBERS))


@pytest.mark.parametrize("number", NUMBERS)
def test_by_either_name(number):
    device = Device.of(f"sm{number}")
    assert device is Device.of(str(number))
    assert (device.family, device.capability) == (f"sm{number}", number)
    assert not device.is_cpu
    assert device.name
    assert device.num_sms > 0


@pytest.mark.parametrize("number", NUMBERS)
def test_what_the_hardware_has(number):
    """fp8 conversions came with Ada, bfloat16 with Ampere."""
    device = Device.of(str(number))
    assert device.native_fp8 == (number in {89, 90, 100, 103, 110, 120, 121})
    assert device.native_bf16 == (number != 75)


@pytest.mark.parametrize(
    ("number", "kib"),
    [
        (75, 64),
        (80, 163),
        (86, 99),
        (87, 163),
        (89, 99),
        (90, 227),
        (100, 227),
        (103, 227),
        (110, 227),
        (120, 99),
        (121, 99),
    ],
)
def test_shared_memory_of_a_block(number, kib):
    assert Device.of(str(number)).shared_memory_bytes == kib * KIB


def test_a_larger_number_is_not_more_memory():
    assert Device.of("120").shared_memory_bytes < Device.of("100").shared_memory_bytes


@pytest.mark.parametrize("device", [Device.of("cpu"), Device.detect("cpu")])
def test_the_cpu(device):
    assert device.is_cpu
    assert (device.family, device.capability) == ("cpu", 0)
    assert device.shared_memory_bytes == 0
    assert not device.native_fp8
    assert not device.native_bf16


def test_detect_counts_threads_now():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert Device.detect(torch.device("cpu")).num_sms == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["74", "sm74", "130", "", "sm", "h100", "SM90", "sm90a", "smcpu"])
def test_no_such_family(name):
    with pytest.raises(ArgumentError) as caught:
        Device.of(name)
    assert caught.value.argument == "sm"
    assert str(caught.value).startswith(f"sm is {name!r}; allowed: cpu, sm75,")


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_devices_of_no_family(name):
    with pytest.raises(ArgumentError) as caught:
        Device.detect(name)
    assert caught.value.argument == "device"
    assert repr(name) in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_where_there_is_none(name):
    with pytest.raises(ArgumentError, match="no usable CUDA device") as caught:
        Device.detect(name)
    assert caught.value.argument == "device"


def test_a_device_is_a_value():
    with pytest.raises(AttributeError):
        Device.of("90").num_sms = 1
    assert {Device.of("90"), Device.of("sm90")} == {FAMILIES["sm90"]}


def test_devices_of_this_machine():
    assert present() == ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count())))
    assert all(Device.detect(name).num_sms > 0 for name in present())


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124  Release\n", "570.124"),
        ("nothing of the kind\n", None),
    ],
)
def test_version_of_the_driver(tmp_path, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_version(path) == version
    assert driver_version(tmp_path / "absent") is None
