"""Matmuls with NVFP4 weights on the CPU, by the C kernel of fp8.py, which has groups of any size: each e2m1
number is one of fp8's."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.kernels.cpu import fp8
from shoal.kernels.cpu.fp8 import CpuFp8Weight
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor


def pack(tensors: Sequence[Nvfp4Tensor], replaced: CpuFp8Weight | None = None) -> CpuFp8Weight:
    """Makes one weight of all the tensors' rows, in order."""
    return fp8.pack([tensor.as_fp8() for tensor in tensors], replaced)
