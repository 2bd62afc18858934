"""The checksum of kernels/copy/checksum.py, in Python's own integers."""

import torch

WORD = 2**64


def signed_shift(x, by):
    """A shift of a 64-bit word in two's complement, as the kernel's."""
    return ((x - WORD if x >> 63 else x) >> by) % WORD


def defined(tensor):
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 8)
    total = 0
    for place in range(len(data) // 8):
        x = (int.from_bytes(data[8 * place : 8 * place + 8], "little") + place * -7046029254386353131) % WORD
        x = (x ^ signed_shift(x, 32)) * -4658895280553007687 % WORD
        x = (x ^ signed_shift(x, 29)) * -7046029254386353131 % WORD
        total += x ^ signed_shift(x, 32)
    return total % WORD
