"""The command `pageant doctor`: what this machine has, what is usable, and what is compiled."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer

from pageant.device import Device, driver_version, present
from pageant.select.arguments import (
    AsJson,
    CacheFormat,
    Dtype,
    HeadDim,
    Kernels,
    KVHeads,
    PageSize,
    QHeads,
    VHeadDim,
)
from pageant.select.cases import DTYPES, named
from pageant.select.compiled import compiled
from pageant.select.explain import explain
from pageant.select.text import columns
from pageant.select.validate import check_config
from pageant.types import ArgumentError, CacheSpec, Options, Shape

# Packages to name, by what the index calls them, and what they are for.
PACKAGES = {
    "torch": "everything",
    "numba": "the CPU kernels",
    "triton": "the GPU kernels",
    "flashinfer-python": "kernels='flashinfer'",
    "transformers": "models",
    "vllm": "the vLLM plugin",
}


def doctor(  # budget: one parameter for each option of the command
    q_heads: QHeads = 32,
    kv_heads: KVHeads = 8,
    head_dim: HeadDim = 128,
    v_head_dim: VHeadDim = None,
    page_size: PageSize = 16,
    dtype: Dtype = "bfloat16",
    cache: CacheFormat = "auto",
    kernels: Kernels = "auto",
    as_json: AsJson = False,
) -> None:
    """Show devices, driver and versions, which kernels a model gets here, and what is compiled."""
    shape = Shape(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=named("dtype", dtype, DTYPES),
    )
    spec, options = CacheSpec(format=cache, page_size=page_size), Options(kernels=kernels)
    valid = check_config(shape, spec, None, options)
    if not valid.ok:
        raise ArgumentError(valid.reason or "", valid.argument or "")
    found = examine(shape, spec, options)
    typer.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


def examine(shape: Shape, cache: CacheSpec, options: Options) -> dict[str, Any]:
    """Everything `pageant doctor` says, as JSON data."""
    return {
        "pageant": sys.modules["pageant"].__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "devices": [_examine_device(name, shape, cache, options) for name in present()],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _examine_device(name: str, shape: Shape, cache: CacheSpec, options: Options) -> dict[str, Any]:
    """One device: what it is, whether it is usable, and the kernels it gets."""
    try:
        device = Device.detect(name)
    except ArgumentError as error:
        return {"device": name, "usable": False, "reason": str(error), "kernels": []}
    answer = explain(shape, cache, None, options, device)
    kernels = [
        {"phase": phase, "kernel": row.name, "state": str(compiled(row))}
        for phase, row in answer.rows.items()
    ]
    return {
        "device": name,
        "family": device.family,
        "name": device.name,
        "processors": device.num_sms,
        "usable": answer.support.ok,
        "reason": answer.support.reason,
        "kernels": kernels,
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"pageant {found['pageant']}, Python {found['python']}, {found['system']}"
    driver = found["driver"] or "none"
    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    yield f"NVIDIA driver {driver}; torch built with {cuda}"
    yield ""
    table = [
        (name, found["packages"][name] or "not installed", use) for name, use in PACKAGES.items()
    ]
    yield from columns([("package", "version", "for"), *table])
    for device in found["devices"]:
        yield ""
        yield from _device_lines(device)


def _device_lines(device: dict[str, Any]) -> Iterator[str]:
    if "family" in device:
        counted = "threads" if device["family"] == "cpu" else "multiprocessors"
        what = f"{device['family']} ({device['name']}), {device['processors']} {counted}"
        yield f"{device['device']}: {what}"
    else:
        yield f"{device['device']}: no family we know"
    if device["kernels"]:
        rows = [(k["phase"], k["kernel"], k["state"]) for k in device["kernels"]]
        yield from columns([("phase", "kernel", "code"), *rows])
    if not device["usable"]:
        yield f"not usable: {device['reason']}"
