"""The product of attention's output and a gate, as one Triton kernel.

T tokens · X numbers of the output · Y numbers of the gate. The oracle is reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import cdiv

BLOCK = 1024


@triton.jit
def _gate_kernel(
    out_ptr,
    gate_ptr,
    gated_ptr,
    stride_gate,
    X: tl.constexpr,
    N: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Numbers [i * N, (i + 1) * N) of a token share number i of its gate."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < X
    gate = tl.load(gate_ptr + token * stride_gate + columns // N, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(out_ptr + token * X + columns, mask=mask, other=0.0)
    # Both functions by e^-|gate|, which can't overflow.
    small = tl.exp(-tl.abs(gate))
    if SIGMOID:
        factor = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    else:
        # ln(1 + small) without the digits that the sum loses
        sum = 1.0 + small
        factor = tl.where(sum == 1.0, small, tl.log(sum) * small / (sum - 1.0)) + tl.maximum(gate, 0.0)
    tl.store(gated_ptr + token * X + columns, (x.to(tl.float32) * factor).to(x.dtype), mask=mask)


def gate_output(out_TX: torch.Tensor, gate_TY: torch.Tensor, activation: str) -> torch.Tensor:
    """As reference.gate_output."""
    num_tokens, width = out_TX.shape
    assert out_TX.is_contiguous() and gate_TY.stride(1) == 1 and width % gate_TY.shape[1] == 0
    assert activation in ("sigmoid", "softplus") and len(gate_TY) == num_tokens
    gated_TX = empty_matmul_input(out_TX, num_tokens, width)
    _gate_kernel[(num_tokens, cdiv(width, BLOCK))](
        out_TX,
        gate_TY,
        gated_TX,
        gate_TY.stride(0),
        X=width,
        N=width // gate_TY.shape[1],
        SIGMOID=activation == "sigmoid",
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(),
    )
    return gated_TX
