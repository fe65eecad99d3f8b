"""Compile, without a GPU, what a device of one family would launch; print what each takes.

    python tests/kernels/triton/compiled.py sm90
    python tests/kernels/triton/compiled.py all > tests/golden/compiled.txt

An Attention on the CPU passes for one on the device. Its launches are recorded instead of made, and
what they would have compiled is compiled: a line each, with registers a thread, bytes of them that
spill, and bytes of shared memory. Triton must not be interpreting.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import pageant
from pageant.device import Device
from pageant.kernels.triton import (
    attention,
    dequantize_pages,
    merge,
    page_indices,
    quantize_out,
    write_pages,
)
from pageant.plan import device_groups, device_plan

KERNELS = (
    (device_plan, "plan_step"),
    (device_plan, "draw_trees"),
    (device_groups, "choose_depths"),
    (device_groups, "find_leaders"),
    (device_groups, "lay_out"),
    (device_groups, "plan_step"),
    (attention, "_decode"),
    (attention, "_prefill"),
    (write_pages, "write_kernel"),
    (quantize_out, "quantize_kernel"),
    (merge, "merge_kernel"),
    (page_indices, "list_pages"),
    (dequantize_pages, "dequantize_kernel"),
)
# Not sm110: Triton 3.6's assembler does not know it.
FAMILIES = ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


class Launches:
    """Stands for a kernel: keeps what it is given."""

    def __init__(self, kernel: Any, found: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def keep(*args: Any, **others: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            self.found.append((self.kernel, {**named, **others}))

        return keep


def cases(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compiled: a name, and what differs from a plain decode and prefill."""
    yield "plain", {}
    yield "nvfp4", {"format": "nvfp4_4over6"}
    if family == "sm75":  # its compiler takes a quarter of a minute for each prefill
        return
    yield "512", {"dim": 512}
    yield "everything", {"dim": 96, "rich": True}
    yield "shared", {"shared": True}
    yield "everything shared", {"dim": 96, "rich": True, "shared": True}
    if family in ("sm80", "sm90"):
        yield "fp8", {"format": "fp8_e4m3"}
        yield "int8", {"format": "int8"}
        yield "fp8 shared", {"format": "fp8_e4m3", "shared": True}
        yield "512 shared", {"dim": 512, "shared": True}
    if family in ("sm80", "sm120"):
        yield "float32 512", {"dim": 512, "dtype": torch.float32}


def record(family: str, case: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of one step and layer: two decodes and a prefill."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for module, name in KERNELS:
        kernel = getattr(module, name)
        setattr(
            module, name, Launches(kernel.kernel if isinstance(kernel, Launches) else kernel, found)
        )
    Device.detect = lambda _device: Device.of(family)  # type: ignore[method-assign, assignment]
    dtype = case.get("dtype", torch.float16 if family == "sm75" else torch.bfloat16)
    rich, heads, dim = case.get("rich", False), 32, min(case.get("dim", 128), 512)
    dim = min(dim, 256) if family == "sm75" else dim
    layer = pageant.Layer()
    if rich:
        layer = pageant.Layer(
            window=100,
            soft_cap=30.0,
            sinks=torch.zeros(heads),
            alibi_slopes=torch.zeros(heads),
            out_format="nvfp4",
        )
    attn = pageant.Attention(
        pageant.Shape(num_q_heads=heads, num_kv_heads=8, head_dim=dim, dtype=dtype),
        pageant.CacheSpec(format=case.get("format", "auto")),
        features=pageant.Features.of([layer], draft_masks=rich),
    )
    kv = attn.new_cache(num_layers=1, num_pages=16)
    others = {"draft_parents": torch.zeros(42, dtype=torch.int32)} if rich else {}
    if case.get("shared", False):
        others["shared_prefix_lens"] = torch.zeros(3, dtype=torch.int32)
    pages = [[0, 1], [2, 3], [4, 5, 6, 7]]
    batch = pageant.Batch.from_lengths([1, 1, 40], [20, 30, 60], pages, 16, **others)
    plan = attn.plan(batch)
    k, q = torch.zeros(42, 8, dim, dtype=dtype), torch.zeros(42, heads, dim, dtype=dtype)
    attn.write(plan, kv[0], k, k, layer)
    scales = torch.zeros(42, heads * dim // 16).to(torch.float8_e4m3fn) if rich else None
    attn.run(plan, q, kv[0], layer, out_scales=scales)
    record_ops(kv[0], batch, q, layer)
    return found


def record_ops(
    cache: pageant.LayerCache, batch: pageant.Batch, q: torch.Tensor, layer: pageant.Layer
) -> None:
    """The launches beside attention."""
    lse = torch.zeros(q.shape[:2])
    merge.merge_states([q, q, q], [lse, lse, lse], layer.sinks, q, lse)
    lens, table = batch.seq_lens, batch.page_table
    lists = pageant.ops.page_indices(lens, table, 16)
    page_indices.page_indices(lens, table, 16, lists)
    plain, _ = pageant.ops.dequantize_pages(cache, table, lens, dtype=q.dtype)
    dequantize_pages.dequantize_pages(cache, table, lens, (0.5, torch.ones(1)), plain)


def compile_launch(kernel: Any, given: dict[str, Any], capability: int) -> dict[str, Any]:
    """Compile one launch, specialised as Triton would specialise it."""
    names, options = kernel.arg_names, {key: given[key] for key in OPTIONS if key in given}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], special: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(type_of(part, (*path, i), special) for i, part in enumerate(value))
        if value is None or (special and isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            aligned[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if abs(value) < 1 << 31 else "i64"

    signature = {}
    for index, parameter in enumerate(kernel.params):
        value = given.get(parameter.name)
        if parameter.is_constexpr:
            constants[index,] = value
            signature[parameter.name] = "constexpr"
        else:
            special = not parameter.do_not_specialize
            signature[parameter.name] = type_of(value, (index,), special)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = usage(code.asm["ptx"], capability)
    return {
        "kernel": names and kernel.__name__,
        "registers": registers,
        "spilled": spilled,
        "shared": code.metadata.shared,
    }


def usage(ptx: str, capability: int) -> tuple[int, int]:
    """Registers a thread, and bytes it spills: what ptxas says of a second assembly."""
    found = re.search(r"\.target\s+(sm_\w+)", ptx)
    assert found
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={found[1]}", path, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", said),
        re.search(r"(\d+) bytes spill", said),
    )
    return int(registers[1]) if registers else 0, int(spills[1]) if spills else 0


def lines(family: str) -> Iterator[str]:
    """What each launch takes, one a line."""
    for name, case in cases(family):
        for kernel, given in record(family, case):
            took = compile_launch(kernel, given, Device.of(family).capability)
            numbers = f"{took['registers']:4}{took['spilled']:6}{took['shared']:8}"
            yield f"{family:6} {name:17} {took['kernel']:18}{numbers}"


def main(family: str) -> None:
    if family != "all":
        for line in lines(family):
            print(line, flush=True)
        return
    print(f"triton {triton.__version__}; registers, bytes spilled, bytes of shared memory")
    for each in FAMILIES:
        command = [sys.executable, __file__, each]  # an unsupported instruction aborts a process
        print(subprocess.run(command, stdout=-1, text=True, check=True).stdout, end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
