"""Compile, without a GPU, what the Gluon decode would launch; print what each variant takes.

    python tests/kernels/gluon/compiled.py > tests/golden/compiled_gluon.txt
    python tests/kernels/gluon/compiled.py --sass FOLDER bf16 nvfp4

An Attention on the CPU passes for one on Hopper. Its launches are recorded instead of made, and
what they would have compiled is compiled: a line each, with registers a thread, bytes of them that
spill, bytes of shared memory, and how many instructions the loop over keys has. Triton must not be
interpreting.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import mangle_type

sys.path.insert(0, str(Path(__file__).parents[3]))

import pageant
from pageant.device import Device
from pageant.kernels.gluon import decode
from tests.kernels.triton.compiled import TYPES, Launches, usage
from tests.switched_on import gluon_decode

OPTIONS = ("num_warps", "launch_pdl")
RICH = {"window": 100, "soft_cap": 30.0, "sinks": True, "alibi": True, "masks": True}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "bf16 everything": RICH,
    "bf16 drafts 4": {"speculative": 3},
    "bf16 drafts 8": {"speculative": 7},
    "bf16 drafts 8 all": {"speculative": 7, **RICH},
    "bf16 page 1": {"page": 1},
    "bf16 page 128": {"page": 128},
    "bf16 64": {"dim": 64, "heads": (64, 8)},
    "bf16 96": {"dim": 96},
    "bf16 192/128": {"dim": (192, 128)},
    "bf16 256": {"dim": 256, "heads": (16, 8)},
    "bf16 256 drafts": {"dim": 256, "heads": (16, 8), "speculative": 7},
    "bf16 MHA": {"heads": (32, 32)},
    "bf16 1 head": {"heads": (8, 1)},
    "bf16 2 heads": {"heads": (16, 2)},
    "bf16 4 heads": {"heads": (32, 4)},
    "bf16 4, drafts 4": {"heads": (32, 4), "speculative": 3},
    "bf16 3 heads": {"heads": (6, 3), "page": 3},
    "bf16 64 a head": {"heads": (64, 1)},
    "bf16 1 head all": {"heads": (8, 1), **RICH},
    "bf16 ranks": {"world": 2},
    "fp8": {"format": "fp8_e4m3"},
    "fp8 everything": {"format": "fp8_e4m3", **RICH},
    "fp8 drafts 8": {"format": "fp8_e4m3", "speculative": 7},
    "fp8 1 head": {"format": "fp8_e4m3", "heads": (8, 1)},
    "fp8 96": {"format": "fp8_e4m3", "dim": 96},
    "fp8 256": {"format": "fp8_e4m3", "dim": 256, "heads": (16, 8)},
    "e5m2": {"format": "fp8_e5m2"},
    "int8": {"format": "int8"},
    "int8 everything": {"format": "int8", **RICH},
    "int8 2 heads": {"format": "int8", "heads": (16, 2)},
    "int8 256": {"format": "int8", "dim": 256, "heads": (16, 8)},
    "fp8 per row": {"format": "fp8_e4m3_token_head"},
    "nvfp4": {"format": "nvfp4"},
    "nvfp4 everything": {"format": "nvfp4", **RICH},
    "nvfp4 drafts 4": {"format": "nvfp4", "speculative": 3},
    "nvfp4 64": {"format": "nvfp4", "dim": 64},
    "nvfp4 256": {"format": "nvfp4", "dim": 256, "heads": (16, 8)},
    "nvfp4 1 head": {"format": "nvfp4", "heads": (8, 1)},
}


def record(case: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of one layer: three decodes."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for name in ("_decode", "join_parts"):
        kernel = getattr(decode, name)
        kernel = kernel.kernel if isinstance(kernel, Launches) else kernel
        setattr(decode, name, Launches(kernel, found))
    Device.detect = lambda _device: Device.of("sm90")  # type: ignore[method-assign, assignment]
    dtype, page = case.get("dtype", torch.bfloat16), case.get("page", 16)
    heads, kv_heads = case.get("heads", (32, 8))
    dims = case.get("dim", 128)
    dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    tokens = 1 + case.get("speculative", 0)
    layer = pageant.Layer(
        window=case.get("window"),
        soft_cap=case.get("soft_cap"),
        sinks=torch.zeros(heads) if "sinks" in case else None,
        alibi_slopes=torch.zeros(heads) if "alibi" in case else None,
    )
    world = case.get("world", 1)
    attn = pageant.Attention(
        pageant.Shape(
            num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=value_dim,
            dtype=dtype,
        ),
        pageant.CacheSpec(format=case.get("format", "auto"), page_size=page),
        features=pageant.Features.of([layer], draft_masks="masks" in case, lse=True),
        options=pageant.Options(
            kernels=case.get("kernels", "pageant"),
            speculative_tokens=tokens - 1,
            context_parallel=None if world == 1 else pageant.ContextParallel(rank=1, world=world),
        ),
    )  # fmt: skip
    row = attn.explain().rows["decode"]
    assert row.tiles == "hopper", attn.explain()
    kv = attn.new_cache(num_layers=1, num_pages=-(-120 // page))
    ids = iter(range(1000))
    pages = [[next(ids) for _ in range(-(-n // page))] for n in (20, 30, 60)]
    others = (
        {"draft_parents": torch.zeros(3 * tokens, dtype=torch.int32)} if "masks" in case else {}
    )
    batch = pageant.Batch.from_lengths([tokens] * 3, [20, 30, 60], pages, page, **others)
    plan = quietly(lambda: attn.plan(batch))
    q = torch.zeros(3 * tokens, heads, dim, dtype=dtype)
    attn.run(plan, q, kv[0], layer, return_lse=True)
    return found


def quietly(plan: Any) -> Any:
    """Plan on the CPU, where no planning kernel can run."""
    from pageant.plan import device_plan

    for name in ("plan_step", "draw_trees"):
        kernel = getattr(device_plan, name)
        if not isinstance(kernel, Launches):
            setattr(device_plan, name, Launches(kernel, []))
    return plan()


def compile_launch(kernel: Any, given: dict[str, Any]) -> Any:
    """Compile one launch, specialised as Triton would specialise it."""
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], special: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(type_of(part, (*path, i), special) for i, part in enumerate(value))
        if value is None or (special and isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, TensorDescriptor):
            return mangle_type(value)
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
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {key: given[key] for key in OPTIONS if key in given}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def sass_of(code: Any, path: Path) -> str:
    """What ptxas made of it."""
    path.write_bytes(code.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "-sass", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loop_of(sass: str) -> Counter[str]:
    """Instructions of the loop over keys, where every key is seen.

    It is the shortest backward jump across a matrix product; what a forward jump may leave out of
    it (blocks that hide keys) is left out.
    """
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)([^;]*);", sass)
    places = {int(place, 16): index for index, (place, _, _) in enumerate(lines)}
    jumps = {}
    for index, (_, name, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name == "BRA" and target is not None and int(target[1], 16) in places:
            jumps[index] = places[int(target[1], 16)]
    loops = [
        (end - begin, begin, end)
        for end, begin in jumps.items()
        if begin < end and any(name == "HMMA" for _, name, _ in lines[begin:end])
    ]
    if not loops:
        return Counter()
    _, at, end = min(loops)
    names = []
    while at <= end:
        names.append(lines[at][1])
        at = jumps[at] if at < jumps.get(at, 0) <= end else at + 1
    return Counter(names)


def lines(names: list[str], folder: Path) -> Iterator[str]:
    """What each launch takes, one a line."""
    with gluon_decode():
        for name in names:
            for kernel, given in record(CASES[name]):
                code = compile_launch(kernel, given)
                registers, spilled = usage(code.asm["ptx"], 90)
                about = f"{registers:4}{spilled:6}{code.metadata.shared:8}"
                if kernel.is_gluon():
                    path = folder / f"{name.replace(' ', '_').replace('/', '_')}.cubin"
                    sass = sass_of(code, path)
                    path.with_suffix(".sass").write_text(sass)
                    loop = loop_of(sass)
                    about += f"{loop.total():6}{given['C'].stages:3}"
                    wanted = ("HMMA", "LDSM", "UTMALDG")
                    about += "".join(f" {want}:{len(re.findall(want, sass))}" for want in wanted)
                yield f"{name:18} {kernel.__name__:11}{about}"


def main(arguments: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments[:1] == ["--sass"]:
            folder, arguments = Path(arguments[1]), arguments[2:]
            folder.mkdir(parents=True, exist_ok=True)
        print(
            f"triton {triton.__version__}; registers, bytes spilled, bytes of shared memory,",
            end="",
        )
        print(" instructions of the loop, stages")
        for line in lines(arguments or list(CASES), folder):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
