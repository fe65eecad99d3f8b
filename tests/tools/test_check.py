"""Each rule of tools/check.py on a small tree that breaks it and one that keeps it."""

from pathlib import Path

import pytest

from tools.check import Report, check, main

LONG_BODY = "    x = 1\n" * 60
NINE = ", ".join(f"a{i}: int" for i in range(9))


def report(root: Path, files: dict[str, str]) -> Report:
    for name, text in files.items():
        path = root / "pageant" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check(root)


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        # Import direction.
        ("cache/layout.py", "from pageant.plan.build import Plan", "cache imports plan, a later"),
        ("cache/layout.py", "from pageant import plan", "cache imports plan, a later"),
        ("cache/layout.py", "import pageant.plan.build", "cache imports plan, a later"),
        ("cache/layout.py", "from ..plan import build", "cache imports plan, a later"),
        ("cache/__init__.py", "from ..plan import build", "cache imports plan, a later"),
        ("device.py", "def f():\n    from .api import Attention", "device imports api, a later"),
        ("types.py", "from . import cli", "types imports cli, a later"),
        ("graphs.py", "from pageant.api import Attention", "graphs imports api, a later"),
        ("plan/build.py", "from pageant import Batch", "imports the whole package"),
        ("plan/build.py", "import pageant", "imports the whole package"),
        ("extra.py", "from pageant.types import Shape", "extra is in no layer"),
        # Kernels.
        ("kernels/cpu/a.py", "from pageant.kernels.cpu import b", "a kernel imports another"),
        ("kernels/cpu/a.py", "from pageant.kernels.cpu.b import x", "a kernel imports another"),
        ("kernels/cpu/a.py", "import pageant.kernels.triton.common", "a kernel imports another"),
        ("kernels/cpu/common.py", "from .decode import x", "a kernel imports another"),
        ("kernels/cpu/a.py", "from pageant.kernels import reference", "kernels/reference.py"),
        ("kernels/triton/__init__.py", "from ..cpu import b", "a kernel imports another"),
        ("kernels/cpu/a.py", "def f(x): ...", "f lacks types"),
        ("kernels/cpu/a.py", "def f(x: int): ...", "f lacks types"),
        # Packages that may be missing.
        ("plan/build.py", "import triton", "imports triton at module level"),
        ("kernels/cpu/a.py", "from triton import language", "imports triton at module level"),
        (
            "api.py",
            "try:\n    import vllm.config\nexcept ImportError: ...",
            "imports vllm at module",
        ),
        ("cli.py", "import transformers", "imports transformers at module level"),
        ("kernels/triton/a.py", "import flashinfer", "imports flashinfer at module level"),
        ("plan/split.py", "from numba import njit", "imports numba at module level"),
        # Sizes.
        ("api.py", "\n" * 251, "251 lines, budget 250"),
        ("kernels/cpu/a.py", "\n" * 501, "501 lines, budget 500"),
        ("api.py", f"def f():\n{LONG_BODY}", "f has 61 lines, budget 60"),
        ("api.py", f"class A:\n  async def f(self, {NINE}): ...", "f has 9 parameters, budget 8"),
        ("api.py", f"def f(a, /, {NINE[8:]}, *b, **c): ...", "f has 11 parameters, budget 8"),
        # Exemptions.
        ("api.py", "def f():  # budget: was long once\n    return 1", "exempt from budgets that"),
        ("api.py", "# budget: was long once\n", "exempt from budgets that"),
        ("api.py", f"def f():  # budget:\n{LONG_BODY}", "f has 61 lines"),
        ("api.py", "\n" * 5 + "# budget: too far down" + "\n" * 250, "255 lines"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, path: str, text: str, fault: str) -> None:
    found = report(tmp_path, {path: text})
    assert len(found.faults) == 1
    assert found.faults[0].startswith(f"pageant/{path}:")
    assert fault in found.faults[0]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("plan/build.py", "from pageant.cache.layout import Layout\nfrom . import pages"),
        ("types.py", "from pageant.device import Device"),
        ("graphs.py", "from pageant.parallel import shard"),
        (
            "graphs.py",
            "if TYPE_CHECKING:\n    from pageant.api import Attention\n    import triton",
        ),
        ("cli.py", "import pageant\nfrom pageant import Batch, engine"),
        ("__init__.py", "from pageant.api import Attention"),
        ("__main__.py", "from pageant.cli import main"),
        ("kernels/cpu/a.py", "from pageant.kernels.cpu import common\nfrom .common import x"),
        ("kernels/cpu/a.py", "from pageant.kernels.call import Call\nfrom ..call import Call"),
        ("kernels/cpu/a.py", "from pageant.plan.build import Plan"),
        ("kernels/cpu/__init__.py", "from pageant.kernels.cpu.attention import run"),
        ("kernels/cpu/a.py", f"@njit(cache=True)\ndef f({NINE}, x):\n{LONG_BODY}"),
        ("kernels/triton/a.py", "import triton\n@triton.jit\ndef f(x): ..."),
        ("kernels/cpu/a.py", "class A:\n    def f(self, x: int) -> int: ..."),
        ("kernels/vendor/a.py", "import flashinfer"),
        ("integrations/vllm.py", "import vllm, torch"),
        ("plan/build.py", "def f():\n    import triton"),
        ("plan/build.py", "import triton_kernels"),
        ("api.py", "\n" * 250),
        ("kernels/cpu/a.py", "\n" * 500),
        ("api.py", f"def f():\n{LONG_BODY[10:]}"),
        ("api.py", f"class A:\n    def f(self, {NINE[:-9]}): ..."),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, text: str) -> None:
    assert report(tmp_path, {path: text}).faults == []


@pytest.mark.parametrize(
    "text",
    [
        f"def f(  # budget: fixed by others\n    {NINE}\n):\n{LONG_BODY}",
        '"""Many rows."""\n# budget: fixed by others\n' + "x = 1\n" * 300,
    ],
)
def test_an_exemption_with_a_reason_is_listed(tmp_path: Path, text: str) -> None:
    found = report(tmp_path, {"api.py": text})
    assert found.faults == []
    (exemption,) = found.exemptions
    assert exemption.endswith("exempt: fixed by others")


def test_a_fault_names_its_line(tmp_path: Path) -> None:
    found = report(tmp_path, {"cache/a.py": "import torch\n\nimport pageant.api\n"})
    assert found.faults[0].startswith("pageant/cache/a.py:3: ")


def test_exit_status_and_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["check.py", str(tmp_path)])
    assert main() == 1  # a wrong folder must not pass for a clean tree
    report(tmp_path, {"types.py": "x = 1"})
    assert main() == 0
    assert capsys.readouterr().out.endswith("structure: 1 files, 0 exemptions, 0 faults\n")
    report(tmp_path, {"types.py": "import pageant.api"})
    assert main() == 1
