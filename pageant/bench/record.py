"""What a result file says besides its rows: when, on what, with which versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import pageant
from pageant.device import Device
from pageant.types import bad

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "triton",
    "flash-attn-3",
    "tokenspeed-fa3",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
)
ROOT = Path(pageant.__file__).parents[1]


def record(bench: str, device: torch.device, **results: Any) -> dict[str, Any]:
    """One result file's object: where and when it was measured, then the results.

    Args:
        bench: name of the command.
        device: where it ran.
        **results: whatever JSON can hold.
    """
    versions = {"python": platform.python_version(), "pageant": pageant.__version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "bench": bench,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": {
            "name": _cpu_name() if device.type == "cpu" else Device.detect(device).name,
            "family": Device.detect(device).family,
            "threads": torch.get_num_threads(),
        },
        "versions": versions,
        **results,
    }


def check_writable(argument: str, path: Path) -> None:
    """Raise now if a file cannot be written there once all is measured; makes its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise bad(argument, str(path), f"a file that can be written ({error})") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise bad(argument, str(path), "a file that can be written")


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result file."""
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """Of the checkout this package lies in, "+" behind it if files differ; None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    """As Linux calls it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
