"""Matmuls of each head with a matrix of its own on Hopper, in Gluon: project.py's, for as many rows as fill a
warpgroup.

A program has its first weights on their way before it waits. Two programs share an SM: one stores while the
other multiplies. K is multiplied as it lies, with inputs as the rows of a tile.

The oracle and the dimensions are in reference.py. Figures are in benchmarks/results/kernels.md.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from shoal.kernels.matmul.hopper_linear import DTYPES, descriptor, wait_for_inputs
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv, next_power_of_2
from shoal.kinds.attention import QueryScaling
from shoal.kinds.latent import LatentKind

MIN_ROWS = 33
FEW_ROWS = 128  # As many have tiles of 64 outputs, more of 128.
TILE_ROWS = TILE_INS = 64
SHARED_BYTES = 108 << 10  # a program's half of an SM's memory


@gluon.jit
def _factor(positions, BETA: gl.constexpr, LENGTH: gl.constexpr, OFFSET: gl.constexpr):
    """QueryScaling's factor of queries at these positions."""
    steps = ((positions + OFFSET) // LENGTH).to(gl.float32)
    return 1.0 + BETA * gl.log(1.0 + steps)


@gluon.jit
def _rotate(
    x_ptr,
    out_ptr,
    cos_sin_ptr,
    positions_ptr,
    first_row,
    T,
    stride_xt,
    stride_ot,
    ROTARY: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    BETA: gl.constexpr,
    LENGTH: gl.constexpr,
    OFFSET: gl.constexpr,
    BLOCK_M: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Rotates the numbers from x_ptr on into those from out_ptr on."""
    HALF: gl.constexpr = ROTARY // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    j = gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    there = row < T
    positions = gl.maximum(gl.load(positions_ptr + row, mask=there, other=0), 0)[:, None]
    angle_ptrs = cos_sin_ptr + positions.to(gl.int64) * ROTARY + j
    cos, sin = gl.load(angle_ptrs), gl.load(angle_ptrs + HALF)
    x_ptrs = x_ptr + row.to(gl.int64)[:, None] * stride_xt
    if INTERLEAVED:
        first = gl.load(x_ptrs + 2 * j, mask=there[:, None], other=0.0)
        second = gl.load(x_ptrs + 2 * j + 1, mask=there[:, None], other=0.0)
    else:
        first = gl.load(x_ptrs + j, mask=there[:, None], other=0.0)
        second = gl.load(x_ptrs + HALF + j, mask=there[:, None], other=0.0)
    x1, x2 = first.to(gl.float32), second.to(gl.float32)
    one, two = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    if BETA != 0.0:
        factor = _factor(positions, BETA, LENGTH, OFFSET)
        one, two = one * factor, two * factor
    out_ptrs = out_ptr + row.to(gl.int64)[:, None] * stride_ot + j
    gl.store(out_ptrs, one.to(first.dtype), mask=there[:, None])
    gl.store(out_ptrs + HALF, two.to(first.dtype), mask=there[:, None])


@gluon.jit
def _load_weight(w_desc, full, w_smem, first_row, column, first_out, K_FIRST: gl.constexpr):
    """Asks for the tile of the inputs from `column` on."""
    if K_FIRST:
        tma.async_copy_global_to_shared(w_desc, [first_row + column, first_out], full, w_smem)
    else:
        tma.async_copy_global_to_shared(w_desc, [first_row + first_out, column], full, w_smem)


@gluon.jit(do_not_specialize=["T"])
def hopper_heads_kernel(
    x_desc,
    w_desc,
    x_ptr,
    out_ptr,
    cos_sin_ptr,
    positions_ptr,
    T,
    H: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    X: gl.constexpr,
    O: gl.constexpr,
    W_ROWS: gl.constexpr,
    W_FIRST: gl.constexpr,
    K_FIRST: gl.constexpr,
    ROTARY: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    BETA: gl.constexpr,
    LENGTH: gl.constexpr,
    OFFSET: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out[t, h, :N] = x[t, h, :K] w[h]. Each of H heads has X numbers of a row of x, O of a row of out, and
    W_ROWS rows of w. Its matrix begins with row W_FIRST of these; rows are inputs if K_FIRST, else outputs.
    The grid is (tiles of rows, tiles of outputs, heads). ROTARY: one more tile of outputs rotates x's
    numbers from K on, and writes them to out from N on."""
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_desc.block_type.shape[1] if K_FIRST else w_desc.block_type.shape[0]
    TILES: gl.constexpr = K // BLOCK_K
    first_row, first_out, head = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N, gl.program_id(2)
    if ROTARY > 0 and first_out >= N:
        wait_for_inputs(PDL)
        _rotate(
            x_ptr + head * X + K,
            out_ptr + head * O + N,
            cos_sin_ptr,
            positions_ptr,
            first_row,
            T,
            H * X,
            H * O,
            ROTARY,
            INTERLEAVED,
            BETA,
            LENGTH,
            OFFSET,
            BLOCK_M,
            num_warps,
        )
        return
    W_SHAPE: gl.constexpr = w_desc.block_type.shape
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, W_SHAPE[0], W_SHAPE[1]], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = x_desc.block_type.nbytes + w_desc.block_type.nbytes
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    w_row = head * W_ROWS + W_FIRST
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BYTES)
        _load_weight(w_desc, full.index(i), w_smem.index(i), w_row, i * BLOCK_K, first_out, K_FIRST)
    wait_for_inputs(PDL)
    for i in gl.static_range(STAGES):
        column = head * X + i * BLOCK_K
        tma.async_copy_global_to_shared(x_desc, [first_row, column], full.index(i), x_smem.index(i))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    sums = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, mma)
    for i in gl.static_range(TILES):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        w = w_smem.index(i % STAGES) if K_FIRST else w_smem.index(i % STAGES).permute((1, 0))
        sums = warpgroup_mma(x_smem.index(i % STAGES), w, sums, is_async=True)
        if i > 0 and i - 1 + STAGES < TILES:  # The place of the tile before is free: it takes a later tile.
            sums = warpgroup_mma_wait(1, deps=[sums])
            place, column = (i - 1) % STAGES, (i - 1 + STAGES) * BLOCK_K
            mbarrier.expect(full.index(place), BYTES)
            _load_weight(w_desc, full.index(place), w_smem.index(place), w_row, column, first_out, K_FIRST)
            tma.async_copy_global_to_shared(
                x_desc, [first_row, head * X + column], full.index(place), x_smem.index(place)
            )
    sums = warpgroup_mma_wait(0, deps=[sums])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
    if BETA != 0.0:
        own = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, mma))
        positions = gl.maximum(gl.load(positions_ptr + own, mask=own < T, other=0), 0)
        sums = sums * _factor(positions, BETA, LENGTH, OFFSET)[:, None]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [num_warps, 1], [1, 0])
    row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, wide))
    out = first_out + gl.arange(0, BLOCK_N, gl.SliceLayout(0, wide))
    result = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), wide)
    out_ptrs = out_ptr + row.to(gl.int64)[:, None] * (H * O) + head * O + out[None, :]
    gl.store(out_ptrs, result, mask=(row < T)[:, None] & (out < N)[None, :])


def takes_heads(q_THX: torch.Tensor, kind: LatentKind) -> bool:
    """Says if these are many rows of numbers of 16 bits, of whole tiles, and rotated pairs a power of two."""
    sizes = kind.qk_nope_head_dim, kind.kv_lora_rank, kind.v_head_dim
    return (
        len(q_THX) >= MIN_ROWS
        and q_THX.dtype in DTYPES
        and all(size % TILE_INS == 0 for size in sizes)
        and kind.rotary_dim == next_power_of_2(kind.rotary_dim)
        and q_THX.is_contiguous()
    )


def hopper_absorb_queries(
    q_THX: torch.Tensor,
    kv_b_HWC: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool,
    scaling: QueryScaling | None,
) -> torch.Tensor:
    """As reference.absorb_queries."""
    (num_tokens, num_heads, query_dim), size, rotary = q_THX.shape, kv_b_HWC.shape[2], cos_sin.shape[1]
    out_THN = q_THX.new_empty(num_tokens, num_heads, size + rotary)
    rotation = cos_sin, positions_T, interleaved, scaling
    _launch(q_THX, kv_b_HWC, out_THN, query_dim - rotary, size, True, *rotation)
    return out_THN


def hopper_project_values(sums_THC: torch.Tensor, kv_b_HWC: torch.Tensor, out_THV: torch.Tensor) -> None:
    """Writes out_THV as reference.project_values computes it of sums of latents."""
    _launch(sums_THC, kv_b_HWC, out_THV, kv_b_HWC.shape[2], out_THV.shape[2], False)


def _launch(
    x_THX: torch.Tensor,
    kv_b_HWC: torch.Tensor,
    out_THO: torch.Tensor,
    inputs: int,
    outputs: int,
    k_first: bool,
    cos_sin: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    interleaved: bool = False,
    scaling: QueryScaling | None = None,
) -> None:
    """Multiplies rows of x by each head's matrix of K, whose rows are inputs (`k_first`), or of V."""
    (rows, heads, size), (_, width, _) = x_THX.shape, kv_b_HWC.shape
    assert x_THX.is_contiguous() and kv_b_HWC.is_contiguous() and out_THO.is_contiguous()
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    block_n = min(64 if rows <= FEW_ROWS else 128, next_power_of_2(outputs))
    stage_bytes = (TILE_ROWS + block_n) * TILE_INS * x_THX.itemsize
    w_block = [TILE_INS, block_n] if k_first else [block_n, TILE_INS]
    grid = cdiv(rows, TILE_ROWS), cdiv(outputs, block_n) + (rotary > 0), heads
    hopper_heads_kernel[grid](
        descriptor(x_THX.flatten(1), TILE_ROWS, TILE_INS, grid[0] * TILE_ROWS),
        descriptor(kv_b_HWC.flatten(0, 1), *w_block),
        x_THX,
        out_THO,
        x_THX if cos_sin is None else cos_sin,
        x_THX if positions_T is None else positions_T,
        rows,
        H=heads,
        K=inputs,
        N=outputs,
        X=size,
        O=out_THO.shape[2],
        W_ROWS=width,
        W_FIRST=0 if k_first else width - outputs,
        K_FIRST=k_first,
        ROTARY=rotary,
        INTERLEAVED=interleaved,
        BETA=0.0 if scaling is None else scaling.beta,
        LENGTH=1 if scaling is None else scaling.length,
        OFFSET=0 if scaling is None else scaling.offset,
        STAGES=min(inputs // TILE_INS, max(2, SHARED_BYTES // stage_bytes)),
        num_warps=4,
        **pdl_options(),
    )
