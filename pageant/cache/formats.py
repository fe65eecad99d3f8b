"""How one element of K or V is stored: a descriptor for each cache format.

A new format is a new row here, not a new branch elsewhere: kernels read the numbers below.

>>> resolve("auto", torch.bfloat16).name, resolve("fp8", torch.bfloat16).max_value
('bf16', 448.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.types import bad


@dataclass(frozen=True, kw_only=True)
class Format:
    """One cache format.

    Attributes:
        name: what CacheSpec.format calls it.
        element_dtype: torch dtype of the element views ``LayerCache.k`` and ``.v``.
        bits: stored bits of one element; 4-bit formats pack two elements a byte.
        exponent_bits, mantissa_bits: of the stored float, for kernels that widen it by bits.
        max_value: largest finite magnitude; writing saturates there if the format is quantised.
        quantized: whether k_scale and v_scale apply (design: ignored for 16- and 32-bit caches).
        scale_dtype: type of the scales stored with the page; None where there are none.
        scale_block: elements along the head that share one stored scale; 0 means the whole row.
    """

    name: str
    element_dtype: torch.dtype
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max_value: float
    quantized: bool = False
    scale_dtype: torch.dtype | None = None
    scale_block: int = 0

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of the elements of one row (one token, one head)."""
        return head_dim * self.bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of the scales of one row; 0 for formats without any."""
        if self.scale_dtype is None:
            return 0
        return self.scale_dtype.itemsize * (head_dim // self.scale_block if self.scale_block else 1)


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format(
            name="fp32",
            element_dtype=torch.float32,
            bits=32,
            exponent_bits=8,
            mantissa_bits=23,
            max_value=torch.finfo(torch.float32).max,
        ),
        Format(
            name="fp16",
            element_dtype=torch.float16,
            bits=16,
            exponent_bits=5,
            mantissa_bits=10,
            max_value=65504.0,
        ),
        Format(
            name="bf16",
            element_dtype=torch.bfloat16,
            bits=16,
            exponent_bits=8,
            mantissa_bits=7,
            max_value=torch.finfo(torch.bfloat16).max,
        ),
        # OCP 8-bit floating point specification 1.0: e4m3 has no infinity, 0x7f is its only NaN.
        Format(
            name="fp8_e4m3",
            element_dtype=torch.float8_e4m3fn,
            bits=8,
            exponent_bits=4,
            mantissa_bits=3,
            max_value=448.0,
            quantized=True,
        ),
        Format(
            name="fp8_e5m2",
            element_dtype=torch.float8_e5m2,
            bits=8,
            exponent_bits=5,
            mantissa_bits=2,
            max_value=57344.0,
            quantized=True,
        ),
        Format(
            name="int8",
            element_dtype=torch.int8,
            bits=8,
            exponent_bits=0,
            mantissa_bits=7,
            max_value=127.0,
            quantized=True,
            scale_dtype=torch.float32,
        ),
        Format(
            name="fp8_e4m3_token_head",
            element_dtype=torch.float8_e4m3fn,
            bits=8,
            exponent_bits=4,
            mantissa_bits=3,
            max_value=448.0,
            quantized=True,
            scale_dtype=torch.float32,
        ),
        *(
            Format(
                name=name,
                element_dtype=torch.uint8,
                bits=4,
                exponent_bits=2,
                mantissa_bits=1,
                max_value=6.0,
                quantized=True,
                scale_dtype=torch.float8_e4m3fn,
                scale_block=16,
            )
            for name in ("nvfp4", "nvfp4_4over6")
        ),
    )
}
ALIASES = {"fp8": "fp8_e4m3"}
RESERVED: tuple[str, ...] = ()
OF_DTYPE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def resolve(name: str, model_dtype: torch.dtype) -> Format:
    """The format a name stands for; "auto" is the model's own dtype.

    Raises:
        ArgumentError: argument "cache", for a name that is not a format, or not one yet.
    """
    name = OF_DTYPE.get(model_dtype, "fp32") if name == "auto" else ALIASES.get(name, name)
    if name in RESERVED:
        raise bad("cache", name, f"{', '.join(FORMATS)} ({name} is reserved, not yet served)")
    if name not in FORMATS:
        raise bad("cache", name, ", ".join(("auto", *ALIASES, *FORMATS)))
    return FORMATS[name]
