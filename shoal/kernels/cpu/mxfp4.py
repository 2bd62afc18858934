"""Matmuls with MXFP4 weights on the CPU, by the C kernel of linear.py. The matrix is packed as Q8_0,
whose groups have 32 inputs too: twice an e2m1 number is an integer, and half a scale is a float16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kernels.cpu import linear as cpu_linear
from shoal.kernels.cpu.linear import CpuWeight, TorchWeight
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.mxfp4_tensor import BIAS, SCALE_GROUP, VALUES, Mxfp4Tensor


def pack(
    tensors: Sequence[Mxfp4Tensor], replaced: CpuWeight | TorchWeight | None = None
) -> CpuWeight | TorchWeight:
    """Makes one weight of all the tensors' rows, in order. Raises CheckpointError for scales that a float16
    does not hold."""
    return cpu_linear.pack([_q8_0(tensor) for tensor in tensors], replaced)


def _q8_0(tensor: Mxfp4Tensor) -> GGUFTensor:
    """The matrix as rows of Q8_0: scale, then 32 bytes."""
    exponents = tensor.scales.int() - (BIAS + 1)
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents).half()
    if not scales.isfinite().all():
        raise CheckpointError(
            f"a matrix of shape {list(tensor.shape)} in mxfp4 has scales beyond float16, for which there is "
            "no matmul on a CPU; name a dtype, to which its weights are unpacked"
        )
    doubled = torch.tensor([int(2 * value) for value in VALUES], dtype=torch.int8)[tensor.unpacked().int()]
    quants = doubled.unflatten(1, (-1, SCALE_GROUP)).view(torch.uint8)
    data: np.ndarray = torch.cat((scales.unsqueeze(2).view(torch.uint8), quants), dim=2).flatten(1).numpy()
    return GGUFTensor("Q8_0", tensor.shape, data)
