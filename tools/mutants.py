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
TRITON = "tests/kernels/triton/test_attention.py"
CASCADE = "tests/kernels/triton/test_cascade.py"
GROUPS = "tests/plan/test_groups_on_device.py"
COMPILED = "tests/plan/test_compiled_plan.py"
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
        "np.cumsum(~whole) - 1 + kept[owner])",
        "0)",
    ),
    Mutant(
        "compiled plan: a window hides one key too few",
        "plan/loops.py",
        "min(max(n - m + low - window + 1, 0), n)",
        "min(max(n - m + low - window, 0), n)",
        (COMPILED,),
    ),
    Mutant(
        "compiled plan: a share begins one tile late",
        "plan/loops.py",
        "edge = total * share // shares",
        "edge = total * share // shares + 1",
        (COMPILED,),
    ),
    Mutant(
        "compiled plan: a page that is not there is believed",
        "plan/loops.py",
        "if page < 0:",
        "if page < -(1 << 30):",
        (COMPILED,),
    ),
    Mutant(
        "scales: k_scale and v_scale swapped on reading",
        "plan/inputs.py",
        "value, value_factor = _split(layer.v_scale, on_device)",
        "value, value_factor = _split(layer.k_scale, on_device)",
    ),
    Mutant(
        "drafts: a tree forgets the token itself",
        "plan/copies.py",
        "seen[token, own[token]] = True",
        "pass",
    ),
    Mutant(
        "cross attention stays causal",
        "plan/copies.py",
        "causal = batch.causal if batch.encoder_seq_lens is None else False",
        "causal = batch.causal",
    ),
    Mutant(
        "write: the row within the page is off",
        "plan/pages.py",
        "torch.remainder(slots, page_size, out=rows)",
        "torch.remainder(slots + 1, page_size, out=rows)",
        ("tests/cache",),
    ),
    Mutant(
        "write: fp8 does not saturate",
        "cache/quantize.py",
        "bounded = values.clamp(-fmt.max_value, fmt.max_value)",
        "bounded = values",
        ("tests/cache",),
    ),
    Mutant(
        "nvfp4: the even element in the high bits",
        "cache/quantize.py",
        "flat[..., 0::2] | (flat[..., 1::2] << 4)",
        "flat[..., 1::2] | (flat[..., 0::2] << 4)",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "nvfp4: a tie goes to the odd code",
        "cache/quantize.py",
        "(0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)",
        "(0.25, 1.25, 5.0), (0.75, 1.75, 2.5, 3.5)",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "nvfp4: elements forget the layer's scale",
        "cache/quantize.py",
        "step = (scales.float() * factor)[..., None]",
        "step = scales.float()[..., None]",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "nvfp4: a scale of zero stores something",
        "cache/quantize.py",
        ".masked_fill(scales.float()[..., None] == 0, 0)",
        "",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "nvfp4: a shorter last block takes the scale before",
        "cache/quantize.py",
        "factors.repeat_interleave(fmt.scale_block, -1)[..., : values.shape[-1]]",
        "factors.repeat_interleave(fmt.scale_block, -1)[..., -values.shape[-1] :]",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "4over6: an equal error replaces the first",
        "cache/quantize.py",
        "keep = error < best[2]",
        "keep = error <= best[2]",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "4over6: the larger error is kept",
        "cache/quantize.py",
        "keep = error < best[2]",
        "keep = error > best[2]",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "4over6: errors are added in another order",
        "cache/quantize.py",
        "low, high = squares.chunk(2, -1)",
        "low, high = squares[..., 0::2], squares[..., 1::2]",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "int8: the scale is a 128th",
        "cache/quantize.py",
        "amax(-1) / _as_tensor(fmt.max_value, x.device)",
        "amax(-1) / _as_tensor(fmt.max_value + 1, x.device)",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "int8: halves go up",
        "cache/quantize.py",
        "bounded.round().nan_to_num(0.0)",
        "(bounded + 0.5).floor().nan_to_num(0.0)",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "a row of zeros is stored as NaN",
        "cache/quantize.py",
        ".masked_fill(scales[..., None] == 0, 0.0)",
        "",
        ("tests/cache/test_formats.py",),
    ),
    Mutant(
        "layout: regions begin where parts of a row do",
        "cache/layout.py",
        "return first * self.region_rows, strides",
        "return first, strides",
        ("tests/cache/test_layout.py",),
    ),
    Mutant(
        "layout: heads outside the page are taken for inside",
        "cache/layout.py",
        'max(self.order.index("L"), self.order.index("B")) + 1 : -1',
        'self.order.index("B") + 1 : -1',
        ("tests/cache/test_layout.py",),
    ),
    Mutant(
        "swizzle: rows and quarters change places",
        "cache/layout.py",
        "return rows, scales % quarter * 4 + tokens % 4",
        "return rows, tokens % 4 * quarter + scales % quarter",
        ("tests/cache/test_layout.py",),
    ),
    Mutant(
        "swizzle: not undone on reading",
        "kernels/reference.py",
        "if not side.is_swizzled:",
        "if True:",
        ("tests/cache/test_wrap.py",),
    ),
    Mutant(
        "swizzle: not done on writing",
        "kernels/cpu/write_pages.py",
        "if side.is_swizzled:",
        "if False:",
        ("tests/cache/test_write.py",),
    ),
    Mutant(
        "wrap: keys and values of twice the heads change places",
        "cache/wrap.py",
        "keys, values = combined.chunk(2, heads)",
        "values, keys = combined.chunk(2, heads)",
        ("tests/cache/test_wrap.py",),
    ),
    Mutant(
        "wrap: gaps within a page are not seen",
        "cache/wrap.py",
        "_check_dense(combined, 1 + len(layout.inner))",
        "pass",
        ("tests/cache/test_wrap.py",),
    ),
    Mutant(
        "scales of rows: the layer's apply too",
        "plan/inputs.py",
        "if fmt.uses_layer_scales:",
        "if fmt.quantized:",
        ("tests/reports/test_r09.py",),
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
        "self._write(plan.buffers, plan.batch)",
        "self.inspect(plan.batch)",
        ("tests/plan",),
    ),
    Mutant(
        "decode: soft cap dropped",
        "kernels/cpu/attention_walk.py",
        "if cap > 0:",
        "if cap < 0:",
    ),
    Mutant(
        "decode: window one key too wide",
        "kernels/cpu/attention_walk.py",
        "first = max(_count(position + i - window + 1, shard) - tile, 0)",
        "first = max(_count(position + i - window, shard) - tile, 0)",
    ),
    Mutant(
        "decode: causal corner top left",
        "kernels/cpu/attention_walk.py",
        "position = first_new + begin",
        "position = begin",
    ),
    Mutant(
        "decode: a partial result holds the sink already",
        "kernels/cpu/attention_walk.py",
        "                    sink = _HIDDEN\n",
        "                    sink = sinks[head] if sinks.size > 0 else _HIDDEN\n",
    ),
    Mutant(
        "decode: the draft mask's column is off",
        "kernels/cpu/attention_walk.py",
        "start - first_new, near, hidden",
        "start - first_new + 1, near, hidden",
    ),
    Mutant(
        "decode: values are looked for where keys lie",
        "kernels/cpu/attention_walk.py",
        "_locate(page, row, first_head, v_geometry, v_at, c)",
        "_locate(page, row, first_head, k_geometry, v_at, c)",
        ("tests/kernels/cpu",),
    ),
    Mutant(
        "invariant: tiles of keys begin at the window",
        "kernels/cpu/attention_walk.py",
        "low - low % KEY_TILE if aligned else low",
        "low",
        ("tests/reports/test_r26.py",),
    ),
    Mutant(
        "invariant: every piece of heads takes the first sinks",
        "kernels/cpu/attention_walk.py",
        "r = _row(i, head - first_query, padded, group)",
        "r = _row(i, head - first_query, padded, group)\n                head -= first_query",
        ("tests/reports/test_r26.py",),
    ),
    Mutant(
        "decode: the halves of nvfp4 rows in one order",
        "kernels/cpu/attention.py",
        "order = order // 2 + order % 2 * (head_dim // 2)",
        "pass",
        ("tests/reports/test_r10.py",),
    ),
    Mutant(
        "decode: every block takes its row's first scale",
        "kernels/cpu/attention.py",
        "np.arange(scales.shape[3], dtype=np.uint64)",
        "np.zeros(scales.shape[3], dtype=np.uint64)",
        ("tests/reports/test_r10.py",),
    ),
    Mutant(
        "decode: swizzled scales as if they were linear",
        "kernels/cpu/attention_walk.py",
        "inside = row % 4 if geometry[4] else 0",
        "inside = 0",
        ("tests/reports/test_r10.py",),
    ),
    Mutant(
        "decode: neighbouring keys exchange scales",
        "kernels/cpu/attention_walk.py",
        "s[c] *= k_scales[c]",
        "s[c] *= k_scales[c ^ 1]",
        ("tests/reports/test_r09.py",),
    ),
    Mutant(
        "merge: an lse of +inf counts",
        "kernels/cpu/merge.py",
        "parts_lse = parts_lse.masked_fill(parts_lse == torch.inf, -torch.inf)",
        "pass",
        ("tests/reports/test_r01.py", "tests/kernels/cpu/test_merge.py"),
    ),
    Mutant(
        "ranks: causality stops one key early",
        "kernels/cpu/attention_walk.py",
        "_count(position + i + 1, shard) - tile",
        "_count(position + i, shard) - tile",
        ("tests/reports/test_r25.py",),
    ),
    Mutant(
        "ranks: distances are those among the rank's own keys",
        "kernels/cpu/attention_walk.py",
        "near[c] = _position(tile + c, shard) - start",
        "near[c] = c",
        ("tests/parallel/test_simulated.py",),
    ),
    Mutant(
        "ranks: each adds the sink",
        "plan/inputs.py",
        "return replace(params, sinks=None)",
        "return params",
        ("tests/reports/test_r25.py",),
    ),
    Mutant(
        "ranks: parts are added as if their lse were equal",
        "parallel/combine.py",
        "parts = out.mul_(weight[..., None])",
        "parts = out.div_(ranks.world)",
        ("tests/parallel/test_processes.py",),
    ),
    Mutant(
        "ranks: the engine writes every token on every rank",
        "engine/runner.py",
        "self.slots = np.where(mine, slots, -1)",
        "self.slots = slots",
        ("tests/engine/test_context_parallel.py",),
    ),
    Mutant(
        "shared prefix: the sink enters with it",
        "kernels/cpu/shared.py",
        "params=replace(call.params, window=None, sinks=None)",
        "params=replace(call.params, window=None)",
        ("tests/kernels/test_cascade.py", "tests/reports/test_r24.py"),
    ),
    Mutant(
        "shared prefix: one page too many",
        "plan/prefix.py",
        "return column + int(differs.argmax()) if differs.any() else end",
        "return column + int(differs.argmax()) + 1 if differs.any() else end",
        ("tests/plan/test_prefix.py",),
    ),
    Mutant(
        "pages: a negative id is not refused",
        "plan/pages.py",
        "if ids[lowest] < 0:",
        "if False:",
        ("tests/plan",),
    ),
    Mutant(
        "masks: packed bits beyond a request's own tokens",
        "plan/masks.py",
        "return pack_mask(seen & (column < own))",
        "return pack_mask(seen)",
        ("tests/plan/test_masks.py",),
    ),
    Mutant(
        "masks: rows packed to 16 bits only",
        "plan/masks.py",
        "ROW = 32",
        "ROW = 16",
        ("tests/plan/test_masks.py",),
    ),
    Mutant(
        "masks: update keeps the packed mask",
        "plan/build.py",
        "buffers.copy, buffers.packed = copy, None",
        "buffers.copy = copy",
        ("tests/plan/test_masks.py",),
    ),
    Mutant(
        "a run without plan and cache leaves scales as they were",
        "plan/outputs.py",
        "scales.zero_()",
        "pass",
        ("tests/test_hosts.py",),
    ),
    Mutant(
        "workspace: one partial result too few",
        "plan/buffers.py",
        "partials = cuts + (requests if shares else min(cuts, requests))",
        "partials = cuts + (requests if shares else min(cuts, requests)) - 1",
        ("tests/reports/test_r18.py",),
    ),
    Mutant(
        "workspace: as if every cut were a request's own",
        "plan/buffers.py",
        "partials = cuts + (requests if shares else min(cuts, requests))",
        "partials = cuts + (requests if shares else cuts)",
        ("tests/reports/test_r18.py",),
    ),
    Mutant(
        "plan slots: all plans take one",
        "plan/build.py",
        "self.slots[(self.generation + 1) % len(self.slots)]",
        "self.slots[0]",
        ("tests/reports/test_r20.py",),
    ),
    Mutant(
        "import: a process is started to name the processor",
        "device.py",
        "name=platform.machine(),",
        "name=platform.processor(),",
        ("tests/reports/test_r27.py",),
    ),
    Mutant(
        "turing: asked for bfloat16",
        "select/rows.py",
        '"families": TURING,\n    "dtypes": ("float32", "float16"),',
        '"families": TURING,\n    "dtypes": MODEL_DTYPES,',
        ("tests/reports/test_r28.py",),
    ),
    Mutant(
        "update: the page table of the first plan is kept",
        "plan/copies.py",
        "self._page_table.hold(batch.page_table[:, :width]),",
        "self._page_table.take(*batch.page_table[:, :width].shape),",
        ("tests/plan/test_draft_steps.py",),
    ),
    Mutant(
        "triton: window one key too wide",
        "kernels/triton/attention_tile.py",
        "seen & (at[None, :] > position[:, None] - window)",
        "seen & (at[None, :] >= position[:, None] - window)",
        (TRITON,),
    ),
    Mutant(
        "triton: both parts of a share take one slot",
        "plan/on_device.py",
        "tl.where(whole, -1, 2 * g + (at == 0))",
        "tl.where(whole, -1, 2 * g)",
        (TRITON,),
    ),
    Mutant(
        "triton: lengths beyond the limits are believed",
        "plan/on_device.py",
        "return start, end - start, tl.minimum(tl.maximum(n, 0), max_len)",
        "return start, end - start, n",
        (TRITON,),
    ),
    Mutant(
        "groups: the first new key is shared",
        "plan/groups_on_device.py",
        "tl.minimum(tl.maximum(n - m, 0), width * G.page_size)",
        "tl.minimum(tl.maximum(n - m + 1, 0), width * G.page_size)",
        (GROUPS,),
    ),
    Mutant(
        "groups: members end at the leader's keys, not at their shortest",
        "plan/groups_on_device.py",
        "shared = tl.minimum(shared, tl.where(their == leader, common, shared))",
        "shared = tl.minimum(shared, tl.where(other == leader, common, shared))",
        (GROUPS,),
    ),
    Mutant(
        "triton: shared keys are computed once more by each request",
        "plan/on_device.py",
        "first = tl.maximum(first, tl.load(skips + request, mask=live, other=0) // C.block)",
        "first = tl.maximum(first, 0)",
        (CASCADE,),
    ),
    Mutant(
        "triton: the sink joins the shared keys too",
        "kernels/triton/attention.py",
        "window=None, sinks=None, value_scale=1.0",
        "window=None, value_scale=1.0",
        (CASCADE,),
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
    if result.returncode > 1:  # a negative one is a crash: the fault was met
        raise SystemExit(f"{mutant.name}: the tests did not run\n{result.stdout}{result.stderr}")
    return result.returncode != 0


def main() -> int:
    """Run every mutant whose name holds the first argument."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutant for mutant in MUTANTS if wanted in mutant.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = list(pool.map(is_caught, chosen))
    for mutant, good in zip(chosen, caught, strict=True):
        print(f"{'caught  ' if good else 'SURVIVED'}  {mutant.name}")
    survivors = [mutant.name for mutant, good in zip(chosen, caught, strict=True) if not good]
    print(f"{sum(caught)} of {len(chosen)} mutants caught", *survivors, sep="\nSURVIVED  ")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
