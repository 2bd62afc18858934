"""Weights in MXFP4 as pairs of 16-bit numbers, each pair an int32, in Gluon. A packed word has two halves of
four weights (gpu_weight.py)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def halves(words):
    """Returns the low half of each word twice, and the high half twice."""
    return (words & 0xFFFF) | (words << 16), ((words >> 16) & 0xFFFF) | (words & -0x10000)


@gluon.jit
def widened(top, dtype: gl.constexpr):
    """Returns the weights in the top 4 bits of each half of a word, sign, exponent and mantissa (loaders.py),
    before they are scaled. `dtype`: "bf16" or "f16"."""
    SHIFT: gl.constexpr = 6 if dtype == "bf16" else 3
    return (top & -0x7FFF8000) | ((top & 0x70007000) >> SHIFT)


@gluon.jit
def scaled(pairs, scales, dtype: gl.constexpr):
    """Returns the products of pairs with pairs of scales."""
    return gl.inline_asm_elementwise(
        f"mul.rn.{dtype}x2 $0, $1, $2;", "=r,r,r", [pairs, scales], gl.int32, True, 1
    )
