"""Variants of the writing kernels to compile without a GPU: plain data, for every architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pageant.cache.formats import FORMATS
from pageant.kernels.triton import quantize_out, write_pages

ELEMENTS = {"fp32": "*fp32", "fp16": "*fp16", "bf16": "*bf16", "int8": "*i8"}


@dataclass(frozen=True)
class Variant:
    """One kernel as a launch specialises it.

    Attributes:
        name: for people.
        kernel: a jit function.
        signature: type of every argument that is no constant: "*bf16", "i32", ...
        constexprs: value of every other, arguments that are None or 1 included.
        divisible: arguments known to be multiples of 16.
        options: num_warps and others.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: list[str]
    options: dict[str, Any]


def variants() -> list[Variant]:
    """What models with 8 KV heads and pages of 16 launch, and the largest rows there are."""
    return [
        *(_write(name, "*bf16", (128, 128), scale="*fp32") for name in FORMATS),
        _write("fp32", "*fp16", (72, 128)),
        _write("fp16", "*fp32", (512, 512)),
        _write("fp8_e4m3", "*fp16", (576 - 64, 64), scale="fp32", page_size=48),
        _write("fp8_e5m2", "*fp32", (24, 16)),
        _write("int8", "*fp32", (512, 256), step="i32"),
        _write("nvfp4", "*fp16", (192, 128), scale="*fp32", swizzled=True),
        _write("nvfp4_4over6", "*fp32", (512, 24), scale="fp32", step="i32", page_size=48),
        _write("nvfp4_4over6", "*bf16", (64, 64), stride="i64"),
        _quantize("fp8_e4m3", 128, scale="*fp32"),
        _quantize("fp8_e4m3", 512, scale=None),
        _quantize("nvfp4", 128, scale="fp32"),
        _quantize("nvfp4", 512, scale="*fp32", tiles=8 * 512 // 64),
    ]


def _write(
    format: str,
    model: str,
    dims: tuple[int, int],
    scale: str | None = None,
    stride: str = "i32",
    step: str | None = None,
    page_size: int = 16,
    swizzled: bool = False,
) -> Variant:
    fmt, options = FORMATS[format], dict(write_pages.options(format))
    signature = {"slots": "*i64"}
    constants: dict[str, Any] = {
        **{name: options.pop(name) for name in list(options) if name.isupper()},
        **{"D": dims[0], "DV": dims[1], "HEADS": 8, "PAGE_SIZE": page_size},
        **{"SWIZZLED": swizzled, "slots_step": 1},
    }
    kind = None if fmt.scale_dtype is None else "*u8" if fmt.scale_block else "*fp32"
    scale = scale if fmt.uses_layer_scales else None
    for x, elements in (("k", "keys"), ("v", "values")):
        signature |= {x: model, elements: ELEMENTS.get(format, "*u8")}
        signature |= {f"{x}_{axis}": stride for axis in ("token", "head")}
        signature |= {f"{elements}_{axis}": stride for axis in ("page", "row", "head")}
        signature |= {f"{x}_scales_{axis}": stride for axis in ("page", "row", "head")}
        for name, given, default in (
            (f"{x}_scales", kind, None),
            (f"{x}_scale", scale, None),
            (f"{x}_content", step, 1),
        ):
            if given is None:
                constants[name] = default
            else:
                signature[name] = given
    loose = (
        "k_scale",
        "v_scale",
        *(f"{x}_scales_{axis}" for x in "kv" for axis in ("row", "head")),
    )
    divisible = [name for name in signature if name not in loose]
    signature |= {"num_tokens": "i32", "num_slots": "i32"}
    name = f"write {format} of {model} {dims}"
    return Variant(name, write_pages.write_kernel, signature, constants, divisible, options)


def _quantize(format: str, dim: int, scale: str | None, tiles: int = 0) -> Variant:
    fmt = FORMATS[format]
    signature = {"x": "*fp32", "x_token": "i32", "x_head": "i32", "out": "*u8"}
    signature |= {"out_token": "i32", "out_head": "i32"}
    constants: dict[str, Any] = {"x_content": 1, "out_content": 1, "D": dim, "HEADS": 32}
    constants |= {"PROGRAM": quantize_out.PROGRAM, "TILES": tiles, "MAX": fmt.max_value}
    constants |= {"EXPONENT_BITS": fmt.exponent_bits, "MANTISSA_BITS": fmt.mantissa_bits}
    constants |= {"TOP": fmt.block_tops[0] if fmt.block_tops else 0.0, "scales_block": 1}
    if fmt.scale_block:
        signature |= {"scales": "*u8"}
    else:
        constants |= {"scales": None}
    divisible = list(signature)
    signature |= {"scales_token": "i32", "num_tokens": "i32", "start_row": "i32", "end": "*i32"}
    if scale is None:
        constants |= {"out_scale": None}
    else:
        signature |= {"out_scale": scale}
    options = {"num_warps": quantize_out.NUM_WARPS, "enable_fp_fusion": False}
    name = f"quantise out {format} {dim}, tiles {tiles}"
    return Variant(name, quantize_out.quantize_kernel, signature, constants, divisible, options)
