"""How one element of K or V is stored: a descriptor for each cache format.

A new format is a new row here, not a new branch elsewhere: kernels read the numbers below.

>>> resolve("auto", torch.bfloat16).name, resolve("fp8", torch.bfloat16).max_value
('bf16', 448.0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pageant.types import bad


@dataclass(frozen=True, kw_only=True)
class Format:
    """One cache format.

    A row is one token of one head: D elements, and its stored scales where the format has any.

    Attributes:
        name: what CacheSpec.format calls it.
        element_dtype: torch dtype of the element views ``LayerCache.k`` and ``.v``.
        bits: stored bits of one element; two elements of 4 bits share a byte, the even one low.
        exponent_bits, mantissa_bits: of the stored float, for kernels that widen it by bits;
            integers have no exponent.
        max_value: largest finite magnitude; writing saturates there if the format is quantised.
        quantized: whether writing rounds to fewer bits than models compute in.
        scale_dtype: type of the scales stored with the page; None where there are none.
        scale_block: elements along the head that share one stored scale; 0 means the whole row.
        block_tops: a block's largest element is stored as the first of these, or as the one that
            makes the block's squared error smallest.
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
    block_tops: tuple[float, ...] = ()

    @property
    def uses_layer_scales(self) -> bool:
        """Whether a layer's k_scale and v_scale apply; a scale of every row's own replaces them."""
        return self.quantized and (self.scale_dtype is None or self.scale_block > 0)

    @property
    def per_byte(self) -> int:
        """Elements that share one byte of the element view; 1 for elements of a byte or more."""
        return max(1, 8 // self.bits)

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of the elements of one row."""
        return head_dim * self.bits // 8

    def num_scales(self, head_dim: int) -> int:
        """Stored scales of one row; the last block may be shorter than the others.

        >>> [FORMATS[name].num_scales(72) for name in ("bf16", "int8", "nvfp4")]
        [0, 1, 5]
        """
        if self.scale_dtype is None:
            return 0
        return -(-head_dim // self.scale_block) if self.scale_block else 1

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of the scales of one row; 0 for formats without any."""
        return self.num_scales(head_dim) * (self.scale_dtype.itemsize if self.scale_dtype else 0)


# OCP 8-bit floating point specification 1.0: e4m3 has no infinity, 0x7f is its only NaN.
_FP8_E4M3 = Format(
    name="fp8_e4m3",
    element_dtype=torch.float8_e4m3fn,
    bits=8,
    exponent_bits=4,
    mantissa_bits=3,
    max_value=448.0,
    quantized=True,
)
# e2m1 of the OCP microscaling formats 1.0, with NVIDIA's blocks of 16 and e4m3 scales.
_NVFP4 = Format(
    name="nvfp4",
    element_dtype=torch.uint8,
    bits=4,
    exponent_bits=2,
    mantissa_bits=1,
    max_value=6.0,
    quantized=True,
    scale_dtype=torch.float8_e4m3fn,
    scale_block=16,
    block_tops=(6.0,),
)

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
        _FP8_E4M3,
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
        replace(_FP8_E4M3, name="fp8_e4m3_token_head", scale_dtype=torch.float32),
        _NVFP4,
        replace(_NVFP4, name="nvfp4_4over6", block_tops=(6.0, 4.0)),
    )
}
ALIASES = {"fp8": "fp8_e4m3"}
OF_DTYPE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def resolve(name: str, model_dtype: torch.dtype) -> Format:
    """The format a name stands for; "auto" is the model's own dtype.

    Raises:
        ArgumentError: argument "cache", for a name that is not a format.
    """
    if not isinstance(name, str):
        raise bad("cache", name, ", ".join(("auto", *ALIASES, *FORMATS)))
    name = OF_DTYPE.get(model_dtype, "fp32") if name == "auto" else ALIASES.get(name, name)
    if name not in FORMATS:
        raise bad("cache", name, ", ".join(("auto", *ALIASES, *FORMATS)))
    return FORMATS[name]
