import json
from typing import Any

import pytest

from pageant.cli import main
from pageant.device import Device
from pageant.select import doctor
from pageant.select.doctor import examine
from pageant.types import ArgumentError, CacheSpec, Options, Shape

Capture = pytest.CaptureFixture[str]
SHAPE = Shape(num_q_heads=8, num_kv_heads=2, head_dim=64)


def test_json(capsys: Capture) -> None:
    assert main(["doctor", "--json", "--head-dim", "64"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["packages"]["torch"]
    cpu = said["devices"][0]
    assert (cpu["device"], cpu["family"], cpu["usable"]) == ("cpu", "cpu", True)
    kernels = {kernel["phase"]: kernel["kernel"] for kernel in cpu["kernels"]}
    assert kernels == {"prefill": "cpu.prefill", "decode": "cpu.decode"}


def test_text(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("pageant ")
    assert any(line.split()[:1] == ["torch"] for line in lines)
    assert any(line.startswith("cpu: cpu (") for line in lines)
    assert any(line.startswith("prefill  cpu.prefill  ") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_mistake_is_one_line(capsys: Capture) -> None:
    assert main(["doctor", "--head-dim", "20"]) == 2
    assert capsys.readouterr().err.startswith("error: head_dim is 20; allowed: ")
    assert main(["doctor", "--dtype", "fp8"]) == 2
    assert capsys.readouterr().err == "error: dtype is 'fp8'; allowed: float32, float16, bfloat16\n"


def devices(monkeypatch: pytest.MonkeyPatch, detect: Any) -> list[dict[str, Any]]:
    """What doctor says in a machine with a second device."""
    monkeypatch.setattr(doctor, "present", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(Device, "detect", detect)
    found: list[dict[str, Any]] = examine(SHAPE, CacheSpec(), Options())["devices"]
    return found


def test_a_gpu_gets_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cpu": "cpu", "cuda:0": "sm90"}
    cpu, gpu = devices(monkeypatch, lambda name: Device.of(names[name]))
    assert cpu["kernels"][0]["kernel"] == "cpu.prefill"
    assert (gpu["device"], gpu["family"], gpu["usable"]) == ("cuda:0", "sm90", True)


def test_a_device_of_no_family_is_said_to_be_unusable(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def detect(name: str) -> Device:
        if name == "cuda:0":
            raise ArgumentError("sm is '61'; allowed: cpu, sm75", "sm")
        return Device.of("cpu")

    assert devices(monkeypatch, detect)[1]["reason"] == "sm is '61'; allowed: cpu, sm75"
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cuda:0: no family we know\nnot usable: sm is '61'; allowed: cpu, sm75" in text


def test_kernels_that_cannot_run_here_are_said_to_be_unusable(capsys: Capture) -> None:
    assert main(["doctor", "--kernels", "flashinfer"]) == 0
    assert "not usable: no prefill kernel: flashinfer.native serves no device" in (
        capsys.readouterr().out
    )
