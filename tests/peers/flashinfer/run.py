"""Run FlashInfer's own tests with Pageant in FlashInfer's place.

    FLASHINFER_TESTS=/path/to/flashinfer python tests/peers/flashinfer/run.py [FILE ...]

The checkout is FlashInfer 0.6.18's; nothing of it is kept here. PAGEANT_PEER_DEVICE is "cpu" (the
default: what the tests ask of "cuda" is done on the CPU, where it can be) or "cuda";
PAGEANT_PEER_AT_MOST bounds the cases of each test function; PAGEANT_PEER_CAPABILITY is the compute
capability the tests are told, 9.0 unless given. FILEs are names of rules.py; by default all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def main(files: list[str]) -> int:
    """Run pytest in the checkout; its exit code."""
    sys.path.insert(0, str(HERE))
    from rules import FILES

    where = os.environ.get("FLASHINFER_TESTS")
    if where is None or not (Path(where) / "tests/attention").is_dir():
        print("FLASHINFER_TESTS names no checkout of FlashInfer with tests/attention in it")
        return 2
    unknown = [name for name in files if name not in FILES]
    if unknown:
        print(f"{', '.join(unknown)}: unknown; allowed: {', '.join(FILES)}")
        return 2
    path = os.pathsep.join([str(HERE), where, str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "plugin", "--noconftest"]
    command += ["--import-mode=importlib", "-c", os.devnull, f"--rootdir={where}"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/{name}" for name in files or FILES]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=where, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
