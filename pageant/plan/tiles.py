"""How large the tiles of the Triton kernels are: data that planning and kernels agree on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageant.cache.formats import Format
from pageant.device import KIB, Device
from pageant.select.row import Phase
from pageant.types import Shape

LEAST_ROWS = 16  # of a tile: what a tensor core multiplies at once


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one kernel cuts its work.

    Attributes:
        tokens, heads: of a tile of query rows; heads share a kv head.
        rows: their product, rounded up to a power of 2 from 16 up.
        block: keys at a time.
        warps: of a program.
        stages: blocks of keys on their way at once.
        shares: programs that share the decodes, for each multiprocessor.
        native_fp8: whether the device converts fp8 itself.
    """

    tokens: int
    heads: int
    rows: int
    block: int
    warps: int
    stages: int
    shares: int = 1
    native_fp8: bool = False

    def units(self, shape: Shape) -> int:
        """Tiles that one tile's tokens are spread over: kv heads, and pieces of their groups."""
        return shape.num_kv_heads * -(-shape.group_size // self.heads)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The sizes for rows of at most `dim` elements of `itemsize` bytes, in `shared_kib`.

    The device's compute capability is `capability` or more; the cache stores an element in at most
    `bits`.
    """

    dim: int
    itemsize: int
    shared_kib: int
    rows: int
    block: int
    warps: int
    stages: int
    shares: int = 1
    capability: int = 0
    bits: int = 32


# Of the rules that hold a key or value (a power of 2 of elements), an element of the products'
# operands (bytes) and the device's shared memory, the first with rows enough for a decode wins, or
# the first of those with the most; prefill takes the first. Decode takes a tile of
# prefill for keys that requests share: 128 keys at a time spill there where compiled for Blackwell.
# Tiles of decode stay below 64 rows: from there on Triton 3.6 multiplies by wgmma on Hopper, whose
# sums were wrong where rows of up to 32 values are widened first.
DECODE: tuple[Rule, ...] = (
    Rule(dim=64, itemsize=2, shared_kib=163, rows=32, block=128, warps=4, stages=3, shares=2),
    Rule(
        dim=128, itemsize=2, shared_kib=163, rows=16, block=32, warps=4, stages=3, shares=4, bits=4
    ),
    Rule(dim=128, itemsize=2, shared_kib=163, rows=16, block=64, warps=2, stages=3, shares=4),
    Rule(dim=128, itemsize=2, shared_kib=163, rows=32, block=64, warps=4, stages=3, shares=3),
    Rule(dim=256, itemsize=2, shared_kib=163, rows=32, block=32, warps=4, stages=3, shares=2),
    Rule(dim=512, itemsize=2, shared_kib=163, rows=32, block=32, warps=8, stages=2, shares=1),
    Rule(dim=64, itemsize=2, shared_kib=64, rows=32, block=64, warps=4, stages=2, shares=2),
    Rule(dim=128, itemsize=2, shared_kib=64, rows=32, block=32, warps=8, stages=2, shares=2),
    Rule(dim=256, itemsize=2, shared_kib=64, rows=32, block=16, warps=4, stages=2, shares=2),
    Rule(dim=512, itemsize=2, shared_kib=64, rows=16, block=16, warps=8, stages=1, shares=1),
    Rule(dim=128, itemsize=4, shared_kib=64, rows=32, block=32, warps=4, stages=1, shares=2),
    Rule(dim=512, itemsize=4, shared_kib=64, rows=16, block=16, warps=8, stages=1, shares=1),
)
PREFILL: tuple[Rule, ...] = (
    Rule(dim=64, itemsize=2, shared_kib=227, rows=128, block=128, warps=4, stages=2),
    Rule(
        dim=128, itemsize=2, shared_kib=227, rows=128, block=64, warps=8, stages=2, capability=100
    ),
    Rule(dim=128, itemsize=2, shared_kib=227, rows=128, block=128, warps=8, stages=2, bits=4),
    Rule(dim=128, itemsize=2, shared_kib=227, rows=64, block=128, warps=4, stages=2, bits=8),
    Rule(dim=128, itemsize=2, shared_kib=227, rows=128, block=128, warps=8, stages=3),
    Rule(dim=256, itemsize=2, shared_kib=227, rows=128, block=64, warps=8, stages=2),
    Rule(dim=64, itemsize=2, shared_kib=163, rows=64, block=64, warps=4, stages=3),
    Rule(dim=128, itemsize=2, shared_kib=163, rows=64, block=64, warps=4, stages=2),
    Rule(dim=256, itemsize=2, shared_kib=163, rows=64, block=32, warps=8, stages=2),
    Rule(dim=512, itemsize=2, shared_kib=163, rows=32, block=32, warps=8, stages=2),
    Rule(dim=64, itemsize=2, shared_kib=64, rows=64, block=64, warps=4, stages=2),
    Rule(dim=128, itemsize=2, shared_kib=64, rows=64, block=32, warps=4, stages=2),
    Rule(dim=256, itemsize=2, shared_kib=64, rows=32, block=16, warps=4, stages=2),
    Rule(dim=512, itemsize=2, shared_kib=64, rows=16, block=16, warps=8, stages=1),
    Rule(dim=128, itemsize=4, shared_kib=64, rows=32, block=32, warps=8, stages=1),
    Rule(dim=512, itemsize=4, shared_kib=64, rows=16, block=16, warps=8, stages=1),
)


def operand_dtype(model: torch.dtype, fmt: Format) -> torch.dtype:
    """In what both products are computed: what holds every key exactly, at least cost.

    Codes whose scale is the layer's, or a block's, are float16 numbers; rows that have a scale each
    are not, once it multiplies. A bfloat16 query becomes float16 row by row, see
    ``kernels/triton/attention_tile.py``.

    >>> from pageant.cache.formats import FORMATS
    >>> operand_dtype(torch.bfloat16, FORMATS["fp8_e4m3"])
    torch.float16
    >>> operand_dtype(torch.bfloat16, FORMATS["int8"])
    torch.bfloat16
    >>> operand_dtype(torch.float16, FORMATS["bf16"])
    torch.float32
    """
    if fmt.quantized and model != torch.float32:
        has_row_scales = fmt.scale_dtype is not None and not fmt.scale_block
        return model if has_row_scales else torch.float16
    if model == torch.bfloat16 and fmt.element_dtype == torch.float16:
        return torch.float16
    return model if fmt.quantized or fmt.element_dtype == model else torch.float32


def tile_for(phase: Phase, shape: Shape, fmt: Format, device: Device, tokens: int) -> Tile:
    """The tile of one phase's kernel.

    Args:
        phase: "decode" or "prefill".
        shape: heads and head sizes.
        fmt: of the cache.
        device: where it runs.
        tokens: most new tokens of a decode.

    >>> from pageant.cache.formats import FORMATS
    >>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
    >>> tile = tile_for("decode", shape, FORMATS["bf16"], Device.of("sm90"), tokens=2)
    >>> tile.tokens, tile.heads, tile.rows, tile.block
    (2, 4, 16, 64)
    """
    dim = power_of_2(max(shape.head_dim, shape.value_dim))
    itemsize = operand_dtype(shape.dtype, fmt).itemsize
    fitting = [
        rule
        for rule in (DECODE if phase == "decode" else PREFILL)
        if dim <= rule.dim
        and itemsize <= rule.itemsize
        and rule.shared_kib * KIB <= device.shared_memory_bytes
        and rule.capability <= device.capability
        and fmt.bits <= rule.bits
    ]
    # A larger rule of the same width, never one for wider rows.
    fitting = [rule for rule in fitting if rule.dim == fitting[0].dim]
    fitting = [rule for rule in fitting if rule.shared_kib == fitting[0].shared_kib]
    enough = [rule for rule in fitting if rule.rows >= shape.group_size * tokens]
    if phase == "decode":
        rule = enough[0] if enough else max(fitting, key=lambda rule: rule.rows)
    else:
        rule = fitting[0]
    heads = min(shape.group_size, rule.rows)
    most = rule.rows // heads
    taken = min(most, tokens) if phase == "decode" else most
    return Tile(
        tokens=taken,
        heads=heads,
        rows=max(LEAST_ROWS, power_of_2(taken * heads)),
        block=rule.block,
        warps=rule.warps,
        stages=rule.stages,
        shares=rule.shares,
        native_fp8=device.native_fp8,
    )


def power_of_2(number: int) -> int:
    """The least power of 2 that is not below it.

    >>> power_of_2(96), power_of_2(128)
    (128, 128)
    """
    return 1 << (number - 1).bit_length()
