"""The matmul of a few rows in 16 bits with a weight in float32, such as routers have, elementwise in Triton:
rows become no tensor in float32, and the kernel keeps to programmatic launches (pdl.py), as cuBLAS does not.
A program has its row of the weight before it waits.

T rows · I inputs · O outputs. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from shoal.kernels.pdl import pdl_options, start_next, wait_for_previous
from shoal.kernels.rounding import next_power_of_2

FEW_ROWS = 16  # Each reads the weight for itself.
WIDEST = 8192  # inputs, which a program has at once


@triton.jit
def _float_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, O, I, BLOCK_I: tl.constexpr, PDL: tl.constexpr
):
    """The grid is (rows, outputs)."""
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1)
    column = tl.arange(0, BLOCK_I)
    weight = tl.load(weight_ptr + out.to(tl.int64) * I + column, mask=column < I, other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row * I + column, mask=column < I, other=0.0).to(tl.float32)
    result = tl.sum(x * weight)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + out)
    tl.store(out_ptr + row * O + out, result)


def float_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """As reference.float_linear."""
    (rows, inputs), outs = x_TI.shape, len(weight_OI)
    if x_TI.dtype == torch.float32 or not 0 < rows <= FEW_ROWS or inputs > WIDEST:
        return F.linear(x_TI.float(), weight_OI, bias_O)
    assert x_TI.is_contiguous() and weight_OI.is_contiguous() and weight_OI.dtype == torch.float32
    assert bias_O is None or bias_O.dtype == torch.float32
    out_TO = torch.empty(rows, outs, dtype=torch.float32, device=x_TI.device)
    _float_linear_kernel[(rows, outs)](
        x_TI,
        weight_OI,
        bias_O,
        out_TO,
        outs,
        inputs,
        BLOCK_I=next_power_of_2(inputs),
        num_warps=4,
        **pdl_options(),
    )
    return out_TO
