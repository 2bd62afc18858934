"""The types of tensors that GGUF files may hold here, as ggml numbers them. No torch.

A type of groups has its formula in gguf_tensor.py. docs/howto/quantization.md says how to add one.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    name: str
    group_size: int  # weights of a row that are packed together; 1: plain numbers
    group_bytes: int


TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    30: GgmlType("BF16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    39: GgmlType("MXFP4", 32, 17),
}
# name -> (weights, bytes) of a group, for the types that have groups
GROUPS = {kind.name: (kind.group_size, kind.group_bytes) for kind in TYPES.values() if kind.group_size > 1}
# Types whose weight is one of 16 multiples of a scale.
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")
