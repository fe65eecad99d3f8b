"""Stored elements into float16 operands, by a few instructions a register.

Codes of fewer than 16 bits are read as words of two (e4m3, e5m2, int8) or four (e2m1), so that
matrix loads can turn them around. The codes of a word go to as many planes, each an operand of its
own:

- of keys, a register holds words j and j + 1 of one token, j even, and each plane takes the next
  two codes of it: see `element_of`.
- of values, a register holds word j of tokens t and t + 1, and plane i takes code i of both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAIN, E4M3, E5M2, INTEGER, E2M1 = (gl.constexpr(kind) for kind in range(5))
E2M1_FACTOR = gl.constexpr(64.0)  # what values of `widen_four` lack: they are read as e4m3

KEY_E4M3 = gl.constexpr("""{ .reg .b16 a, b; mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
VALUE_E4M3 = gl.constexpr("""{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120;
mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
# An e5m2 is the upper half of a float16.
KEY_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
VALUE_E5M2 = gl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
# An int8 plus 128 is the lower half of a float16 from 1024 on.
_INTEGER = """{ .reg .b32 t, high, less; xor.b32 t, $2, 0x80808080; mov.b32 high, 0x64646464;
mov.b32 less, 0xE480E480; prmt.b32 $0, t, high, FIRST; prmt.b32 $1, t, high, SECOND;
add.f16x2 $0, $0, less; add.f16x2 $1, $1, less; }"""
KEY_INTEGER = gl.constexpr(_INTEGER.replace("FIRST", "0x4140").replace("SECOND", "0x4342"))
VALUE_INTEGER = gl.constexpr(_INTEGER.replace("FIRST", "0x4240").replace("SECOND", "0x4341"))
# Sign, exponent and mantissa of each e2m1 are moved to where those of an e4m3 are.
_E2M1 = """{ .reg .b32 t, u, h, l, w; .reg .b16 a, b, c, d; ORDER
shr.b32 t, w, 2; and.b32 t, t, 0x1C1C1C1C; lop3.b32 h, w, 0x80808080, t, 0xEA;
shl.b32 t, w, 2; and.b32 t, t, 0x1C1C1C1C; shl.b32 u, w, 4; lop3.b32 l, u, 0x80808080, t, 0xEA;
mov.b32 {a, b}, l; mov.b32 {c, d}, h;
cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, c;
cvt.rn.f16x2.e4m3x2 $2, b; cvt.rn.f16x2.e4m3x2 $3, d;
mul.f16x2 $0, $0, $5; mul.f16x2 $1, $1, $5; mul.f16x2 $2, $2, $5; mul.f16x2 $3, $3, $5; }"""
KEY_E2M1 = gl.constexpr(_E2M1.replace("ORDER", "mov.b32 w, $4;"))
VALUE_E2M1 = gl.constexpr(_E2M1.replace("ORDER", "prmt.b32 w, $4, 0, 0x3120;"))
# Of a word of four blocks' scales, the one chosen, twice; of two tokens' words, one of each.
KEY_SCALES = gl.constexpr("""{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, $3;
mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
VALUE_SCALES = gl.constexpr("""{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, $3, $4;
mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")


@gluon.jit
def element_of(word, PLANE: gl.constexpr, PLANES: gl.constexpr):
    """Which element of a key stands at a word of a plane.

    Of two planes, words 0 and 1 of plane 0 are elements 0 and 1, and of plane 1 elements 2 and 3.
    """
    if PLANES == 1:
        element = word
    elif PLANES == 2:
        element = 2 * (word - word % 2) + word % 2 + 2 * PLANE
    else:
        # A byte's halves go to different planes.
        element = 4 * (word - word % 2) + 2 * (word % 2) + PLANE % 2 + 4 * (PLANE // 2)
    return element


@gluon.jit
def widen_two(words, KIND: gl.constexpr, IS_KEY: gl.constexpr):
    """Both planes, float16, of int16 words of two codes, in the words' layout."""
    if KIND == E4M3:
        return _widen_two(words, KEY_E4M3 if IS_KEY else VALUE_E4M3)
    elif KIND == E5M2:
        return _widen_two(words, KEY_E5M2 if IS_KEY else VALUE_E5M2)
    else:
        return _widen_two(words, KEY_INTEGER if IS_KEY else VALUE_INTEGER)


@gluon.jit
def _widen_two(words, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _widen_four(words, scales, ASM: gl.constexpr):
    return gl.inline_asm_elementwise(
        ASM,
        "=&r,=&r,=&r,=&r,r,r",
        [words, scales],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def widen_keys(words, scales, BLOCKS: gl.constexpr):
    """All four planes of keys of e2m1, times their blocks' scales.

    Args:
        words: int16 [warps, tokens, words], of four codes, in an operand's layout.
        scales: shared memory, int32 [warps, tokens, BLOCKS / 4], e4m3 of four blocks.
        BLOCKS: of a row, a power of 2.
    """
    LAYOUT: gl.constexpr = words.type.layout
    WARPS: gl.constexpr = words.shape[0]
    TOKENS: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[2]
    split = words.reshape([WARPS, TOKENS, BLOCKS // 4, 2, 2, 4])
    OUTER: gl.constexpr = split.type.layout
    PAIRS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(5, OUTER))
    four = gl.expand_dims(scales.load(gl.SliceLayout(3, PAIRS)), 3)
    index: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, PAIRS)))
    which = gl.arange(0, 2, layout=index)
    which = gl.expand_dims(gl.expand_dims(gl.expand_dims(which, 0), 0), 0)
    four, selector = gl.broadcast(four, 0x2200 + 0x1111 * which)
    first, second = gl.inline_asm_elementwise(
        KEY_SCALES,
        "=&r,=&r,r,r",
        [four, selector],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    factor = gl.join(first, second).permute((0, 1, 2, 4, 3))
    factor = gl.convert_layout(factor, gl.SliceLayout(5, OUTER))
    split, factor = gl.broadcast(split, gl.expand_dims(factor, 5))
    a, b, c, d = gl.inline_asm_elementwise(
        KEY_E2M1,
        "=&r,=&r,=&r,=&r,r,r,r",
        [split, factor],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    return (
        gl.convert_layout(a.reshape([WARPS, TOKENS, WORDS]), LAYOUT),
        gl.convert_layout(b.reshape([WARPS, TOKENS, WORDS]), LAYOUT),
        gl.convert_layout(c.reshape([WARPS, TOKENS, WORDS]), LAYOUT),
        gl.convert_layout(d.reshape([WARPS, TOKENS, WORDS]), LAYOUT),
    )


@gluon.jit
def widen_values(words, scales, BLOCKS: gl.constexpr):
    """All four planes of values of e2m1, times their blocks' scales.

    Args:
        words: int16 [warps, words, tokens], of four codes, in an operand's layout.
        scales: shared memory, int32 [warps, BLOCKS / 4, tokens], e4m3 of four blocks.
        BLOCKS: of a row, a power of 2.
    """
    LAYOUT: gl.constexpr = words.type.layout
    WARPS: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1]
    TOKENS: gl.constexpr = words.shape[2]
    split = words.reshape([WARPS, BLOCKS // 4, 2, 2, 4, TOKENS])
    OUTER: gl.constexpr = split.type.layout
    PAIRS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, OUTER))
    four = gl.expand_dims(scales.load(gl.SliceLayout(2, PAIRS)), 2)
    index: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, PAIRS)))
    which = gl.arange(0, 2, layout=index)
    which = gl.expand_dims(gl.expand_dims(gl.expand_dims(which, 0), 0), 3)
    four, selector = gl.broadcast(four, 0x6240 + 0x1111 * which)
    first, second = gl.inline_asm_elementwise(
        VALUE_SCALES,
        "=&r,=&r,r,r,r,r",
        [four, selector],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    factor = gl.join(first, second).permute((0, 1, 4, 2, 3))
    factor = gl.convert_layout(factor, gl.SliceLayout(4, OUTER))
    split, factor = gl.broadcast(split, gl.expand_dims(factor, 4))
    a, b, c, d = _widen_four(split, factor, VALUE_E2M1)
    return (
        gl.convert_layout(a.reshape([WARPS, WORDS, TOKENS]), LAYOUT),
        gl.convert_layout(b.reshape([WARPS, WORDS, TOKENS]), LAYOUT),
        gl.convert_layout(c.reshape([WARPS, WORDS, TOKENS]), LAYOUT),
        gl.convert_layout(d.reshape([WARPS, WORDS, TOKENS]), LAYOUT),
    )
