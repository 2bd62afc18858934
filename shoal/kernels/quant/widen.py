"""fp8 (e4m3) becomes bf16 or fp16 in registers, in Triton, for kernels that multiply it with such numbers.

Every e4m3 number is a number of either type, so nothing is rounded. The compiler's own conversion goes
through fp16 and float32. Here two numbers at a time are put where 16 bits have sign, exponent and mantissa.
They are too small by a power of two then, and the smallest ones are subnormal, so one multiplication makes up
for both. The method comes from the Marlin kernels (Frantar et al., 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter knows no assembler.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def _assembler(kind: str, shift: int, exponent: int, bias: int, mantissa: int) -> str:
    """Four bytes, $2, become two pairs of numbers, $0 and $1. `shift`: from e4m3's exponent and mantissa at
    the top of 16 bits, below the sign, to the type's. `exponent`: log2 of what the numbers are too small
    by."""
    scale = (exponent + bias) << mantissa
    pair = f"""
        and.b32 magnitude, t, {0x7F007F00:#x};
        shr.b32 magnitude, magnitude, {shift};
        lop3.b32 t, t, 0x80008000, magnitude, 0xEA;"""
    return f"""{{
        .reg .b32 t, magnitude, scale, nothing;
        mov.b32 scale, {scale << 16 | scale:#x};
        mov.b32 nothing, 0x80008000;
        prmt.b32 t, $2, 0, 0x1404;{pair}
        fma.rn.{kind}x2 $0, t, scale, nothing;
        prmt.b32 t, $2, 0, 0x3424;{pair}
        fma.rn.{kind}x2 $1, t, scale, nothing;
    }}"""


# -0.0 is added, which leaves every zero its sign.
TO_BF16 = tl.constexpr(_assembler("bf16", shift=4, exponent=120, bias=127, mantissa=7))
TO_FP16 = tl.constexpr(_assembler("f16", shift=1, exponent=8, bias=15, mantissa=10))


@triton.jit
def _byte(words, shift: tl.constexpr, DTYPE: tl.constexpr):
    return (words >> shift).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def _half(word, shift: tl.constexpr, DTYPE: tl.constexpr):
    return (word >> shift).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def widened_words(words, DTYPE: tl.constexpr):
    """The four e4m3 numbers of each int32 as numbers of DTYPE, bf16 or fp16, in two more dimensions of two,
    the lowest first. A NaN, which nothing here writes, becomes 480."""
    if INTERPRETED:
        low = tl.join(_byte(words, 0, DTYPE), _byte(words, 8, DTYPE))
        high = tl.join(_byte(words, 16, DTYPE), _byte(words, 24, DTYPE))
    else:
        ASM: tl.constexpr = TO_FP16 if tl.float16 == DTYPE else TO_BF16
        first, last = tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [words], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        low = tl.join(_half(first, 0, DTYPE), _half(first, 16, DTYPE))
        high = tl.join(_half(last, 0, DTYPE), _half(last, 16, DTYPE))
    y = tl.join(low, high)  # [..., e, u]
    return tl.permute(y, (0, 1, 2, 4, 3))
