"""Numbers rounded up, for the host. Triton's functions of these names look for constants of kernels among
their arguments first, which takes a launch as long as its descriptors do."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up. Both are positive, or the number is 0."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
