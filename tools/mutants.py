"""Seeded faults that the tests must catch: one wrong line at a time, in a copy of the tree.

    python tools/mutants.py            all of them
    python tools/mutants.py sink       those whose name holds "sink"

A mutant is caught if its tests fail. One that survives, or whose line is no longer there, ends the
script with status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("pageant", "tests", "pyproject.toml")
PROPERTIES = "tests/kernels/test_properties.py"
SECONDS = 300


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what goes wrong.
        file: where, below pageant/.
        right, wrong: the code, which occurs exactly once, and what replaces it.
        tests: what must fail.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = (PROPERTIES,)


MUTANTS = (
    Mutant(
        "window: one key too few is planned",
        "plan/work.py",
        "key_lens - query_lens - window + 1",
        "key_lens - query_lens - window + 2",
    ),
    Mutant(
        "prefill: a tile stops one key early",
        "plan/work.py",
        "np.clip(n - m + items[:, QUERY_END], 0, n)",
        "np.clip(n - m + items[:, QUERY_END] - 1, 0, n)",
    ),
    Mutant(
        "split: partial results overwrite each other",
        "plan/work.py",
        "np.cumsum(~whole) - 1)",
        "0)",
    ),
    Mutant(
        "scales: k_scale and v_scale swapped on reading",
        "plan/inputs.py",
        'value = _number("layer.v_scale", layer.v_scale)',
        'value = _number("layer.k_scale", layer.k_scale)',
    ),
    Mutant(
        "drafts: a tree forgets the token itself",
        "plan/build.py",
        "seen[token, own[token]] = True",
        "pass",
    ),
    Mutant(
        "cross attention stays causal",
        "kernels/launch.py",
        "causal=batch.causal if batch.encoder_seq_lens is None else False",
        "causal=batch.causal",
    ),
    Mutant(
        "write: the row within the page is off",
        "plan/pages.py",
        "slots - pages * page_size",
        "(slots - pages * page_size + 1) % page_size",
        ("tests/cache",),
    ),
    Mutant(
        "write: fp8 does not saturate",
        "cache/quantize.py",
        "scaled.clamp(-fmt.max_value, fmt.max_value).to(fmt.element_dtype)",
        "scaled.to(fmt.element_dtype)",
        ("tests/cache",),
    ),
    Mutant(
        "stale plan runs",
        "plan/build.py",
        "if self.buffers.generation != self.generation:",
        "if False:",
        ("tests/plan",),
    ),
    Mutant(
        "update keeps old lengths",
        "plan/build.py",
        "self._fill(plan.buffers, plan.batch, self.inspect(plan.batch))",
        "self.inspect(plan.batch)",
        ("tests/plan",),
    ),
    Mutant(
        "prefill: window one key too wide",
        "kernels/cpu/prefill.py",
        "seen & (key > position - window)",
        "seen & (key >= position - window)",
    ),
    Mutant(
        "prefill: causal corner off by one",
        "kernels/cpu/prefill.py",
        "seen = key <= position",
        "seen = key <= position - 1",
    ),
    Mutant(
        "prefill: causal square starts one key late",
        "kernels/cpu/prefill.py",
        "triu_(low + 1)",
        "triu_(low + 2)",
    ),
    Mutant(
        "prefill: soft cap dropped",
        "kernels/cpu/prefill.py",
        "if params.soft_cap is None:",
        "if True:",
    ),
    Mutant(
        "prefill: slopes count from the first key",
        "kernels/cpu/prefill.py",
        "(torch.arange(*bounds) - position)",
        "(torch.arange(*bounds) - 0 * position)",
    ),
    Mutant(
        "prefill: sink enters twice",
        "kernels/cpu/prefill.py",
        "torch.sigmoid(lse - params.sinks)",
        "torch.sigmoid(lse - params.sinks - 0.6931472)",
    ),
    Mutant(
        "prefill: keys hidden by drafts are not zeroed",
        "kernels/cpu/prefill.py",
        "if seen is not None and span.draft is not None:",
        "if False:",
    ),
    Mutant(
        "decode: soft cap dropped",
        "kernels/cpu/decode.py",
        "if cap > 0:",
        "if cap < 0:",
    ),
    Mutant(
        "decode: window one key too wide",
        "kernels/cpu/decode.py",
        "first = max(position + i - window + 1 - tile, 0)",
        "first = max(position + i - window - tile, 0)",
    ),
    Mutant(
        "decode: causal corner top left",
        "kernels/cpu/decode.py",
        "position = first_new + begin",
        "position = begin",
    ),
    Mutant(
        "decode: a partial result holds the sink already",
        "kernels/cpu/decode.py",
        "                    sink = _HIDDEN\n",
        "                    sink = sinks[head] if sinks.size > 0 else _HIDDEN\n",
    ),
    Mutant(
        "decode: the draft mask's column is off",
        "kernels/cpu/decode.py",
        "tile - first_new, hidden",
        "tile - first_new + 1, hidden",
    ),
    Mutant(
        "decode: key and value strides swapped",
        "kernels/cpu/decode.py",
        "(heads, page_size, table_stride, window, heads_inside, *k_strides, *v_strides)",
        "(heads, page_size, table_stride, window, heads_inside, *v_strides, *k_strides)",
    ),
    Mutant(
        "merge: an lse of +inf counts",
        "kernels/cpu/merge.py",
        "lse = lse.masked_fill(lse == torch.inf, -torch.inf)",
        "pass",
        ("tests/reports/test_r01.py", "tests/kernels/cpu/test_merge.py"),
    ),
    Mutant(
        "pages: a negative id is not refused",
        "plan/pages.py",
        "if ids[lowest] < 0:",
        "if False:",
        ("tests/plan",),
    ),
)


def is_caught(mutant: Mutant) -> bool:
    """Whether the mutant's tests fail on the tree with its fault."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name)
            else:
                shutil.copy(source, tree / name)
        target = tree / "pageant" / mutant.file
        text = target.read_text()
        if text.count(mutant.right) != 1:
            raise SystemExit(
                f"{mutant.name}: {mutant.file} holds {mutant.right!r} not exactly once"
            )
        target.write_text(text.replace(mutant.right, mutant.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--hypothesis-profile=mutants", *mutant.tests]
        result = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    if result.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: the tests did not run\n{result.stdout}{result.stderr}")
    return result.returncode == 1


def main() -> int:
    """Run every mutant whose name holds the first argument."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutant for mutant in MUTANTS if wanted in mutant.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = list(pool.map(is_caught, chosen))
    for mutant, good in zip(chosen, caught, strict=True):
        print(f"{'caught  ' if good else 'SURVIVED'}  {mutant.name}")
    print(f"{sum(caught)} of {len(chosen)} mutants caught")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
