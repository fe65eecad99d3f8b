"""Check the structure of the tree: which file imports which, and how long things are.

    python tools/check.py [ROOT]

Prints one line a fault, ``file:line: what; how to mend it``, then the exemptions in force. Exits 1
if there is a fault. A size budget is lifted by a comment ``# budget: <reason>``: for a function on
the line of its ``def``, for a file as a line of its own among the first five. A comment that lifts
nothing is a fault too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "pageant"

# A file imports from its own row and the rows above. Imports under TYPE_CHECKING are free.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("ranks", "types", "device"),
    ("cache",),
    ("select",),
    ("plan",),
    ("kernels",),
    ("parallel", "graphs"),
    ("api", "ops"),
    ("integrations", "engine", "bench", "cli"),
)
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

# Where an optional or slow package may be imported at module level; elsewhere, in a function.
APPLICATIONS = ("integrations", "engine", "bench")
HOMES = {
    "triton": (
        "kernels.triton",
        "plan.on_device",
        "plan.groups_on_device",
        "plan.bound",
        "kernels.gluon",
        *APPLICATIONS,
    ),
    "flashinfer": ("kernels.vendor", *APPLICATIONS),
    "transformers": APPLICATIONS,
    "vllm": APPLICATIONS,
    "numba": ("kernels.cpu", "plan.loops"),
}

FILE_LINES = 250
KERNEL_FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file. Its module is the dotted name below the package, its part the first word of it."""

    path: str
    module: str
    is_init: bool
    text: str

    @property
    def part(self) -> str:
        """What LAYERS speaks of: "cache", "kernels", "api"; "" for the package itself."""
        return self.module.partition(".")[0]

    @property
    def folder(self) -> str:
        """Dotted name of the folder that the file lies in."""
        return self.module if self.is_init else self.module.rpartition(".")[0]


@dataclass
class Report:
    """What was found, as lines to print."""

    faults: list[str] = field(default_factory=list)
    exemptions: list[str] = field(default_factory=list)
    num_files: int = 0

    def fault(self, source: Source, line: int, text: str) -> None:
        """Note a fault and its place."""
        self.faults.append(f"{source.path}:{line}: {text}")

    def settle(self, source: Source, line: int, over: list[str], reason: str | None) -> None:
        """Note what is over budget at a place, or the exemption that lifts it or has no use."""
        if reason and over:
            self.exemptions.append(f"{source.path}:{line}: exempt: {reason}")
        elif reason:
            self.fault(source, line, "exempt from budgets that it keeps; delete the comment")
        for text in over if not reason else ():
            self.fault(source, line, text)


def check(root: Path) -> Report:
    """Check every file of the package below a root."""
    report = Report()
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).with_suffix("").parts
        is_init = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_init else parts)
        text = path.read_text(encoding="utf-8")
        source = Source(path.relative_to(root).as_posix(), module, is_init, text)
        tree = ast.parse(text, source.path)
        check_imports(source, tree, report)
        check_file_size(source, report)
        for node in ast.walk(tree):
            if isinstance(node, Function):
                check_function(source, node, report)
        report.num_files += 1
    return report


def check_imports(source: Source, tree: ast.Module, report: Report) -> None:
    """Find imports that point the wrong way, or need a package that may be missing."""
    for name, line, lazy in imports(source, tree):
        root, _, target = name.partition(".")
        if root == PACKAGE and (fault := wrong_way(source, target)):
            report.fault(source, line, fault)
        elif root in HOMES and not lazy and not below(source.module, *HOMES[root]):
            text = f"imports {root} at module level; import it in the function that needs it"
            report.fault(source, line, text)


def imports(source: Source, node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Each import that can happen at run time: full dotted name, line, whether in a function."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            folder = [PACKAGE, *source.folder.split(".")] if source.folder else [PACKAGE]
            base = folder[: len(folder) + 1 - node.level] + base
        yield from ((".".join([*base, alias.name]), node.lineno, lazy) for alias in node.names)
    else:
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = iter(node.orelse)
        for child in children:
            yield from imports(source, child, lazy or isinstance(node, Function))


def wrong_way(source: Source, target: str) -> str | None:
    """Why a file may not import a name of the package; None if it may."""
    if source.part in ("", "__main__"):
        return None
    if source.part not in DEPTH:
        return f"{source.part} is in no layer; add it to LAYERS in tools/check.py"
    depth, part = DEPTH[source.part], target.partition(".")[0]
    if part not in DEPTH:  # `import pageant`, `from pageant import Batch`
        public = depth == len(LAYERS) - 1
        return None if public else "imports the whole package; name the file that defines it"
    if DEPTH[part] > depth:
        return f"{source.part} imports {part}, a later layer; move what they share down"
    if source.part == part == "kernels" and not kernel_may_import(source, target):
        if below(target, "kernels.reference"):
            return "a kernel imports kernels/reference.py; that is for tests to compare with"
        return "a kernel imports another; share through the folder's common.py or kernels/call.py"
    return None


def kernel_may_import(source: Source, target: str) -> bool:
    """Whether a file of kernels/ may import this name of kernels/.

    A kernel may have parts of its own: ``decode.py`` imports ``decode_*.py``.
    """
    if not source.is_init and target.startswith(f"{source.module}_"):
        return True
    own = source.module if source.is_init else f"{source.folder}.common"
    return below(target, "kernels.call", own)


def check_file_size(source: Source, report: Report) -> None:
    """Find a file that is too long."""
    lines = source.text.splitlines()
    budget = KERNEL_FILE_LINES if source.part == "kernels" else FILE_LINES
    over = [f"{len(lines)} lines, budget {budget}; split the file"] if len(lines) > budget else []
    reasons = {n: reason_in(line) for n, line in enumerate(lines[:5], 1) if line.startswith("#")}
    line, reason = next(((n, why) for n, why in reasons.items() if why), (1, None))
    report.settle(source, line, over, reason)


def check_function(source: Source, node: Function, report: Report) -> None:
    """Find a function that is too long or takes too much, or a kernel's launcher without types."""
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    if any(ast.unparse(decorator).endswith("jit") for decorator in decorators):
        return
    args = node.args
    every = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    given = [arg for arg in every if arg and arg.arg not in ("self", "cls")]
    length = (node.end_lineno or node.lineno) + 1 - node.lineno
    over = []
    if length > FUNCTION_LINES:
        over.append(f"{node.name} has {length} lines, budget {FUNCTION_LINES}; split it")
    if len(given) > PARAMETERS:
        over.append(f"{node.name} has {len(given)} parameters, budget {PARAMETERS}; group some")
    reason = reason_in(source.text.splitlines()[node.lineno - 1])
    report.settle(source, node.lineno, over, reason)
    # mypy is lenient in kernels/, for the sake of jit bodies.
    if source.part == "kernels" and not (node.returns and all(arg.annotation for arg in given)):
        report.fault(source, node.lineno, f"{node.name} lacks types; annotate it")


def reason_in(line: str) -> str | None:
    """The reason of a budget comment on a line, if it has one.

    >>> reason_in("def run(  # budget: the public API fixes these names")
    'the public API fixes these names'
    """
    found = re.search(r"#\s*budget:\s*(\S.*)", line)
    return found.group(1).strip() if found else None


def below(name: str, *places: str) -> bool:
    """Whether a dotted name is one of the places, or lies below one.

    >>> below("kernels.cpu.decode", "kernels.cpu"), below("kernels.cpu2", "kernels.cpu")
    (True, False)
    """
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def main() -> int:
    """Print the report; 1 if the tree has a fault."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    report = check(root)
    for line in report.faults + report.exemptions:
        print(line)
    counts = f"{len(report.exemptions)} exemptions, {len(report.faults)} faults"
    print(f"structure: {report.num_files} files, {counts}")
    return 1 if report.faults or not report.num_files else 0


if __name__ == "__main__":
    sys.exit(main())
