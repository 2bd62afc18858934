"""Matmuls of 33 to 256 rows with weights of 4 or 8 bits on Hopper, in CUDA C++ (packed_rows.cu).

Weights lie as gpu_weight.py lays them, in groups of any size that it has. They become bf16 in the registers
from which tensor cores take their left operand, once for all rows of a tile.

T rows · I inputs · O outputs (F of a gated matmul, whose weight has 2F rows). The oracle is the matrix that
`unpack_rows` gives. Figures are in benchmarks/results/matmul.md.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from shoal.kernels.cuda_library import CudaFunction, TensorMap, compiling, tensor_map
from shoal.kernels.hopper import empty_matmul_input
from shoal.kernels.matmul import dispatch
from shoal.kernels.matmul.dispatch import PACKED_BLOCKS, PACKED_SPLIT_ROWS, PackedTiles
from shoal.kernels.matmul.loaders import TiledWeight
from shoal.kernels.matmul.split_k import arrival_counters
from shoal.kernels.rounding import cdiv

STRIP = 64  # weight rows of a tile
COLUMNS = 128  # inputs that are copied at once
THREADS = 3 * 128
SHARED_BYTES = 227 << 10  # a program has all of an SM's
MAPS, POINTERS = "x words scales minima", "bias residual out parts arrived"
NUMBERS = "has_minima rows outs rounds splits"
MAX_TILES = 4096  # tiles of a launch whose inputs are split


class _RowsArguments(ctypes.Structure):
    """The struct Arguments in packed_rows.cu, which ends with a whole 64 bytes."""

    _fields_ = (
        *((name, TensorMap) for name in MAPS.split()),
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_int) for name in NUMBERS.split()),
        ("filled", ctypes.c_int),
    )


def packed_rows_matmul(
    tiles: PackedTiles,
    x_TI: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    gated: bool,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight^T + bias, or silu(first half of the outputs) * second half if it is gated. The matmul is
    added to `residual_TO` in place, if there is one, which is then returned. Bits do not depend on timing."""
    rows, inputs = x_TI.shape
    outs = weight.shape[0] // (1 + gated)
    out_TO = empty_matmul_input(x_TI, rows, outs) if residual_TO is None else residual_TO
    assert x_TI.is_contiguous() and out_TO.is_contiguous() and x_TI.dtype == weight.dtype == torch.bfloat16
    assert (
        weight.bits in (4, 8)
        and weight.shape[1] == inputs
        and inputs % COLUMNS == outs % (32 if gated else 64) == 0
    )
    assert out_TO.shape == (rows, outs) and out_TO.dtype == torch.bfloat16
    assert bias is None or (bias.is_contiguous() and bias.dtype == torch.bfloat16)
    num_tiles, parts, arrived = cdiv(rows, tiles.rows) * (weight.shape[0] // STRIP), None, None
    if tiles.splits > 1:
        assert (
            num_tiles <= MAX_TILES and tiles.rows <= PACKED_SPLIT_ROWS and tiles.splits <= inputs // COLUMNS
        )
        parts = x_TI.new_empty(num_tiles * tiles.splits * STRIP * tiles.rows, dtype=torch.float32)
        arrived = arrival_counters("packed_rows", MAX_TILES, x_TI.device)
    words, scales, minima = weight.words, weight.scales, weight.minima
    arguments = _RowsArguments(
        _map_of_rows(x_TI, tiles.rows),
        *(
            _map_of_tiles(words, COLUMNS * weight.bits // 256, outs, gated),
            _map_of_tiles(scales, COLUMNS // weight.group, outs, gated),
        ),
        _map_of_tiles(scales if minima is None else minima, COLUMNS // weight.group, outs, gated),
        *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (bias, residual_TO, out_TO, parts, arrived)
        ),
        *(minima is not None, rows, outs, inputs // COLUMNS, tiles.splits),
    )
    function = _functions(x_TI.device, tiles.rows, weight.bits, weight.group, weight.e2m1)[gated]
    function.launch((1, dispatch.gpu_of(x_TI.device).sms, 1), THREADS, arguments)
    return out_TO


def _map_of_rows(x_TI: torch.Tensor, block_rows: int) -> TensorMap:
    """Two steps of 64 inputs of a tile of rows. Rows beyond the last are whatever lies in memory there
    (`empty_matmul_input`), or zeros."""
    (rows, inputs), read = x_TI.shape, cdiv(len(x_TI), block_rows) * block_rows
    end = (x_TI.storage_offset() + read * inputs) * x_TI.itemsize
    if end <= x_TI.untyped_storage().nbytes():
        rows = read
    sizes, strides = (64, rows, inputs // 64), (inputs * 2, 128)
    return tensor_map(x_TI.data_ptr(), x_TI.dtype, sizes, strides, (64, block_rows, COLUMNS // 64))


def _map_of_tiles(tensor: torch.Tensor, count: int, outs: int, gated: bool) -> TensorMap:
    """`count` steps, or groups, of the four tiles of a strip: in a gated matmul two of gate and two of up."""
    per_tile, size, tiles = tensor.shape[1], tensor.shape[2:].numel(), outs // 16
    sizes, pitch = (size, per_tile, tiles, 1 + gated), size * 4
    strides = pitch, per_tile * pitch, tiles * per_tile * pitch
    box = size, count, 4 // (1 + gated), 1 + gated
    return tensor_map(tensor.data_ptr(), torch.int32, sizes, strides, box)


def constants(block_rows: int, bits: int, group: int, e2m1: bool) -> dict[str, int]:
    """Constants for which packed_rows.cu is compiled."""
    return dict(
        PR_ROWS=block_rows, PR_BITS=bits, PR_GROUP=group, PR_E2M1=int(e2m1), PR_SHARED_BYTES=SHARED_BYTES
    )


@functools.cache
def _functions(
    device: torch.device, block_rows: int, bits: int, group: int, e2m1: bool
) -> tuple[CudaFunction, CudaFunction]:
    """The plain and the gated matmul."""
    source, capability = Path(__file__).with_suffix(".cu"), torch.cuda.get_device_capability(device)
    # Tiles of other sizes follow soon, so all of them are compiled at the same time.
    blocks = PACKED_BLOCKS[bits]
    begun = {block: compiling(source, constants(block, bits, group, e2m1), capability) for block in blocks}
    binary = begun[block_rows].result()
    return CudaFunction(binary, "plain", SHARED_BYTES), CudaFunction(binary, "gated", SHARED_BYTES)
