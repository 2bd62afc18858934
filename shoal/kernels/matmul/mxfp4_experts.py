"""Experts with weights in MXFP4 on Hopper: how they lie in memory, and their two matmuls in CUDA C++
(mxfp4_experts.cu).

A few hundred tokens need every weight of every expert, so the speed of reading is what counts. What a program
reads lies in one run: a strip of 64 weight rows, step after step of 64 inputs, 2,176 bytes each. A few large
copies keep 80 KB of them on their way to each SM. Two words of 8 weights have their bits where most pairs
become two numbers in bf16 by one shift and one mask.

    runs     uint8 [experts, strips, steps, 2176]
    a step   int32 [4 tiles of 16 weight rows, 8, 4, 4 words], then uint8 [4 tiles, 8, 2 groups, 2]

Lane 4 g + c of a warp has weight rows g + 8 h (h 0, 1) of a tile, and of each word's 16 inputs those
numbered 8 u + 2 c + e (u, e 0, 1). Weight rows g and g + 8 are gate and up of output g of a tile's 8, or
outputs 2 g and 2 g + 1 of its 16. Halves e of two words have the weights of pairs 2 u + h of both
(PAIRS). A byte of a scale is the exponent of a power of two, by which bits of a weight, taken as a number in
bf16, become the weight, made smaller by 2^16.

Rows are arranged as tensor cores want them before the first matmul, which writes the second one's so, too. Of
a few tokens (`mix_few_slots`) each slot, a pair of a token and one of its K choices, is a row of its own. The
second matmul's programs start once the experts are known, fill their places while the first one's multiply,
and add a token's slots.

E experts · K experts of a token · I inputs · O outputs (F of the first matmul, whose weight has 2F rows an
expert if it is gated). The oracle is moe/reference.py. Figures are in benchmarks/results/matmul.md.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.errors import CheckpointError
from shoal.kernels.cuda_library import CudaFunction, compiling, has_compiler
from shoal.kernels.hopper import HAS_GLUON, is_hopper
from shoal.kernels.matmul import dispatch
from shoal.kernels.quant.mxfp4_tensor import SCALE_GROUP, Mxfp4Tensor
from shoal.kernels.rounding import cdiv
from shoal.kinds.experts import Activation

STRIP, STEP = 64, 64  # weight rows and inputs
ROUND = 3  # steps that are copied at once; constant of mxfp4_experts.cu, as are the next two
STEP_BYTES = 2048 + 128  # words, scales
THREADS = 5 * 128
# Where the pairs of two words have a weight's sign, exponent and mantissa, as (word, bit).
PAIRS = tuple(
    (*(tuple((word, bit - shift) for bit in (15, 8, 7, 6)) for shift in (0, 3, 6)), left)
    for word, left in enumerate((((0, 14), (1, 14), (1, 13), (0, 13)), ((0, 11), (1, 11), (1, 10), (0, 10))))
)
SCALE_SHIFT = 126 - 16  # for a scale's exponent: bits of e2m1 in bf16 are too small by 2^126
LARGEST_SCALE = 254 - SCALE_SHIFT
CHUNK = 1 << 22  # As many weights are packed at a time, so that a region of memory keeps little of it.
TILE_ROWS = 128  # rows of a tile at most
SHARED_BYTES = 227 << 10  # a program has all of an SM's
# Shared memory of programs of `mxfp4_slots`, first and second matmul. An SM has room for one of each, and not
# for two of the first, which start while a matmul of one row has most SMs, and would fill half in pairs.
SLOT_SHARED_BYTES = 120 << 10, 106 << 10
SLOT_THREADS = 12 * 32
SLOT_STRIPS = 3  # A program has up to three strips, as mxfp4_experts.cu says.
MOST_CHOICES = 8  # Clusters of more programs are not portable.
MOST_SLOT_INPUTS = 12288  # A program keeps a row of inputs in shared memory, beside its places.
ARRANGED = 8  # slots of a program of `arrange`
WEIGHT_POINTERS = "x weights bias out tiles used slots"
SLOT_POINTERS = "x weights bias out experts shares"
SLOT_NUMBERS = "top_k row_bytes add"
ARRANGED_POINTERS = "x rows next_rows experts ranks counts slots used tiles"
ARRANGED_NUMBERS = "num_slots top_k num_experts row_bytes next_bytes"
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "relu2", "")  # as numbered in mxfp4_experts.cu


@dataclass(frozen=True, slots=True)
class ExpertRuns:
    """The weights of one of a layer's two matmuls, of all experts."""

    shape: tuple[int, int]  # rows of all experts, inputs
    num_experts: int
    runs: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.runs}

    def variants(self, second: ExpertRuns, activation: Activation) -> tuple[Variant, Variant]:
        """Returns the variants of both matmuls, of this weight and of the second one."""
        strips, steps = self.runs.shape[1:3]
        next_strips, next_steps = second.runs.shape[1:3]
        kind, nothing = ACTIVATIONS.index(activation.kind), ACTIVATIONS.index("")
        first = Variant(steps, strips, second.shape[1], next_steps, kind)
        return first, Variant(next_steps, next_strips, self.shape[1], 0, nothing)


def has_kernels(tensors: Sequence[object], per_expert: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Says if these matrices can be multiplied so: in MXFP4, for rows in bf16 on Hopper, of whole strips and
    whole groups of inputs. `per_expert`: how many matrices of the list an expert has. Both matrices
    of a layer have to be such."""
    if not all(isinstance(tensor, Mxfp4Tensor) for tensor in tensors) or dtype != torch.bfloat16:
        return False
    outs, inputs = tensors[0].shape  # type: ignore[attr-defined]
    whole = outs * per_expert % STRIP == 0 and inputs % SCALE_GROUP == 0
    return whole and is_hopper(device) and HAS_GLUON and has_compiler()


def pack(tensors: Sequence[Mxfp4Tensor], old: object, per_expert: int, device: torch.device) -> ExpertRuns:
    """Makes one weight of the matrices of all experts: of each, gate and up, or one. It lies in the memory
    of `old`, if that is such a weight, since captured graphs read it. Raises CheckpointError for scales
    beyond the range, and for what does not fit into that memory."""
    outs, inputs = tensors[0].shape
    strips, steps = outs * per_expert // STRIP, cdiv(inputs, STEP * ROUND) * ROUND
    num_experts = len(tensors) // per_expert
    shape = (outs * len(tensors), inputs)
    if isinstance(old, ExpertRuns):
        if (old.shape, old.num_experts) != (shape, num_experts):
            raise CheckpointError(
                f"experts of shape {list(shape)} do not fit into the memory of the engine's, whose shape is "
                f"{list(old.shape)}; build a new engine"
            )
        weight = old
    else:
        memory = torch.empty((num_experts, strips, steps, STEP_BYTES), dtype=torch.uint8, device=device)
        weight = ExpertRuns(shape, num_experts, memory)
    at_once = max(1, CHUNK // (STRIP * STEP * steps))
    for expert in range(num_experts):
        own = tensors[expert * per_expert : (expert + 1) * per_expert]
        for first in range(0, strips, at_once):
            last = min(strips, first + at_once)
            outputs = first * STRIP // per_expert, last * STRIP // per_expert
            parts = [tensor.rows(*outputs) for tensor in own]
            # Gate and up take turns.
            found = [replace(part, quants=part.quants.to(device)).unpacked() for part in parts]
            quants = torch.stack(found, dim=1).flatten(0, 1)
            scales = torch.stack([part.scales.to(device) for part in parts], dim=1).flatten(0, 1)
            weight.runs[expert, first:last] = packed_strips(quants, scales, steps)
    return weight


def packed_strips(quants: torch.Tensor, scales: torch.Tensor, steps: int) -> torch.Tensor:
    """Packs weight rows, quants uint8 [R, I] and scales uint8 [R, I / 32], into `steps` steps: uint8 [strips,
    steps, 2176]. Raises CheckpointError."""
    rows, inputs = quants.shape
    if int(scales.max()) > LARGEST_SCALE:
        raise CheckpointError(
            f"experts in mxfp4 have a scale of 2^{int(scales.max()) - 127}, and matmuls here take up to "
            f"2^{LARGEST_SCALE - 127}; name a dtype, to which weights are unpacked"
        )
    missing = steps * STEP - inputs
    quants = torch.nn.functional.pad(quants, (0, missing))
    scales = torch.nn.functional.pad(scales, (0, missing // SCALE_GROUP))
    strips = rows // STRIP
    of = quants.int().view(strips, 4, 8, 2, steps, 4, 2, 4, 2)  # strip, tile, g, h, step, word, u, c, e
    words = torch.zeros((strips, 4, 8, steps, 4, 4), dtype=torch.int32, device=quants.device)
    for word, u, h, e in itertools.product(range(2), repeat=4):
        weights = of[:, :, :, h, :, word::2, u, :, e]
        for i, (target, bit) in enumerate(PAIRS[word][2 * u + h]):
            words[..., target::2, :] |= (weights >> (3 - i) & 1) << (bit + 16 * e)
    words = words.permute(0, 3, 1, 2, 5, 4).reshape(strips, steps, 512)  # strip, step, tile, g, c, word
    powers = (scales + SCALE_SHIFT).view(strips, 4, 8, 2, steps, 2)  # strip, tile, g, h, step, group
    powers = powers.permute(0, 4, 1, 2, 5, 3).reshape(strips, steps, 128)
    return torch.cat((words.view(torch.uint8), powers), dim=2)


class Variant(NamedTuple):
    """The constants for which a matmul is compiled."""

    steps: int
    strips: int
    outs: int
    next_steps: int  # steps of the second matmul; 0: this is it
    activation: int

    def constants(self) -> dict[str, int]:
        named = {f"MX_{name.upper()}": value for name, value in self._asdict().items()}
        if self.slot_shared_bytes:
            named["MX_SLOT_SHARED_BYTES"] = self.slot_shared_bytes
        return named | {"MX_ROWS": TILE_ROWS, "MX_SHARED_BYTES": SHARED_BYTES}

    @property
    def slot_shared_bytes(self) -> int:
        """Shared memory of programs of `mxfp4_slots`. 0: a row is too long for it, so there is none."""
        return SLOT_SHARED_BYTES[self.next_steps == 0] if self.steps * STEP <= MOST_SLOT_INPUTS else 0


class _Arguments(ctypes.Structure):
    """The struct Arguments in mxfp4_experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in WEIGHT_POINTERS.split()),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class _SlotArguments(ctypes.Structure):
    """The struct SlotArguments in mxfp4_experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in SLOT_POINTERS.split()),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_int) for name in SLOT_NUMBERS.split()),
    )


class _Arrangement(ctypes.Structure):
    """The struct of this name in mxfp4_experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ARRANGED_POINTERS.split()),
        *((name, ctypes.c_int) for name in ARRANGED_NUMBERS.split()),
    )


class Slots(NamedTuple):
    """The choice of experts. experts, ranks: int32 [T * K], a slot's expert and its number among the expert's
    slots. counts: int32 [E], slots of each expert."""

    experts: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor
    top_k: int


def mix_slots(
    x_TD: torch.Tensor,
    first: ExpertRuns,
    second: ExpertRuns,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    slots: Slots,
    activation: Activation,
) -> torch.Tensor:
    """Both matmuls of all slots, [T * K, D]. Bits do not depend on timing."""
    num_slots, num_experts, device = len(slots.experts), first.num_experts, x_TD.device
    hidden, size = first.shape[1], second.shape[1]
    assert x_TD.is_contiguous() and x_TD.dtype == torch.bfloat16 and x_TD.shape[1] == hidden
    assert second.shape[0] == num_experts * hidden
    functions = _functions(device, *first.variants(second, activation))
    # An expert's last tile is filled up to a multiple of 16.
    rows = num_slots + 15 * min(num_experts, num_slots)
    numbers = torch.empty(rows + 1, dtype=torch.int32, device=device)
    tiles = torch.empty(
        (num_slots // TILE_ROWS + min(num_experts, num_slots), 4), dtype=torch.int32, device=device
    )
    x = x_TD.new_empty((rows, first.runs.shape[2] * STEP))
    hidden_states = x_TD.new_empty((rows, second.runs.shape[2] * STEP))
    out = x_TD.new_empty((num_slots, hidden))
    used, of_rows = numbers[:1], numbers[1:]
    listed = (x, hidden_states, slots.experts, slots.ranks, slots.counts, of_rows, used, tiles)
    arguments = _Arrangement(
        *(tensor.data_ptr() for tensor in (x_TD, *listed)),
        *(num_slots, slots.top_k, num_experts, hidden * 2, size * 2),
    )
    functions.arrange.launch((1, cdiv(num_slots, ARRANGED) + 1, 1), ARRANGED * 32, arguments)
    programs = dispatch.gpu_of(device).sms
    for function, weight, bias_EO, rows_in, rows_out in zip(
        functions.matmuls, (first, second), biases, (x, hidden_states), (hidden_states, out)
    ):
        assert bias_EO is None or (bias_EO.is_contiguous() and bias_EO.numel() == weight.shape[0])
        bias = None if bias_EO is None else bias_EO.data_ptr()
        pointers = rows_in.data_ptr(), weight.runs.data_ptr(), bias, rows_out.data_ptr()
        listed_at = tiles.data_ptr(), used.data_ptr(), of_rows.data_ptr()
        numbers_of = _Arguments(*pointers, *listed_at, activation.alpha, activation.limit)
        function.launch((1, programs, 1), THREADS, numbers_of)
    return out


def takes_few_slots(first: ExpertRuns, second: ExpertRuns, top_k: int) -> bool:
    """Says if `mix_few_slots` can multiply by these weights."""
    return top_k <= MOST_CHOICES and max(first.shape[1], second.shape[1]) <= MOST_SLOT_INPUTS


def mix_few_slots(
    x_TD: torch.Tensor,
    first: ExpertRuns,
    second: ExpertRuns,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    choice: tuple[torch.Tensor, torch.Tensor],
    activation: Activation,
    out_TD: torch.Tensor,
    add: bool,
) -> None:
    """Both matmuls of so few slots that they rarely meet at an expert, and the sum of each token's slots by
    weight, which is added to `out_TD` with `add`. `choice`: the slots' experts, int32 [T * K], and weights,
    float32 [T * K]. Bits do not depend on timing."""
    experts, shares = choice
    num_tokens, num_slots, device = len(x_TD), len(experts), x_TD.device
    hidden, size, top_k = first.shape[1], second.shape[1], num_slots // num_tokens
    assert x_TD.is_contiguous() and x_TD.dtype == out_TD.dtype == torch.bfloat16
    assert out_TD.is_contiguous() and out_TD.shape == x_TD.shape == (num_tokens, hidden)
    assert second.shape[0] == first.num_experts * hidden and takes_few_slots(first, second, top_k)
    functions = _functions(device, *first.variants(second, activation))
    hidden_states = x_TD.new_empty((num_slots, size))
    sms = dispatch.gpu_of(device).sms
    # The SMs of a cluster are neighbours, which leaves some SMs without one.
    for function, weight, bias_EO, rows_in, rows_out, cluster, at_once in (
        (functions.slots[0], first, biases[0], x_TD, hidden_states, 1, sms),
        (functions.slots[1], second, biases[1], hidden_states, out_TD, top_k, sms - sms // 32),
    ):
        assert bias_EO is None or (bias_EO.is_contiguous() and bias_EO.numel() == weight.shape[0])
        strips, bias = weight.runs.shape[1], None if bias_EO is None else bias_EO.data_ptr()
        parts = max(cdiv(strips, SLOT_STRIPS), min(strips, at_once // num_slots))
        pointers = rows_in.data_ptr(), weight.runs.data_ptr(), bias, rows_out.data_ptr()
        of_slots = experts.data_ptr(), shares.data_ptr(), activation.alpha, activation.limit
        arguments = _SlotArguments(*pointers, *of_slots, top_k, weight.shape[1] * 2, add)
        function.launch((cluster, parts, num_slots // cluster), SLOT_THREADS, arguments)


class _Unpacking(ctypes.Structure):
    """The struct Unpacking in mxfp4_experts.cu."""

    _fields_ = (("weights", ctypes.c_void_p), ("out", ctypes.c_void_p), ("row_bytes", ctypes.c_int))


def unpacked(first: ExpertRuns, second: ExpertRuns, activation: Activation, which: int) -> torch.Tensor:
    """One of the two weights in bf16, [E, weight rows of an expert, I]."""
    weight = (first, second)[which]
    rows, inputs = weight.shape
    out = weight.runs.new_empty(
        (weight.num_experts, rows // weight.num_experts, inputs), dtype=torch.bfloat16
    )
    function = _functions(out.device, *first.variants(second, activation)).unpack[which]
    arguments = _Unpacking(weight.runs.data_ptr(), out.data_ptr(), inputs * 2)
    function.launch((1, weight.num_experts * weight.runs.shape[1], 1), 256, arguments)
    return out


class _Functions(NamedTuple):
    arrange: CudaFunction
    matmuls: tuple[CudaFunction, ...]
    slots: tuple[CudaFunction, ...]  # for rows that are short enough
    unpack: tuple[CudaFunction, ...]


@functools.cache
def _functions(device: torch.device, first: Variant, second: Variant) -> _Functions:
    """The kernels of a layer's both matmuls, which are compiled at the same time."""
    capability = torch.cuda.get_device_capability(device)
    source = Path(__file__).with_suffix(".cu")
    begun = [compiling(source, variant.constants(), capability) for variant in (first, second)]
    binaries = [future.result() for future in begun]
    return _Functions(
        CudaFunction(binaries[0], "arrange", 0),
        tuple(CudaFunction(binary, "mxfp4_experts", SHARED_BYTES) for binary in binaries),
        tuple(
            CudaFunction(binary, "mxfp4_slots", variant.slot_shared_bytes)
            for binary, variant in zip(binaries, (first, second))
            if variant.slot_shared_bytes
        ),
        tuple(CudaFunction(binary, "unpack", 0) for binary in binaries),
    )
