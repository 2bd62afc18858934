"""The sum of all ranks' parts of many rows, added to the residual, alone or with the RMSNorm that follows,
where the other ranks' parts have been copied into this rank's memory (engine/ranks/peer_copies.py).

Sums are made in float32 in the order of ranks, so that all ranks get the same bits. T rows · D columns · P
other ranks. The oracles are torch's sum and reference.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.norm import norm_warps
from shoal.kernels.pdl import pdl_options, wait_for_inputs
from shoal.kernels.rounding import next_power_of_2


@triton.jit
def _sum_parts_kernel(
    own_ptr,
    landed_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    part_stride,
    D: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sums a row, adds it to the residual in place, and with `weight_ptr` leaves the norm of that
    in `out_ptr`."""
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    at = tl.program_id(0).to(tl.int64) * D + columns
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = tl.load(own_ptr + at, mask=inside, other=0.0)
        else:
            place = rank - 1 if rank > RANK else rank
            part = tl.load(landed_ptr + place * part_stride + at, mask=inside, other=0.0)
        total += part.to(tl.float32)
    x = total.to(own_ptr.dtype.element_ty)
    x = (x.to(tl.float32) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
    tl.store(residual_ptr + at, x, mask=inside)
    if weight_ptr is not None:
        x32 = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / D + eps)
        normed = (x32 * scale).to(weight.dtype).to(tl.float32)
        tl.store(out_ptr + at, (normed * weight.to(tl.float32)).to(x.dtype), mask=inside)


def add_parts(own_TD: torch.Tensor, landed_PTD: torch.Tensor, rank: int, residual_TD: torch.Tensor) -> None:
    """residual += the sum of all ranks' parts, in place: of this rank's, and of the P others', in the order
    of ranks."""
    _launch(own_TD, landed_PTD, rank, residual_TD, None, None, 0.0)


def add_parts_rms_norm(
    own_TD: torch.Tensor,
    landed_PTD: torch.Tensor,
    rank: int,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Does the same, and returns the norm of the new residual."""
    out_TD = empty_matmul_input(own_TD, *own_TD.shape)
    _launch(own_TD, landed_PTD, rank, residual_TD, weight_D, out_TD, eps)
    return out_TD


def _launch(
    own_TD: torch.Tensor,
    landed_PTD: torch.Tensor,
    rank: int,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    out_TD: torch.Tensor | None,
    eps: float,
) -> None:
    assert own_TD.is_contiguous() and residual_TD.is_contiguous() and landed_PTD[0].is_contiguous()
    assert own_TD.shape == residual_TD.shape == landed_PTD.shape[1:]
    rows, size = own_TD.shape
    block = next_power_of_2(size)
    _sum_parts_kernel[(rows,)](
        own_TD,
        landed_PTD,
        residual_TD,
        weight_D,
        out_TD,
        eps,
        landed_PTD.stride(0),
        D=size,
        RANK=rank,
        SIZE=1 + len(landed_PTD),
        BLOCK=block,
        num_warps=norm_warps(block),
        **pdl_options(),
    )
