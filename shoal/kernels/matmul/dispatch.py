"""Chooses the matmul kernel and its tile sizes. No other file decides this.

`choose` is pure: it knows the matmul's shape, its rows, the numbers' type and what a GPU is. Kernels say
what they can do; here is which of them is fastest. `Limits` are the numbers in the rules that were measured,
on an H200 (benchmarks/results/matmul.md). Limits that count programs follow the number of SMs on other GPUs;
`python benchmarks/matmul.py` measures all of them for a GPU, and prints its line for `MEASURED`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch

from shoal.kernels.cuda_library import has_compiler
from shoal.kernels.hopper import HAS_GLUON, MAX_ROWS, is_hopper, rows_with_room
from shoal.kernels.rounding import cdiv, next_power_of_2

TENSOR_TYPES = (torch.bfloat16, torch.float16)  # what tensor cores multiply
# hopper_linear.py has these.
MIN_ROWS = 2
MAX_STAGES = 8  # The code is unrolled over them.
MAX_SPLITS = 4
SHARED_BYTES = 216 << 10  # what the tiles may take of an SM's 227 KiB
PAIRED_INPUTS = 1024  # the most inputs for two programs an SM
# hopper_row.py takes at most this many inputs, which lie in shared memory beside the ring. Weights in fewer
# than 16 bits have groups of this size, and with 4 bits whole tiles of this size.
WIDEST_ROW = 32768
WIDEST_PACKED_ROW = 16384
PIPELINE_GROUP = 128
INT4_TILE = 1024
# tile_matmul.py has these.
MAX_SPLIT_TILES = 4096  # blocks of outputs and rows of a launch whose inputs are split
MAX_ROW_SPLITS = 8
# The most rows of an expert, on average, for which weights in 16 bits have tiles of 16 rows, and of 32. An
# expert with more rows than a tile reads its weights twice, and some have twice the average.
SHORT_TILE_ROWS, MEDIUM_TILE_ROWS = 8, 20
SLOT_PROGRAMS = 5  # programs per SM for experts of few slots
# MXFP4's have short pipelines, which leave an SM room for more of the smaller programs.
MXFP4_GROUP, MXFP4_GATED_PROGRAMS, MXFP4_PROGRAMS = 32, 5, 8
MIN_SPLIT_ROUNDS = 2  # A split with fewer rounds ends before its pipeline is full.
MIN_FP8_ROUNDS = 4  # the same for fp8, where programs outnumber SMs
# The most outputs and inputs of a router. A program of its kernel norms the row and multiplies it whole.
FEW_OUTS, WIDE_INPUTS = 256, 4096
PACKED_GATED_PROGRAMS = 5  # programs per SM for gate and up of up to 16 rows by packed weights
PACKED_TALL_PROGRAMS = 4  # the same for 17 to 32 rows of others
PACKED_TALL_ROWS = 32  # packed_rows.py takes more rows.
# Rows of its tiles by bits of a weight; start_up.py rehearses steps of each number. With 8 bits, shared
# memory holds too little of the largest.
PACKED_BLOCKS = {4: (64, 96, 128, 192, 256), 8: (64, 96, 128, 192)}
PACKED_SPLIT_ROWS = 128  # The most of a tile whose inputs are split, as other parts take registers.
# The time of a round of 128 inputs for its weights, by their bits, and of adding a row, in rows of a round.
PACKED_ROUND, PACKED_ADDING = {4: 54, 8: 90}, 20
EARLY_ROUNDS = 2  # as RowTiles.early, where programs outnumber SMs; elsewhere it varies
# fp8_linear.py has tiles of many rows (rows, outputs, warps); the first are taken that give all SMs work.
FP8_TILES = ((128, 128, 8), (128, 64, 4), (64, 64, 4))


@dataclass(frozen=True, slots=True)
class Limits:
    """The measured numbers. A limit belongs to the side that its comment names."""

    # A matmul of at most as many warps runs at once. Prefetching makes it faster, and larger ones slower.
    prefetched_warps: int = 4096
    # The widest row whose norm is part of an elementwise matmul: each program reads x, residual and norm.
    normed_inputs: int = 2048
    # 2 to 4 rows with at most as many multiplications are multiplied elementwise.
    elementwise_matmuls: int = 1 << 25
    # To Triton's tensor-core kernel go up to 16 rows of fewer inputs, and up to 32 of a weight with at least
    # as many rows.
    deep_inputs: int = 4096
    many_weight_rows: int = 24576
    # cuBLAS adds a matmul of many rows to the residual up to as many inputs. Wider ones take longer so.
    added_inputs: int = 8192
    # The fewest outputs, and inputs, of one row for Hopper's rings of tiles.
    pipeline_side: int = 2048
    # The fewest rows for Hopper's gate and up. For fewer, two launches cost the host less than this one.
    gated_rows: int = 4096
    # The most rows for which packed weights are unpacked inside the matmul. For more, to unpack them once
    # costs less than each tile of rows doing it again.
    packed_rows: int = 256
    # Programs of a matmul with packed weights that an SM has at once. Inputs are split until there are as
    # many.
    packed_programs: int = 3
    # The same for weights in fp8 that are widened.
    fp8_programs: int = 4
    # The most rows by which a weight in fp8 is multiplied as it is, widened in registers. More rows become
    # fp8 too.
    widened_rows: int = 16
    # The fewest rows of an expert, on average, for Hopper's kernel of experts.
    expert_rows: int = 64
    # The fewest for which weights in MXFP4 are widened to 16 bits before.
    widened_expert_rows: int = 1536


NEVER = 1 << 30  # as a limit: more rows than there are
REFERENCE_SMS = 132  # an H200's
MEASURED = {"NVIDIA H200": Limits()}


def derived_limits(sms: int) -> Limits:
    """Limits for a GPU that was not measured: numbers of programs follow the number of SMs."""
    reference = MEASURED["NVIDIA H200"]
    return replace(
        reference,
        prefetched_warps=reference.prefetched_warps * sms // REFERENCE_SMS,
        elementwise_matmuls=reference.elementwise_matmuls * sms // REFERENCE_SMS,
        many_weight_rows=reference.many_weight_rows * sms // REFERENCE_SMS,
        widened_expert_rows=NEVER,  # The wide weights take memory, so only where they were measured to win.
    )


class GPU(NamedTuple):
    """Properties of a GPU on which the choice depends. Without Hopper's kernels, for which Gluon is needed,
    `hopper` is False. `compiles`: there is a compiler for kernels in CUDA C++."""

    sms: int = REFERENCE_SMS
    hopper: bool = False
    limits: Limits = MEASURED["NVIDIA H200"]
    compiles: bool = True


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """Returns the GPU's properties. Without a GPU, kernels are interpreted, or compiled for a machine that
    has one."""
    if device.type != "cuda":
        return GPU()
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    limits = MEASURED.get(properties.name) or derived_limits(sms)
    return GPU(sms, HAS_GLUON and is_hopper(device), limits, has_compiler())


class Before(Enum):
    """Operation on the rows before the matmul."""

    NOTHING = 0
    NORM = 1
    SUM_AND_NORM = 2


class After(Enum):
    """Operation on the outputs after the matmul."""

    NOTHING = 0
    SILU_MUL = 1  # The weight is gate over up.
    ADD = 2  # They are added to the residual.


class Shape(NamedTuple):
    """A matmul with a weight [O, I], or [2F, I] where `after` is SILU_MUL: `outs` is O or F."""

    outs: int
    inputs: int
    before: Before = Before.NOTHING
    after: After = After.NOTHING
    bias: bool = False
    bits: int = 16  # per weight; fewer than 16 are packed (packed_linear.py)
    group: int = 0  # inputs of a quantized weight that share a scale; 0: all of them

    @property
    def gated(self) -> bool:
        return self.after is After.SILU_MUL

    @property
    def weight_rows(self) -> int:
        return self.outs * (1 + self.gated)


class Kernel(Enum):
    NOTHING = -1  # There are no rows, and no launch.
    CUBLAS = 0
    ELEMENTWISE = 1  # elementwise.py
    TILES = 2  # tile_matmul.py
    HOPPER = 3  # hopper_linear.py
    HOPPER_ROW = 4  # hopper_row.py
    HOPPER_GATED = 5  # hopper_gated.py
    FP8_MANY = 6  # fp8_linear.py
    FP8_TORCH = 7  # torch._scaled_mm
    HOPPER_PACKED = 8  # packed_rows.py
    UNPACKED = 9  # what 16 bits have, once the weight is unpacked to them (packed_linear.py)


@dataclass(frozen=True, slots=True)
class ElementwiseTiles:
    """Tile sizes of elementwise.py: a program computes `outs` outputs of all rows, `columns` inputs at a
    time."""

    outs: int
    columns: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """Tile sizes and split-K of hopper_linear.py: a program computes `outs` outputs of `rows` rows from a
    `splits`-th of the inputs, `columns` at a time."""

    rows: int
    outs: int
    splits: int = 1
    columns: int = 128
    an_sm: int = 1  # programs of an SM at once

    @functools.cache  # noqa: B019 -- there are as many instances as shapes
    def stages(self, inputs: int, gated: bool) -> int:
        """Returns the number of tiles of weight and rows that shared memory holds at once."""
        tile_bytes = (self.rows + self.outs * (1 + gated)) * self.columns * 2
        return min(SHARED_BYTES // self.an_sm // tile_bytes, self.num_tiles(inputs), MAX_STAGES)

    def num_tiles(self, inputs: int) -> int:
        return cdiv(cdiv(inputs, self.columns), self.splits)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile sizes and split-K of tile_matmul.py, and of many rows in fp8_linear.py, which has no splits: a
    program computes `outs` outputs of `rows` rows from a `splits`-th of the inputs, in rounds of
    `columns`."""

    rows: int
    outs: int
    columns: int
    num_warps: int
    num_stages: int
    splits: int = 1
    early: int = 0  # rounds of fp8 weights that L2 is asked for before the rows are there

    def rounds(self, inputs: int) -> int:
        return cdiv(cdiv(inputs, self.columns), self.splits)


class PackedTiles(NamedTuple):
    """Tile sizes and split-K of packed_rows.py: a tile has 64 weight rows, `rows` rows, and a `splits`-th of
    the inputs."""

    rows: int
    splits: int = 1


class Matmul(NamedTuple):
    """A choice. `norms`: the kernel does what comes before the matmul. `adds`: it adds to the residual;
    otherwise that is left to the next norm."""

    kernel: Kernel
    tiles: ElementwiseTiles | HopperTiles | RowTiles | PackedTiles | None = None  # as the kernel takes them
    norms: bool = False
    adds: bool = True


@functools.lru_cache(maxsize=8192)
def choose(shape: Shape, rows: int, dtype: torch.dtype, gpu: GPU) -> Matmul:
    """The fastest matmul that is known. The result is the same whenever the arguments are. `dtype` is that
    of the weight. For each number of rows and format, the first that can and is fast comes first:

    rows          16 bits                             fp8                    4 and 8 bits
    0             NOTHING                             NOTHING                NOTHING
    1             HOPPER_ROW, ELEMENTWISE             HOPPER_ROW,            HOPPER_ROW, TILES
                                                      ELEMENTWISE
    2 to 16       HOPPER, ELEMENTWISE (up to 4),      TILES                  TILES
                  TILES, CUBLAS
    17 to 256     HOPPER, TILES (up to 32), CUBLAS    FP8_TORCH, FP8_MANY    HOPPER_PACKED (from 33 on),
                                                                             TILES
    more          HOPPER_GATED, CUBLAS                FP8_TORCH, FP8_MANY    UNPACKED

    Float32 goes to cuBLAS. A norm before one row is inside where a ring takes it, and where it is narrow."""
    if rows == 0:
        return Matmul(Kernel.NOTHING)
    is_fp8, is_packed = dtype == torch.float8_e4m3fn, shape.bits < 16
    is_16_bits = dtype in TENSOR_TYPES and not is_packed
    if rows == 1:
        is_for_ring = _is_for_ring(shape, dtype, gpu)
        if is_for_ring and shape.before is not Before.SUM_AND_NORM:
            return Matmul(Kernel.HOPPER_ROW, norms=shape.before is Before.NORM)
        narrow = shape.inputs <= gpu.limits.normed_inputs or (is_16_bits and _has_few_outs(shape))
        norms = shape.before is not Before.NOTHING and narrow
        if (is_fp8 or is_16_bits) and (norms or not is_for_ring):
            return Matmul(Kernel.ELEMENTWISE, choose_tiles_of_one_row(shape, dtype), norms=norms)
        if is_for_ring:
            return Matmul(Kernel.HOPPER_ROW)
    if is_fp8:
        return _choose_fp8(shape, rows, gpu)
    if is_packed:
        tall = choose_packed_rows(shape, rows, dtype, gpu)
        if tall is not None:
            return Matmul(Kernel.HOPPER_PACKED, tall)
        packed = choose_packed_tiles(shape, rows, gpu)
        return Matmul(Kernel.UNPACKED if packed is None else Kernel.TILES, packed)
    if is_16_bits and (chosen := _choose_16_bits(shape, rows, gpu)) is not None:
        return chosen
    adds = not shape.bias and (rows <= MAX_ROWS or shape.inputs <= gpu.limits.added_inputs)
    return Matmul(Kernel.CUBLAS, adds=adds)


def _is_for_ring(shape: Shape, dtype: torch.dtype, gpu: GPU) -> bool:
    """Says if a weight for one row is large in both directions, and of a size that its loader reads."""
    if not gpu.hopper or min(shape.outs, shape.inputs) < gpu.limits.pipeline_side:
        return False
    if dtype == torch.float8_e4m3fn:  # TMA reads it and its scales, 16 bytes at a time.
        return (
            shape.inputs <= WIDEST_PACKED_ROW
            and shape.inputs % PIPELINE_GROUP == 0
            and (shape.group == 0 or (shape.group == PIPELINE_GROUP and shape.outs % 4 == 0))
        )
    if shape.bits < 16:  # It is whole tiles.
        return (
            dtype == torch.bfloat16
            and shape.bits == 4
            and shape.group == PIPELINE_GROUP
            and shape.inputs <= WIDEST_PACKED_ROW
            and shape.inputs % INT4_TILE == 0
            and not (shape.gated and shape.outs % 16)
        )
    return dtype in TENSOR_TYPES and shape.inputs <= WIDEST_ROW and shape.inputs % 16 == 0


def _is_for_hopper_gated(shape: Shape, rows: int, gpu: GPU) -> bool:
    """Says if these are many rows, of sizes that TMA can read and store, 16 bytes at a time."""
    return (
        gpu.hopper
        and shape.gated
        and not shape.bias
        and rows >= gpu.limits.gated_rows
        and shape.inputs % 8 == shape.outs % 8 == 0
    )


def _has_few_outs(shape: Shape) -> bool:
    """Says if this is a weight of few rows, such as a router, with wide but not the widest inputs."""
    return shape.weight_rows <= FEW_OUTS and shape.inputs <= WIDE_INPUTS


def choose_tiles_of_one_row(shape: Shape, dtype: torch.dtype) -> ElementwiseTiles:
    columns = shape.inputs
    if dtype == torch.float8_e4m3fn:
        # Small tiles: more of them are there at once.
        return ElementwiseTiles(2 if shape.gated else 4, 1024, 4)
    if columns <= 1024:
        return ElementwiseTiles(4, 1024, 4) if shape.weight_rows <= 4096 else ElementwiseTiles(8, 512, 4)
    if columns <= 2048:
        return ElementwiseTiles(2, 2048, 8 if shape.weight_rows <= 1024 else 4)
    # Whole rows: all of them are in flight before the wait.
    if _has_few_outs(shape):
        return ElementwiseTiles(1, WIDE_INPUTS, 8)
    if 3072 < columns <= 4096:
        return ElementwiseTiles(1, 4096, 4) if shape.gated else ElementwiseTiles(2, 4096, 8)
    if columns <= 3072 and shape.before is Before.NOTHING and not shape.gated:
        return ElementwiseTiles(4, 1024, 8)  # elementwise.py has all tiles of these in flight, too.
    return ElementwiseTiles(2, 1024, 4)  # Small tiles: more of them are there at once.


def _choose_16_bits(shape: Shape, rows: int, gpu: GPU) -> Matmul | None:
    """Chooses for two and more rows of numbers of 16 bits. None: cuBLAS is as fast."""
    if _is_for_hopper_gated(shape, rows, gpu):
        return Matmul(Kernel.HOPPER_GATED)
    if gpu.hopper:
        hopper_tiles = choose_hopper_tiles(rows, shape.outs, shape.inputs, shape.gated, gpu.sms)
        if hopper_tiles is not None:
            return Matmul(Kernel.HOPPER, hopper_tiles)
    columns, limits = shape.inputs, gpu.limits
    elementwise = next_power_of_2(rows) * shape.weight_rows * columns <= limits.elementwise_matmuls
    if rows <= 4 and not shape.gated and elementwise:
        return Matmul(Kernel.ELEMENTWISE, ElementwiseTiles(4, *((256, 1) if columns <= 1024 else (1024, 4))))
    few = rows <= 16 and columns < limits.deep_inputs
    if few or (rows <= 32 and shape.weight_rows >= limits.many_weight_rows):
        return Matmul(Kernel.TILES, RowTiles(max(16, next_power_of_2(rows)), 64, 128, 4, 5))
    return None


def choose_hopper_tiles(rows: int, outs: int, inputs: int, gated: bool, sms: int) -> HopperTiles | None:
    """Returns hopper_linear.py's tile sizes. Programs get the fewest outputs for which programs do not
    outnumber SMs. Then the inputs are split while SMs are idle and a slice does not fit in shared memory.

    None: cuBLAS gets the matmul. It has more outputs and rows than programs that run at once, or is bound by
    arithmetic, or is gated (so it can't be split) and has so few outputs that most SMs would read nothing."""
    # TMA reads 16 bytes at a time, and the end stores as many.
    if not MIN_ROWS <= rows <= MAX_ROWS or inputs < 512 or inputs % 8 or outs % 8:
        return None
    block_rows = next(block for block in (8, 16, 32, 64) if rows <= block or block == 64)
    if block_rows < 64:
        smallest = 64
    elif gated or rows > 64:
        smallest = 32
    else:
        smallest = 16
    largest = 128
    large = rows > 64 and outs * inputs > 1 << 24
    if large:  # Two tiles of rows would read such a weight twice.
        if gated or rows > 128:
            return None
        block_rows, smallest, largest = 128, 64, 64
    for block_outs in (16, 32, 64, 128):
        programs = cdiv(rows, block_rows) * cdiv(outs, block_outs)
        if smallest <= block_outs <= largest and programs <= sms:
            assert cdiv(rows, block_rows) * block_rows <= rows_with_room(rows)
            if gated and inputs >= 4096 and 3 * programs < sms:
                return None
            narrow = gated and (inputs >= 4096 or rows > 64 or block_rows + 2 * block_outs > 288)
            columns = 64 if large or narrow else 128  # There are at least 3 stages so.
            choices = [
                HopperTiles(block_rows, block_outs, splits, columns)
                for splits in range(1, 2 if gated else MAX_SPLITS + 1)
                if splits == 1 or programs * splits <= sms
            ]
            return next(
                (tiles for tiles in choices if tiles.stages(inputs, gated) == tiles.num_tiles(inputs)),
                choices[-1],
            )
    pairs = cdiv(cdiv(rows, 64) * cdiv(outs, 128), 2)
    if rows > 64 and inputs <= PAIRED_INPUTS and not (gated or large) and pairs <= sms:
        return HopperTiles(64, 128, 1, 64, 2)
    return None


def _packed_tiles(
    block_rows: int, outs: int, inputs: int, bits: int, steps: int, num_stages: int = 4
) -> RowTiles:
    """Tiles of weights of 4 or 8 bits. A step is 16 bytes of a thread. A round has `steps` steps, or one more
    or less if that makes the inputs whole rounds."""
    step, most = 256 // bits, steps
    steps = next((n for n in (most, max(1, most - 1), most + 1) if inputs % (n * step) == 0), most)
    return RowTiles(block_rows, outs, steps * step, outs // 16, num_stages)


def _whole_packed_tiles(block_rows: int, inputs: int, bits: int, gated: bool) -> RowTiles:
    most = 1 if block_rows == 128 else 2 if gated or block_rows == 64 else 4
    return _packed_tiles(block_rows, 64 if gated or block_rows <= 32 else 128, inputs, bits, most)


def choose_packed_rows(shape: Shape, rows: int, dtype: torch.dtype, gpu: GPU) -> PackedTiles | None:
    """Returns the tiles of packed_rows.py. None: others are faster, or it cannot.

    A program has one tile after the other. Tensor cores take weights from registers, which costs them as much
    as more rows would. Where tiles are for half of the SMs, the inputs are halved. Where they are for half of
    the SMs even then, tile_matmul.py has more splits."""
    whole = shape.inputs % 128 == 0 and shape.outs % (32 if shape.gated else 64) == 0
    can = gpu.hopper and gpu.compiles and whole and dtype == torch.bfloat16
    if not (can and PACKED_TALL_ROWS < rows <= gpu.limits.packed_rows):
        return None

    def count(tiles: PackedTiles) -> int:
        return cdiv(rows, tiles.rows) * (shape.weight_rows // 64) * tiles.splits

    def time(tiles: PackedTiles) -> int:
        adding = PACKED_ADDING * tiles.rows if tiles.splits > 1 else 0
        rounds = cdiv(shape.inputs // 128, tiles.splits)
        return cdiv(count(tiles), gpu.sms) * (rounds * (PACKED_ROUND[shape.bits] + tiles.rows) + adding)

    blocks = PACKED_BLOCKS[shape.bits]
    tiles = [PackedTiles(block) for block in blocks]
    if shape.inputs > 128:
        tiles += [PackedTiles(block, 2) for block in blocks if block <= PACKED_SPLIT_ROWS]
    best = min(tiles, key=time)
    return best if 2 * count(best) > gpu.sms else None


def choose_packed_tiles(shape: Shape, rows: int, gpu: GPU) -> RowTiles | None:
    """Returns the tiles of weights of 4 or 8 bits. None: there are many rows, for which the weight is
    unpacked."""
    if rows > gpu.limits.packed_rows:
        return None
    block_rows = min(128, max(16, next_power_of_2(rows)))
    if shape.gated or block_rows == 16:
        whole = _whole_packed_tiles(block_rows, shape.inputs, shape.bits, shape.gated)
        programs = cdiv(rows, block_rows) * cdiv(shape.outs, whole.outs)
        light = shape.gated and block_rows == 16
        splits = (PACKED_GATED_PROGRAMS if light else gpu.limits.packed_programs) * gpu.sms // programs
    else:
        # Sums of more rows leave an SM registers for few such programs, and then for one.
        whole = _packed_tiles(block_rows, 64, shape.inputs, shape.bits, 4 if block_rows == 64 else 2)
        programs = cdiv(rows, block_rows) * cdiv(shape.outs, whole.outs)
        at_once = gpu.sms * (PACKED_TALL_PROGRAMS if block_rows == 32 else 1)
        splits = (2 * at_once + programs) // (2 * programs)
        if block_rows == 64 or programs > gpu.sms:
            whole = replace(whole, num_stages=3)
    most = min(MAX_ROW_SPLITS, whole.rounds(shape.inputs) // MIN_SPLIT_ROUNDS)
    return replace(whole, splits=max(1, min(most, splits)))


def _choose_fp8(shape: Shape, rows: int, gpu: GPU) -> Matmul:
    """Chooses for two and more rows and a weight in fp8. Rows become fp8 by their number alone, because the
    operation that makes them must know before."""
    columns = min(128, shape.group or 128)
    if rows > gpu.limits.widened_rows:
        tiles = [RowTiles(tall, wide, columns, warps, 4) for tall, wide, warps in FP8_TILES]
        busy = (t for t in tiles if cdiv(rows, t.rows) * cdiv(shape.outs, t.outs) >= gpu.sms)
        whole = shape.inputs % (shape.group or 16) == shape.outs % 16 == 0
        # With scales of groups cuBLAS adds no bias, and wants the scales of four rows aligned.
        takes_groups = shape.group == 128 and not shape.bias and rows % 4 == 0
        by_torch = gpu.hopper and whole and (shape.group == 0 or takes_groups)
        return Matmul(Kernel.FP8_TORCH if by_torch else Kernel.FP8_MANY, next(busy, tiles[-1]))
    block_rows = min(64, max(16, next_power_of_2(rows)))
    programs = cdiv(rows, block_rows) * cdiv(shape.outs, 64)
    rounds = cdiv(shape.inputs, columns)
    idle = min(rounds // MIN_SPLIT_ROUNDS, gpu.sms // programs)  # splits that give idle SMs work
    most = gpu.limits.fp8_programs * gpu.sms // programs
    splits = max(1, min(MAX_ROW_SPLITS, most, max(rounds // MIN_FP8_ROUNDS, idle)))
    if programs * splits <= gpu.sms:
        return Matmul(Kernel.TILES, RowTiles(block_rows, 64, columns, 4, 3, splits))
    # A short pipeline is full sooner; two weights leave no room for a long one.
    stages = 4 if shape.gated or rounds // splits <= 8 else 5
    return Matmul(Kernel.TILES, RowTiles(block_rows, 64, columns, 4, stages, splits, EARLY_ROUNDS))


class ExpertKernel(Enum):
    TILES = 0  # tile_matmul.py
    HOPPER = 1  # hopper_experts.py


class ExpertTiles(NamedTuple):
    """Tiles of an expert's two matmuls. `slots`: each slot is a block of rows of its own. Hopper's kernels
    take nothing but the rows from them. Weights in runs have kernels of their own (mxfp4_experts.py), unless
    they are `widened`: then they become 16 bits before the matmul, which is `kernel`'s."""

    gate_up: RowTiles
    down: RowTiles
    slots: bool
    kernel: ExpertKernel = ExpertKernel.TILES
    widened: bool = False


class ExpertFormat(NamedTuple):
    """Format of an expert's weights, on which its tiles depend."""

    bits: int = 16
    group: int = 0  # inputs that share a scale
    is_fp8: bool = False
    is_e2m1: bool = False
    in_runs: bool = False  # as mxfp4_experts.py lays them

    @property
    def is_mxfp4(self) -> bool:
        return self.is_e2m1 and self.group == MXFP4_GROUP


@functools.lru_cache(maxsize=1024)
def choose_expert_tiles(
    num_slots: int,
    num_experts: int,
    sizes: tuple[int, int],
    formats: tuple[ExpertFormat, ExpertFormat],
    dtype: torch.dtype,
    gpu: GPU,
) -> ExpertTiles:
    """Chooses tiles by the mean number of slots of an expert. Few rows are bound by bandwidth, so tiles are
    deep and have little padding. Many rows are bound by arithmetic. So few slots that they rarely meet at an
    expert are not sorted: each is a block of its own. `sizes`: hidden and intermediate."""
    hidden, size = sizes
    slots = 4 * num_slots <= num_experts
    rows = num_slots / num_experts
    if dtype == torch.float32:
        block_rows = 16 if rows <= 16 else 32
    else:
        # More than 64 rows have no room in registers with fp8, whose groups have sums of their own, nor, but
        # on Hopper, with other weights in fewer bits.
        tall = all(of.bits == 16 or (gpu.hopper and not of.is_fp8) for of in formats)
        plain = all(of.bits == 16 for of in formats)
        if rows <= (SHORT_TILE_ROWS if plain else 16):
            block_rows = 16
        elif plain and rows <= MEDIUM_TILE_ROWS:
            block_rows = 32
        else:
            block_rows = 128 if rows > 64 and tall else 64
    kernel, widened = ExpertKernel.TILES, False
    if formats[0].in_runs:
        widened = rows >= gpu.limits.widened_expert_rows and _is_for_hopper_experts(rows, sizes, dtype, gpu)
        if widened:
            kernel, block_rows = ExpertKernel.HOPPER, 128
    elif (
        not slots and all(of.bits == 16 for of in formats) and _is_for_hopper_experts(rows, sizes, dtype, gpu)
    ):
        kernel, block_rows = ExpertKernel.HOPPER, 128
    gate_up = expert_tiles(block_rows, hidden, True, formats[0], dtype)
    down = expert_tiles(block_rows, size, False, formats[1], dtype)
    if not gpu.hopper and block_rows == 128:  # Sums of gate and up beside each other spill there.
        gate_up = replace(gate_up, outs=64)
    if not gpu.hopper and block_rows == 64:  # Rounds of two steps spill there.
        gate_up, down = (
            replace(tiles, columns=64) if of.bits == 4 else tiles
            for tiles, of in zip((gate_up, down), formats)
        )
    if slots:
        gate_up = _split_slots(gate_up, num_slots, size, hidden, formats[0], True, gpu)
        down = _split_slots(down, num_slots, hidden, size, formats[1], False, gpu)
    return ExpertTiles(gate_up, down, slots, kernel, widened)


def _is_for_hopper_experts(rows: float, sizes: tuple[int, int], dtype: torch.dtype, gpu: GPU) -> bool:
    """Says if these are many rows, of sizes that TMA can read, 16 bytes at a time. A row is copied in whole
    steps of 64 inputs."""
    hidden, size = sizes
    many = gpu.hopper and rows >= gpu.limits.expert_rows
    return many and dtype in TENSOR_TYPES and hidden % 64 == size % 8 == 0


def _split_slots(
    tiles: RowTiles, num_slots: int, outs: int, inputs: int, of: ExpertFormat, gated: bool, gpu: GPU
) -> RowTiles:
    """Splits the inputs until the slots have as many programs as SMs take at once, for weights in fewer bits:
    a few programs are bound by their instructions there."""
    if of.bits == 16:
        return tiles
    at_once = SLOT_PROGRAMS * gpu.sms
    if of.is_mxfp4:
        tiles = _packed_tiles(tiles.rows, tiles.outs, inputs, of.bits, 3, num_stages=2)
        at_once = (MXFP4_GATED_PROGRAMS if gated else MXFP4_PROGRAMS) * gpu.sms
    most = min(MAX_ROW_SPLITS, tiles.rounds(inputs) // MIN_SPLIT_ROUNDS)
    splits = at_once // (max(1, num_slots) * cdiv(outs, tiles.outs))
    return replace(tiles, splits=max(1, min(most, splits)))


def expert_tiles(block_rows: int, inputs: int, gated: bool, of: ExpertFormat, dtype: torch.dtype) -> RowTiles:
    """Returns the tiles of one of an expert's matmuls. Where it can be, the inputs are whole rounds."""
    if dtype == torch.float32:
        return RowTiles(block_rows, 32, min(32, of.group or 32) if of.is_fp8 else 32, 4, 2)
    if of.is_fp8:
        return RowTiles(block_rows, 64, min(128, of.group or 128), 4, 4)
    if of.bits == 16:
        if block_rows <= 16:
            return RowTiles(block_rows, 64, 128 if inputs % 128 == 0 else 64, 4, 4)
        if block_rows <= 64:
            return RowTiles(block_rows, 64, 64, 4, 4)
        return RowTiles(block_rows, 128, 64, 8, 3)
    if block_rows == 64 and of.bits == 4:
        return _packed_tiles(64, 64, inputs, 4, 2 if gated else 1, num_stages=3 if gated else 4)
    if block_rows == 128:
        return _packed_tiles(block_rows, 64 if gated else 128, inputs, of.bits, 1, num_stages=3)
    return _whole_packed_tiles(block_rows, inputs, of.bits, gated)
