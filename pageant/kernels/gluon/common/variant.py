"""What a Gluon decode is compiled for, and how its parts read work lists."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pageant.plan.on_device import BEGIN, END

NO_SCALES, ROW_SCALES, BLOCK_SCALES = (gl.constexpr(kind) for kind in range(3))
NON_CAUSAL, CAUSAL, CAUSAL_BY_REQUEST = (gl.constexpr(kind) for kind in range(3))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is compiled into a kernel; two that are equal share their code.

    Attributes:
        kv_heads: computed together; a power of 2.
        groups: warps that share a kv head.
        tokens: keys of a stage for each warp.
        columns: of a tile, a power of 2.
        stages: of the ring.
        stores_queries: whether queries stay in shared memory, as registers do not hold them too.
        page_size, box: tokens of a page, and of what one copy brings of it, a power of 2.
        heads, query_tokens: of a tile.
        all_kv_heads, group: Hkv, and query heads of a kv head.
        dim, value_dim: D and Dv.
        words, value_words: of 16 bits, of a key and of a value, the next powers of 2.
        planes: codes of a word.
        kind, scales: how the cache stores elements and scales.
        blocks, value_blocks: stored scales of a row, where there are several.
        dtype: of both products' operands.
        causal: NON_CAUSAL, CAUSAL, or CAUSAL_BY_REQUEST.
        draft_mask, window, cap, alibi: whether there are such.
        world: ranks that share the keys.
    """

    kv_heads: int
    groups: int
    tokens: int
    columns: int
    stages: int
    stores_queries: bool
    page_size: int
    box: int
    heads: int
    query_tokens: int
    all_kv_heads: int
    group: int
    dim: int
    value_dim: int
    words: int
    value_words: int
    planes: int
    kind: int
    scales: int
    blocks: int
    value_blocks: int
    dtype: gl.dtype
    causal: int
    draft_mask: bool
    window: bool
    cap: bool
    alibi: bool
    world: int

    @property
    def warps(self) -> int:
        """That compute."""
        return self.kv_heads * self.groups

    @property
    def block(self) -> int:
        """Keys of a stage."""
        return self.groups * self.tokens

    @property
    def padded_value_dim(self) -> int:
        """The next power of 2."""
        return self.planes * self.value_words

    @property
    def boxes(self) -> int:
        """Copies of keys a stage."""
        return self.block // self.box

    @property
    def pieces(self) -> int:
        """Tiles that the query heads of a group are spread over."""
        return -(-self.group // self.heads)

    @property
    def units(self) -> int:
        """Tiles that a tile's tokens are spread over."""
        return self.all_kv_heads // self.kv_heads * self.pieces

    @property
    def bytes(self) -> int:
        """Of a stage."""
        rows = self.kv_heads * self.block
        scales = {0: 0, 1: 8, 2: self.blocks + self.value_blocks}[self.scales]
        return rows * (2 * self.words + 2 * self.value_words + scales)


@gluon.jit
def held(tokens, shard, WORLD: gl.constexpr):
    """How many of a sequence's first tokens the rank holds; see ``ContextParallel.count``."""
    if WORLD == 1:
        return tokens
    else:
        rounds = tokens // (shard[1] * WORLD) * shard[1]
        rest = tokens - rounds * WORLD - shard[0] * shard[1]
        return rounds + gl.minimum(gl.maximum(rest, 0), shard[1])


@gluon.jit
def position_of(keys, shard, WORLD: gl.constexpr):
    """Where in the sequence the rank's keys stand; see ``ContextParallel.position``."""
    if WORLD == 1:
        return keys
    else:
        return (keys // shard[1] * WORLD + shard[0]) * shard[1] + keys % shard[1]


@gluon.jit
def place(unit, C: gl.constexpr):
    """A unit's first kv head, its first query head in each group, and its first token."""
    SETS: gl.constexpr = C.all_kv_heads // C.kv_heads
    piece = unit // SETS
    first_head = piece % C.pieces * C.heads
    return unit % SETS * C.kv_heads, first_head, piece // C.pieces * C.query_tokens


@gluon.jit
def range_of(item):
    """First block and the one after the last: one at least, so that no loop is left out."""
    begin = gl.load(item + BEGIN)
    return begin, gl.maximum(gl.load(item + END), begin + 1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after one of the ring, and the phase its barriers are in then."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
