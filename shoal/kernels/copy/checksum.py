"""A checksum of a tensor's bytes on a GPU. It takes one pass at memory bandwidth, and no memory of its
own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.rounding import cdiv

BLOCK = 2048  # words of 8 bytes: with 4 warps each thread has 16, in accesses of 16 bytes
PROGRAMS = 4096  # the most programs that share a tensor
# Odd 64-bit multipliers: the golden ratio's, and the first of splitmix64's two (Steele, Lea and Flood
# 2014).
PLACE = tl.constexpr(-7046029254386353131)
MIX = tl.constexpr(-4658895280553007687)


@triton.jit
def _checksum_kernel(words_ptr, num_words, sum_ptr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        places = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = places < num_words
        x = tl.load(words_ptr + places, mask=mask, other=0) + places * PLACE
        x = (x ^ (x >> 32)) * MIX
        x = (x ^ (x >> 29)) * PLACE
        total += tl.where(mask, x ^ (x >> 32), 0)
    tl.atomic_add(sum_ptr, tl.sum(total))


def checksum(tensor: torch.Tensor, sum_1: torch.Tensor) -> None:
    """Adds the sum, modulo 2^64, of a hash of every 8 bytes and their place to `sum_1`, int64 [1]. Changes in
    several places do not cancel each other, as they would in a weighted sum of the words themselves."""
    assert sum_1.dtype == torch.int64 and sum_1.numel() == 1
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = (
        F.pad(flat, (0, -flat.numel() % 8)).view(torch.int64) if flat.numel() % 8 else flat.view(torch.int64)
    )
    if words.numel():
        programs = min(PROGRAMS, cdiv(words.numel(), BLOCK))
        _checksum_kernel[(programs,)](words, words.numel(), sum_1, BLOCK=BLOCK)
