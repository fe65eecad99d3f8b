"""How large the tiles of the Hopper decode are: data that planning and the kernel agree on."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from pageant.cache.formats import Format
from pageant.device import KIB, Device
from pageant.plan.tiles import Tile, power_of_2, tile_for
from pageant.select.row import PHASES, Phase, Tiles
from pageant.types import Shape

WORD_BITS = 16  # what matrix loads turn around; a word holds one code or more
LEAST_COLUMNS = 8  # of a product's second operand
MOST_BOX = 256  # elements along an axis of what one copy brings
MOST_STAGES = 12
MOST_HELD = 6144  # elements of queries and outputs that a warp's registers hold
RESERVED = 2 * KIB  # shared memory beside the stages: barriers, exchanges between warps


@dataclass(frozen=True, kw_only=True)
class HopperTile(Tile):
    """A tile of several kv heads: `heads` are query heads of each, `rows` all its columns.

    Attributes:
        kv_heads: computed together, a power of 2.
        groups: warps that share a kv head, each with its part of every block of keys.
        columns: `tokens * heads`, rounded up to a power of 2 from 8 up.
        scale_blocks: most stored scales of a row that lie together.
        stores_queries: whether queries stay in shared memory beside the stages.
    """

    kv_heads: int
    groups: int
    columns: int
    scale_blocks: int
    stores_queries: bool

    def units(self, shape: Shape) -> int:
        """Tiles that a tile's tokens are spread over: sets of kv heads, pieces of groups."""
        return shape.num_kv_heads // self.kv_heads * -(-shape.group_size // self.heads)

    def box(self, page_size: int) -> int:
        """Tokens of a page that one copy brings: a power of 2 that divides the page.

        >>> shape = Shape(num_q_heads=8, num_kv_heads=8, head_dim=128)
        >>> from pageant.cache.formats import FORMATS
        >>> tile = hopper_tile(shape, FORMATS["bf16"], Device.of("sm90"), tokens=1)
        >>> [tile.box(size) for size in (1, 8, 16, 24, 64)]
        [1, 8, 16, 8, 16]
        """
        most = min(self.block, MOST_BOX // power_of_2(max(1, self.scale_blocks)))
        return gcd(page_size, most)


@dataclass(frozen=True, kw_only=True)
class HopperRule:
    """The sizes for keys and values of at most so many elements of `bits`.

    Attributes:
        bits: of an element.
        dim, value_dim: at most, as powers of 2.
        warps: that compute.
        tokens: keys of a stage for each warp.
        columns: at most.
    """

    bits: int
    dim: int
    value_dim: int
    warps: int
    tokens: int
    columns: int


# Of the rules for keys and values of a size, the first with columns enough wins, or else the last:
# then groups and drafts are cut into several tiles, which read the keys again. Many columns need
# the registers of a program of four warps.
RULES: tuple[HopperRule, ...] = (
    HopperRule(bits=16, dim=64, value_dim=64, warps=8, tokens=32, columns=32),
    HopperRule(bits=16, dim=128, value_dim=128, warps=8, tokens=16, columns=16),
    HopperRule(bits=16, dim=128, value_dim=128, warps=4, tokens=16, columns=32),
    HopperRule(bits=16, dim=256, value_dim=128, warps=8, tokens=16, columns=16),
    HopperRule(bits=16, dim=256, value_dim=256, warps=4, tokens=16, columns=16),
    HopperRule(bits=8, dim=128, value_dim=128, warps=8, tokens=32, columns=16),
    HopperRule(bits=8, dim=128, value_dim=128, warps=4, tokens=16, columns=32),
    HopperRule(bits=8, dim=256, value_dim=256, warps=8, tokens=16, columns=16),
    HopperRule(bits=4, dim=128, value_dim=128, warps=8, tokens=64, columns=16),
    HopperRule(bits=4, dim=256, value_dim=256, warps=8, tokens=32, columns=16),
)


def tiles_for(
    tiles: Tiles, shape: Shape, fmt: Format, device: Device, tokens: int
) -> dict[Phase, Tile]:
    """The tiles of both phases; `tiles` says whose those of decodes are, see ``Row.tiles``."""
    found = {phase: tile_for(phase, shape, fmt, device, tokens) for phase in PHASES}
    if tiles == "hopper":
        found["decode"] = hopper_tile(shape, fmt, device, tokens)
    return found


def hopper_tile(shape: Shape, fmt: Format, device: Device, tokens: int) -> HopperTile:
    """The tile of the Hopper decode.

    Args:
        shape: heads and head sizes.
        fmt: of the cache.
        device: where it runs.
        tokens: most new tokens of a decode.

    >>> from pageant.cache.formats import FORMATS
    >>> shape = Shape(num_q_heads=32, num_kv_heads=8, head_dim=128)
    >>> tile = hopper_tile(shape, FORMATS["bf16"], Device.of("sm90"), tokens=2)
    >>> tile.kv_heads, tile.groups, tile.columns, tile.block, tile.stages
    (8, 1, 8, 16, 3)

    Of two kv heads, four warps share each, and a block of keys is four times as long:

    >>> shape = Shape(num_q_heads=16, num_kv_heads=2, head_dim=128)
    >>> tile = hopper_tile(shape, FORMATS["bf16"], Device.of("sm90"), tokens=1)
    >>> tile.kv_heads, tile.groups, tile.block, tile.stages
    (2, 4, 64, 3)
    """
    dims = power_of_2(shape.head_dim), power_of_2(shape.value_dim)
    fitting = [
        rule
        for rule in RULES
        if rule.bits == fmt.bits and dims[0] <= rule.dim and dims[1] <= rule.value_dim
    ]
    sizes = fitting[0].dim, fitting[0].value_dim
    fitting = [rule for rule in fitting if (rule.dim, rule.value_dim) == sizes]
    wanted = shape.group_size * tokens
    rule = next((rule for rule in fitting if rule.columns >= wanted), fitting[-1])
    kv_heads = gcd(shape.num_kv_heads, rule.warps)
    groups = rule.warps // kv_heads
    heads = min(shape.group_size, rule.columns)
    taken = min(rule.columns // heads, tokens)
    columns = max(LEAST_COLUMNS, power_of_2(taken * heads))
    blocks = [fmt.num_scales(dim) for dim in (shape.head_dim, shape.value_dim)]
    row = sum(dims) * fmt.bits // 8 + sum(fmt.scale_bytes(dim) for dim in dims)
    stage = row * rule.warps * rule.tokens
    # Where warps share a head, they exchange one plane of their results at a time.
    words = max(dims[1] * fmt.bits // WORD_BITS, 1)
    exchanged = rule.warps * words * columns * 4 if groups > 1 else 0
    stores = columns * sum(dims) > MOST_HELD
    stored = rule.warps * columns * dims[0] * 2 if stores else 0
    room = device.shared_memory_bytes - RESERVED - exchanged - stored
    return HopperTile(
        tokens=taken,
        heads=heads,
        rows=kv_heads * columns,
        block=groups * rule.tokens,
        warps=rule.warps,
        stages=max(1, min(MOST_STAGES, room // stage)),
        native_fp8=device.native_fp8,
        kv_heads=kv_heads,
        groups=groups,
        columns=columns,
        scale_blocks=max(blocks) if fmt.scale_block else 1,
        stores_queries=stores,
    )
