"""Weights in MXFP4 as pairs of 16-bit numbers, each pair an int32, in Gluon. A packed word has two halves of
four weights (gpu_weight.py)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(words):
    """Returns the low half of each word twice, and the high half twice."""
    return _bytes(words, "0x1010"), _bytes(words, "0x3232")


@gluon.jit
def _bytes(words, ORDER: gl.constexpr):
    """Returns each word's bytes in an order, one instruction."""
    return gl.inline_asm_elementwise(f"prmt.b32 $0, $1, $1, {ORDER};", "=r,r", [words], gl.int32, True, 1)


@gluon.jit
def scaled(pairs, scales, dtype: gl.constexpr):
    """Returns the products of pairs with pairs of scales."""
    return gl.inline_asm_elementwise(
        f"mul.rn.{dtype}x2 $0, $1, $2;", "=r,r,r", [pairs, scales], gl.int32, True, 1
    )


@gluon.jit
def placed(words, NIBBLE: gl.constexpr, dtype: gl.constexpr):
    """Returns the weights in bits 4 NIBBLE to 4 NIBBLE + 3 of each half of a word, sign, exponent and
    mantissa, put where the type has them (loaders.py), before they are scaled. `dtype`: "bf16" or "f16"."""
    SHIFT: gl.constexpr = 6 if dtype == "bf16" else 3
    LEFT: gl.constexpr = 12 - 4 * NIBBLE
    SIGN: gl.constexpr = -0x7FFF8000
    REST: gl.constexpr = 0x70007000 >> SHIFT
    if LEFT >= SHIFT:
        rest = words << (LEFT - SHIFT)
    else:
        rest = words >> (SHIFT - LEFT)
    return ((words << LEFT) & SIGN) | (rest & REST)
