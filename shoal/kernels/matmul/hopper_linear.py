"""Matmuls of 2 to 256 rows with a weight matrix on Hopper's tensor cores, bias and SiLU * up, or the
residual, in the epilogue, in Gluon.

A decode step's matmuls are short: for a small model, less than half of a matmul's time with cuBLAS is the
reading of its weight, and the rest is what comes before and after that. So all that does not need the rows is
done while the kernel before still runs (pdl.py). A program asks the copy engine for its first weight tiles,
as many as shared memory holds, and then waits. Where its whole slice of the weight and of the rows fits, no
tile is ever replaced, and the loop is nothing but tensor-core instructions; a longer slice runs through the
tiles as through a ring. If there are few outputs, the inputs are split, so that all SMs work: the last
program of a tile to arrive adds the parts in a fixed order.

A matmul that ends in the residual adds itself to it (ADD), rounded as one of its own. The residual's old
values too are on their way early.

With 32 rows or fewer, the rows are the right operand (out^T = weight @ x^T), as the left one comes in 64
rows. Gate and up are two sums of one program, each rounded as a matmul of its own would be. Tiles of rows
reach beyond the matrix: `descriptor` says what is read there. Figures are in benchmarks/results/matmul.md.
T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is reference.py.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from shoal.kernels.hopper import barrier, empty_matmul_input
from shoal.kernels.matmul.dispatch import HopperTiles
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.pdl import pdl_options
from shoal.kernels.rounding import cdiv

MAX_TILES = 1024  # tiles of a launch whose inputs are split; dispatch.py stays far below
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _signal_next():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """The function of pdl.py, in Gluon."""
    if PDL:
        _signal_next()
        _wait()


@gluon.jit
def start_next(PDL: gl.constexpr):
    """The function of pdl.py, in Gluon."""
    if PDL:
        _signal_next()


@gluon.jit
def wait_for_previous(PDL: gl.constexpr):
    """The function of pdl.py, in Gluon."""
    if PDL:
        _wait()


@gluon.jit
def _rounded(sums, dtype: gl.constexpr):
    """Rounds to `dtype` and back, pair by pair, as the conversion of one number is as slow as an
    exponential."""
    if dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [sums],
            gl.float32,
            True,
            2,
        )
    else:
        rounded = gl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            .reg .b16 low, high;
            cvt.rn.f16x2.f32 pair, $3, $2;
            mov.b32 {low, high}, pair;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=r,=r,r,r",
            [sums],
            gl.float32,
            True,
            2,
        )
    return rounded


@gluon.jit
def _times_sigmoid(x, z):
    """x / (1 + exp(-z)) to the bit, but 0 for z below -87: what exp and the quotient do for results below
    2^-126 would triple its multiplications."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 y;
        mul.f32 y, $2, 0fBFB8AA3B;    // -log2(e)
        ex2.approx.ftz.f32 y, y;
        add.f32 y, y, 0f3F800000;
        rcp.approx.ftz.f32 y, y;
        mul.f32 $0, $1, y;
        }""",
        "=f,f,f",
        [x, z],
        gl.float32,
        True,
        1,
    )


@gluon.jit
def gate_mul(
    gate,
    up,
    ACTIVATION: gl.constexpr,
    dtype: gl.constexpr,
    ALPHA: gl.constexpr = 1.0,
    LIMIT: gl.constexpr = 0.0,
):
    """activation(gate) * up of float32 sums, each rounded first, as a matmul of its own would be. The
    activations are activation.py's, and clamped SwiGLU with its numbers (kinds/experts.py)."""
    gate, up = _rounded(gate, dtype), _rounded(up, dtype)
    z = gate
    if ACTIVATION == "gelu_tanh":
        z = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    elif ACTIVATION == "clamped_swiglu":
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
        z = gate * ALPHA
    return (_times_sigmoid(gate, z) * up).to(dtype)


@gluon.jit
def squared_relu(x):
    """The square of relu(x), in the dtype of x."""
    positive = gl.maximum(x.to(gl.float32), 0.0)
    return (positive * positive).to(x.dtype)


@gluon.jit
def _load_weight(weight_desc, full, weight_smem, up_smem, out, O, column, GATED: gl.constexpr, pred):
    tma.async_copy_global_to_shared(weight_desc, [out, column], full, weight_smem, pred=pred)
    if GATED:
        tma.async_copy_global_to_shared(weight_desc, [out + O, column], full, up_smem, pred=pred)


@gluon.jit
def _multiply(x, weight, sums, SWAP: gl.constexpr):
    left, right = (weight, x) if SWAP else (x, weight)
    return warpgroup_mma(left, right.permute((1, 0)), sums, is_async=True)


@gluon.jit(do_not_specialize=["T", "tiles"])
def hopper_kernel(
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    O,
    T,
    tiles,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The matmul of the rows of program 0 and the outputs of program 1, over the `tiles` * BLOCK_I inputs of
    program 2."""
    BLOCK_T: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_O: gl.constexpr = weight_desc.block_type.shape[0]
    BLOCK_I: gl.constexpr = weight_desc.block_type.shape[1]
    SWAP: gl.constexpr = BLOCK_T < 64
    first_row, first_out = gl.program_id(0) * BLOCK_T, gl.program_id(1) * BLOCK_O
    first_column = gl.program_id(2) * tiles * BLOCK_I

    weight_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_O, BLOCK_I], weight_desc.layout)
    up_smem = weight_smem
    if GATED:
        up_smem = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_O, BLOCK_I], weight_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_T, BLOCK_I], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    BYTES: gl.constexpr = x_desc.block_type.nbytes + weight_desc.block_type.nbytes * (1 + GATED)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), BYTES)
        column = first_column + i * BLOCK_I
        _load_weight(
            weight_desc,
            full.index(i),
            weight_smem.index(i),
            up_smem.index(i),
            first_out,
            O,
            column,
            GATED,
            True,
        )
    wait_for_inputs(PDL)
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [first_row, first_column + i * BLOCK_I], full.index(i), x_smem.index(i)
        )

    LANES: gl.constexpr = min(BLOCK_O // 8, 32)  # lanes that store a row's outputs, 16 bytes each
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [num_warps, 1], [1, 0])
    row = first_row + gl.arange(0, BLOCK_T, gl.SliceLayout(1, wide))
    out = first_out + gl.arange(0, BLOCK_O, gl.SliceLayout(0, wide))
    out_ptrs = out_ptr + row.to(gl.int64)[:, None] * O + out[None, :]
    inside = (row < T)[:, None] & (out < O)[None, :]
    if ADD:
        before = gl.load(out_ptrs, mask=inside, other=0.0)

    ROWS: gl.constexpr = BLOCK_O if SWAP else BLOCK_T
    COLUMNS: gl.constexpr = BLOCK_T if SWAP else BLOCK_O
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, COLUMNS, 16]
    )
    sums = gl.zeros((ROWS, COLUMNS), gl.float32, mma)
    up_sums = gl.zeros((ROWS, COLUMNS), gl.float32, mma)
    for i in range(tiles - STAGES + 1):  # The place of the tile before is free: it takes a later tile.
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        sums = _multiply(x_smem.index(stage), weight_smem.index(stage), sums, SWAP)
        if GATED:
            up_sums = _multiply(x_smem.index(stage), up_smem.index(stage), up_sums, SWAP)
            sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        later = i - 1 + STAGES
        place, column, pred = later % STAGES, first_column + later * BLOCK_I, i > 0
        mbarrier.expect(full.index(place), BYTES, pred=pred)
        _load_weight(
            weight_desc,
            full.index(place),
            weight_smem.index(place),
            up_smem.index(place),
            first_out,
            O,
            column,
            GATED,
            pred,
        )
        tma.async_copy_global_to_shared(
            x_desc, [first_row, column], full.index(place), x_smem.index(place), pred=pred
        )
    for last in gl.static_range(STAGES - 1):
        i = tiles - STAGES + 1 + last
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        sums = _multiply(x_smem.index(stage), weight_smem.index(stage), sums, SWAP)
        if GATED:
            up_sums = _multiply(x_smem.index(stage), up_smem.index(stage), up_sums, SWAP)
    if GATED:
        sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))

    if SPLITS > 1:
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        parts_ptr += tile * SPLITS * (ROWS * COLUMNS)
        at = (
            gl.arange(0, ROWS, gl.SliceLayout(1, mma))[:, None] * COLUMNS
            + gl.arange(0, COLUMNS, gl.SliceLayout(0, mma))[None, :]
        )
        gl.store(parts_ptr + gl.program_id(2) * (ROWS * COLUMNS) + at, sums)
        # All threads have stored before one of them says so (release), and that one has heard of the others
        # before any reads (acquire).
        barrier()
        if gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        gl.store(arrived_ptr + tile, 0)
        barrier()
        sums = gl.load(parts_ptr + at, cache_modifier=".cg")
        for part in gl.static_range(1, SPLITS):
            sums += gl.load(parts_ptr + part * (ROWS * COLUMNS) + at, cache_modifier=".cg")

    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        at_bias = first_out + gl.arange(0, BLOCK_O, gl.SliceLayout(1 if SWAP else 0, mma))
        sums += (
            gl.load(bias_ptr + at_bias, mask=at_bias < O, other=0.0)
            .to(gl.float32)
            .expand_dims(1 if SWAP else 0)
        )
        if GATED:
            up_sums += (
                gl.load(bias_ptr + O + at_bias, mask=at_bias < O, other=0.0)
                .to(gl.float32)
                .expand_dims(1 if SWAP else 0)
            )
    result = gate_mul(sums, up_sums, "silu", DTYPE) if GATED else sums.to(DTYPE)
    if SWAP:
        result = result.permute((1, 0))
    result = gl.convert_layout(result, wide)
    if ADD:
        result = (before.to(gl.float32) + result.to(gl.float32)).to(DTYPE)
    gl.store(out_ptrs, result, mask=inside)


def hopper_matmul(
    tiles: HopperTiles,
    x_TI: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. Bits do not
    depend on timing. The matmul is added to `residual_TO` in place, if there is one, which is then
    returned."""
    assert x_TI.is_contiguous() and weight.is_contiguous() and not (gated and tiles.splits > 1)
    (rows, inputs), outs = x_TI.shape, weight.shape[0] // (1 + gated)
    out_TO = empty_matmul_input(x_TI, rows, outs) if residual_TO is None else residual_TO
    assert out_TO.is_contiguous() and out_TO.shape == (rows, outs) and out_TO.dtype == x_TI.dtype
    grid = (cdiv(rows, tiles.rows), cdiv(outs, tiles.outs), tiles.splits)
    parts, arrived = out_TO, out_TO
    if tiles.splits > 1:
        assert grid[0] * grid[1] <= MAX_TILES
        parts = x_TI.new_empty(
            grid[0] * grid[1] * tiles.splits * tiles.rows * tiles.outs, dtype=torch.float32
        )
        arrived = arrival_counters("hopper_linear", MAX_TILES, x_TI.device)
    x_desc = descriptor(x_TI, tiles.rows, tiles.columns, grid[0] * tiles.rows)
    hopper_kernel[grid](
        x_desc,
        descriptor(weight, tiles.outs, tiles.columns),
        bias,
        out_TO,
        parts,
        arrived,
        outs,
        rows,
        tiles.num_tiles(inputs),
        GATED=gated,
        ADD=residual_TO is not None,
        SPLITS=tiles.splits,
        STAGES=tiles.stages(inputs, gated),
        num_warps=4,
        **pdl_options(),
    )
    return out_TO


def descriptor(matrix: torch.Tensor, rows: int, columns: int, rows_read: int = 0) -> TensorDescriptor:
    """Describes a matrix to TMA, which reads tiles of `rows` rows, `rows_read` rows in all. Rows beyond the
    matrix are whatever lies in memory there, if its storage goes on so far (`empty_matmul_input`), for sums
    that nobody stores. Otherwise TMA fills in zeros, more slowly."""
    num_rows, inputs = matrix.shape
    end = (matrix.storage_offset() + rows_read * inputs) * matrix.itemsize
    if num_rows < rows_read and end <= matrix.untyped_storage().nbytes():
        num_rows = rows_read
    return TensorDescriptor(
        matrix, [num_rows, inputs], [inputs, 1], [rows, columns], _layout(rows, columns, matrix.dtype)
    )


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])
