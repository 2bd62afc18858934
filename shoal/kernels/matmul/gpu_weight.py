"""Weights of few bits as the GPU's matmuls read them (loaders.py), and their packing.

Whatever a checkpoint holds becomes one form: a weight is quant * scale + minimum, with a quant of 4 or 8
bits, or an e2m1 number * scale. Scales and minima are of the engine's type. Types that fit neither 4 bits nor
groups of 32 inputs (16 with e2m1) get 8 bits, which hold all quants of GGUF's. With act-order, inputs are
sorted by their groups here, and activations before each matmul.

The order in memory is that in which tensor cores want their left operand, so that a thread's 16 bytes are
what it multiplies. 16 outputs make a tile. Of a tile and a step of 256 / bits inputs, lane 4 g + c of a warp
has outputs g + 8 h (h 0, 1) and, of each 16 inputs, those numbered 8 u + 2 c + e (u, e 0, 1).

    words    int32 [tiles, steps, 32 lanes, 4]
    scales   int32 [tiles, groups, 8]: of outputs g in the low half, of g + 8 in the high half; minima too

Outputs are filled up to a multiple of 128 with zeros, inputs to whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from shoal.errors import CheckpointError
from shoal.kernels.activation import gate_mul
from shoal.kernels.matmul import packed_linear
from shoal.kernels.matmul.launch import matmul_of_norm
from shoal.kernels.matmul.loaders import SMALLER, TiledWeight
from shoal.kernels.norm import add_rms_norm, rms_norm
from shoal.kernels.quant.ggml_types import FOUR_BITS
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import BIAS, Mxfp4Tensor
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.kernels.rounding import cdiv

TILE = 16  # outputs
FILLED = 128  # The outputs are filled up to a multiple of it: the most that a program computes.
GROUPS = (128, 64, 32, 16)  # sizes of groups that the kernel knows
CHUNK = 1 << 22  # As many weights are packed at a time, so that a region of memory keeps little of it.
E2M1 = (Mxfp4Tensor, Nvfp4Tensor)  # tensors of such numbers
# Bits taken as a number of the type are too small by 2^this: bits of a quant, and of e2m1
# (loaders.py).
QUANT_SHIFT = {torch.bfloat16: 133, torch.float16: 24}
E2M1_SHIFT = {torch.bfloat16: 126, torch.float16: 14}


class PlainRows:
    """Shared behaviour of both kinds of weights: their input rows are plain numbers (bf16, fp16)."""

    def fp8_group(self, num_rows: int) -> int | None:
        return None

    def normed(
        self, x_TI: torch.Tensor | None, residual_TI: torch.Tensor, norm_weight_I: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The norm of residual + x, which is then the residual."""
        if x_TI is None:
            return rms_norm(residual_TI, norm_weight_I, eps)
        return add_rms_norm(x_TI, residual_TI, norm_weight_I, eps)

    def of_norm(
        self,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor | None:
        """The matmul of the residual's norm, gated or not, where one kernel makes both."""
        return None


@dataclass(frozen=True, slots=True)
class GpuWeight(TiledWeight, PlainRows):
    """One matrix, or several that share an order of inputs."""

    order: torch.Tensor | None  # int64 [I]: which input of the activations is at each place

    def linear(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, O]."""
        return packed_linear.packed_linear(self._ordered(x_TI), self, bias_O)

    def add(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None:
        """Adds the matmul to the residual in place, or returns it for the next norm to add."""
        return packed_linear.packed_add(self._ordered(x_TI), self, bias_O, residual_TO)

    def gated(
        self,
        x_TI: torch.Tensor,
        bias_2F: torch.Tensor | None,
        group: int | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """activation(first half of the outputs) * second half, [T, F]."""
        return packed_linear.packed_gated(self._ordered(x_TI), self, bias_2F, activation)

    def of_norm(
        self,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor | None:
        if self.order is not None:
            return None
        return matmul_of_norm(residual_TI, norm_weight_I, eps, self, bias_O, activation)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, [T, I]."""
        rows = packed_linear.unpack_ids(self, ids_T)
        return rows if self.order is None else torch.empty_like(rows).index_copy_(1, self.order, rows)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        found = dict(packed=self.words, scales=self.scales, minima=self.minima, order=self.order)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _ordered(self, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI if self.order is None else x_TI.index_select(1, self.order)


@dataclass(frozen=True, slots=True)
class GpuWeights(PlainRows):
    """Matrices side by side, each with an order of inputs of its own."""

    parts: tuple[GpuWeight, ...]

    def linear(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        y_TO = torch.cat([part.linear(x_TI, None) for part in self.parts], dim=1)
        return y_TO if bias_O is None else y_TO + bias_O

    def add(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None:
        return self.linear(x_TI, bias_O)

    def gated(
        self,
        x_TI: torch.Tensor,
        bias_2F: torch.Tensor | None,
        group: int | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        return gate_mul(self.linear(x_TI, bias_2F), activation)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an embedding is one matrix")

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {
            f"{i}.{name}": tensor
            for i, part in enumerate(self.parts)
            for name, tensor in part.tensors().items()
        }


def pack(
    tensors: Sequence[QuantizedTensor],
    replaced: GpuWeight | GpuWeights | None,
    device: torch.device,
    dtype: torch.dtype,
) -> GpuWeight | GpuWeights:
    """Makes one weight of all the tensors' rows, in order. It lies in the memory of `replaced`, if there is
    one, since captured graphs read that. Raises CheckpointError for groups that the kernel does not know, for
    scales that the dtype does not hold, and for what does not fit into that memory."""
    if dtype not in SMALLER:
        raise CheckpointError(
            f"matmuls with weights in fewer bits are not made in {dtype} on a GPU; choose bfloat16 or float16"
        )
    orders = [_order(tensor) for tensor in tensors]
    alike = all(_equal(order, orders[0]) for order in orders)
    merged = [(tensors, orders[0])] if alike else [([t], order) for t, order in zip(tensors, orders)]
    if replaced is None:
        weights = [_pack(some, order, False, device, dtype) for some, order in merged]
        return weights[0] if alike else GpuWeights(tuple(weights))
    before = replaced.parts if isinstance(replaced, GpuWeights) else (replaced,)
    if len(before) != len(merged):
        raise CheckpointError(f"{MISMATCH}: their inputs are ordered otherwise; build a new engine")
    for old, (some, order) in zip(before, merged):
        _overwrite(old, _pack(some, order, old.minima is not None, device, dtype))
    return replaced


MISMATCH = "its quantized weights do not fit into the memory of the engine's"


def _overwrite(old: GpuWeight, new: GpuWeight) -> None:
    for field in fields(GpuWeight):
        mine, its = getattr(old, field.name), getattr(new, field.name)
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor) and mine.shape == its.shape:
            mine.copy_(its)
        elif isinstance(mine, torch.Tensor) or isinstance(its, torch.Tensor) or mine != its:
            raise CheckpointError(f"{MISMATCH}, whose {field.name} differ; build a new engine")


def _order(tensor: QuantizedTensor) -> torch.Tensor | None:
    """The inputs sorted by their groups. None: they are."""
    groups = tensor.groups if isinstance(tensor, Int4Tensor) else None
    return None if groups is None else torch.argsort(groups, stable=True)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _groups(tensor: QuantizedTensor, order: torch.Tensor | None) -> torch.Tensor:
    """Each input's group, in order."""
    if isinstance(tensor, Int4Tensor) and tensor.groups is not None:
        assert order is not None
        return tensor.groups[order]
    size = tensor.group_size
    if isinstance(tensor, GGUFTensor):
        size = 16 if tensor.kind == "Q6_K" else 32
    return torch.arange(tensor.shape[1]) // size


def _is_of(groups: torch.Tensor, size: int) -> bool:
    """Says if every `size` inputs, from the first on, belong to one group."""
    filled = torch.cat((groups, groups[-1:].expand(-len(groups) % size))).view(-1, size)
    return bool((filled == filled[:, :1]).all())


def _pack(
    tensors: Sequence[QuantizedTensor],
    order: torch.Tensor | None,
    has_minima: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> GpuWeight:
    """has_minima: there are minima even if the tensors need none."""
    outs, inputs = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    of_inputs = [_groups(tensor, order) for tensor in tensors]
    group = next((size for size in GROUPS if all(_is_of(groups, size) for groups in of_inputs)), 0)
    if not group:
        raise CheckpointError(
            f"a matrix of shape {[outs, inputs]} in fewer bits has groups that are not multiples of 16 "
            "inputs on this rank, for which there is no matmul on a GPU; name a dtype, to which its weights "
            "are unpacked, or lower tensor_parallel_size"
        )
    e2m1 = isinstance(tensors[0], E2M1)
    assert all(isinstance(tensor, E2M1) == e2m1 for tensor in tensors)
    bits = 4 if e2m1 or (group >= 32 and all(_has_4_bits(tensor) for tensor in tensors)) else 8
    columns = 256 // bits  # per step
    tiles, steps = cdiv(outs, FILLED) * FILLED // TILE, cdiv(inputs, columns)
    num_groups = cdiv(inputs, group) if group >= columns else steps * (columns // group)
    at = torch.arange(num_groups).mul(group).clamp(max=inputs - 1)  # the first input of each

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    has_minima = has_minima or any(_has_minima(tensor, bits) for tensor in tensors)
    words, scales = empty(tiles, steps, 32, 4), empty(tiles, num_groups, 8)
    minima = empty(tiles, num_groups, 8) if has_minima else None
    on_device = None if order is None else order.to(device)
    chunk = max(1, CHUNK // (TILE * steps * columns))
    for first in range(0, tiles, chunk):
        count = min(chunk, tiles - first)
        quants = torch.zeros((count * TILE, steps * columns), dtype=torch.uint8, device=device)
        numbers = torch.zeros((2, count * TILE, num_groups), dtype=torch.float32, device=device)
        start = 0
        for tensor, groups in zip(tensors, of_inputs):
            # the rows of the tensor that belong to these tiles
            begin, end = (min(max((first + n) * TILE - start, 0), tensor.shape[0]) for n in (0, count))
            if begin < end:
                rows = slice(start + begin - first * TILE, start + end - first * TILE)
                found, *of_groups = _numbers(tensor.rows(begin, end), bits, has_minima, device, dtype)
                quants[rows, :inputs] = found if on_device is None else found[:, on_device]
                numbers[:, rows] = torch.stack(of_groups)[:, :, groups[at].to(device)]
            start += tensor.shape[0]
        tiled = slice(first, first + count)
        words[tiled] = (_words_of_4 if bits == 4 else _words_of_8)(quants)
        # [scales and minima, tile, h, g, group]
        numbers = numbers.view(2, count, 2, 8, num_groups)
        numbers[0] *= 2.0 ** ((E2M1_SHIFT if e2m1 else QUANT_SHIFT)[dtype] - SMALLER[dtype])
        numbers[1] *= 2.0 ** -SMALLER[dtype]
        if bits == 4 and not e2m1:
            numbers[0, :, 1] /= 16  # Quants of outputs g + 8 are read where they are, 4 bits higher.
        halves = numbers.to(dtype)
        if not halves.isfinite().all():
            raise CheckpointError(
                f"a matrix of shape {[outs, inputs]} in fewer bits has scales that matmuls in {dtype} do "
                "not hold; name a dtype, to which its weights are unpacked"
            )
        for target, of_groups in zip((scales, minima), halves):
            if target is not None:
                target[tiled] = of_groups.permute(0, 3, 2, 1).contiguous().view(torch.int32).squeeze(3)
    return GpuWeight((outs, inputs), dtype, bits, e2m1, group, words, scales, minima, on_device)


def _has_4_bits(tensor: QuantizedTensor) -> bool:
    return tensor.kind in FOUR_BITS if isinstance(tensor, GGUFTensor) else True


def _has_minima(tensor: QuantizedTensor, bits: int) -> bool:
    if isinstance(tensor, Int4Tensor):
        return bits == 8 or bool((tensor.zeros != 8).any())
    return isinstance(tensor, GGUFTensor) and tensor.kind in ("Q4_1", "Q4_K", "Q5_1", "Q5_K")


def _numbers(
    tensor: QuantizedTensor, bits: int, has_minima: bool, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quants from 0 on, uint8 [O, I], or e2m1 bits; scales and minima, float32 [O, groups]. Without minima,
    the quant that stands for 0 is the one that the kernel takes for it. Else it is so small that the minimum,
    which is rounded, is small too."""
    zero = 1 << (bits - 1)
    if isinstance(tensor, Int4Tensor):
        quants, scales = replace(tensor, quants=tensor.quants.to(device)).unpacked(), tensor.scales.to(device)
        if not has_minima:
            return quants, scales, scales
        return quants, scales, -tensor.zeros.to(device).float() * _rounded(scales, dtype)
    if isinstance(tensor, Mxfp4Tensor):
        quants = replace(tensor, quants=tensor.quants.to(device)).unpacked()
        exponents = tensor.scales.to(device).int() - BIAS
        scales = torch.ldexp(torch.ones_like(exponents).float(), exponents)
        return quants, scales, scales
    if isinstance(tensor, Nvfp4Tensor):
        scales = tensor.scales.to(device)
        return replace(tensor, quants=tensor.quants.to(device)).unpacked(), scales, scales
    assert isinstance(tensor, GGUFTensor)
    signed, scales, minima = tensor.numbers(device)
    if minima is not None:
        return signed.view(torch.uint8), scales, minima
    return signed.view(torch.uint8) + zero, scales, -zero * _rounded(scales, dtype)


def _rounded(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they will be, so that a weight of 0 is 0."""
    return scales.to(dtype).float()


def _words_of_4(quants: torch.Tensor) -> torch.Tensor:
    """[O, I] to words [tiles, steps, 32, 4]."""
    tiles, steps = quants.shape[0] // TILE, quants.shape[1] // 64
    of = quants.int().view(tiles, 2, 8, steps, 4, 2, 4, 2)  # tile, h, g, step, 16 inputs, u, c, e
    words = torch.zeros((tiles, 8, steps, 4, 4), dtype=torch.int32, device=quants.device)
    for u in range(2):
        for h in range(2):
            for e in range(2):
                words |= of[:, h, :, :, :, u, :, e] << (8 * u + 4 * h + 16 * e)
    return words.permute(0, 2, 1, 4, 3).reshape(tiles, steps, 32, 4)


def _words_of_8(quants: torch.Tensor) -> torch.Tensor:
    tiles, steps = quants.shape[0] // TILE, quants.shape[1] // 32
    of = quants.int().view(tiles, 2, 8, steps, 4, 4, 2)  # tile, h, g, step, 16 inputs and u, c, e
    words = torch.zeros((tiles, 8, steps, 4, 4), dtype=torch.int32, device=quants.device)
    for h in range(2):
        for e in range(2):
            words |= of[:, h, :, :, :, :, e] << (8 * h + 16 * e)
    return words.permute(0, 2, 1, 4, 3).reshape(tiles, steps, 32, 4)
