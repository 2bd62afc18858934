"""PackedWeight: a format of weights in fewer bits, and the packing of what a checkpoint holds in fewer bits.

A QuantizedTensor knows how to be cut and what it means; `PACKED_BY` names the modules that make such tensors
ready to multiply on a kind of device. A new quantization is files with these, and a line there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch

from shoal.errors import CheckpointError
from shoal.kernels.ops import Ops
from shoal.kernels.quant.fp8_tensor import Fp8Rows, Fp8Tensor
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.int4_tensor import Int4Tensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.kernels.quant.nvfp4_tensor import Nvfp4Tensor
from shoal.kernels.quant.quantized_tensor import QuantizedTensor
from shoal.layers.weight_format import WeightFormat

# The type of a quantized tensor -> for each kind of device, the module whose `pack` makes a PackedMatrix of
# such tensors. It is imported when the first one comes, because it may compile a library.
PACKED_BY: dict[type[QuantizedTensor], dict[str, str]] = {
    GGUFTensor: {"cpu": "shoal.kernels.cpu.linear", "cuda": "shoal.kernels.matmul.gpu_weight"},
    Int4Tensor: {"cpu": "shoal.kernels.cpu.int4", "cuda": "shoal.kernels.matmul.gpu_weight"},
    Mxfp4Tensor: {"cpu": "shoal.kernels.cpu.mxfp4", "cuda": "shoal.kernels.matmul.gpu_weight"},
    Nvfp4Tensor: {"cpu": "shoal.kernels.cpu.nvfp4", "cuda": "shoal.kernels.matmul.gpu_weight"},
    Fp8Tensor: {"cpu": "shoal.kernels.cpu.fp8", "cuda": "shoal.kernels.matmul.gpu_fp8"},
}
# The same for matrices of all experts, gate and up of each before the next one's. Such a module has
# `has_kernels`, too; where that says no of one of a layer's two, both are packed as others are.
EXPERTS_PACKED_BY: dict[type[QuantizedTensor], dict[str, str]] = {
    Mxfp4Tensor: {"cuda": "shoal.kernels.matmul.mxfp4_experts"}
}
EXPERT_ROWS = 16  # Outputs per tile in memory (gpu_weight.py). A tile belongs to one expert.
# The input of a matmul. In fp8 it is where its reader asked for that (`WeightFormat.fp8_group`).
Rows = torch.Tensor | Fp8Rows


class PackedMatrix(Protocol):
    """A matrix that is multiplied without being unpacked first."""

    def linear(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, O], in x's dtype."""

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, [T, I] float32. The matrix must be made of one tensor."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The memory of the matrix."""


@runtime_checkable
class WritableMatrix(PackedMatrix, Protocol):
    """A packed matrix that takes new rows. Plain tensors that become fp8 while they are loaded need it, as
    some of them may come without the others."""

    def write(self, row: int, tensor: QuantizedTensor) -> None:
        """Replaces the rows from `row` on."""


@runtime_checkable
class FusedMatrix(PackedMatrix, Protocol):
    """A packed matrix whose kernels also do what comes before and after a matmul."""

    def add(
        self, x_TI: Rows, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None: ...

    def gated(
        self, x_TI: Rows, bias_2F: torch.Tensor | None, group: int | None = None, activation: str = "silu"
    ) -> torch.Tensor | Fp8Rows:
        """`group`: what the next matmul's `fp8_group` says."""

    def normed(
        self, x_TI: torch.Tensor | None, residual_TI: torch.Tensor, norm_weight_I: torch.Tensor, eps: float
    ) -> torch.Tensor | Fp8Rows:
        """The norm of residual + x, which is then the residual, as this matrix wants its input."""

    def of_norm(
        self,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor | None:
        """The matmul of the residual's norm, gated or not, where one kernel makes both. None: none does."""

    def fp8_group(self, num_rows: int) -> int | None: ...


class PackedWeight(WeightFormat):
    """Weights of fewer bits. The sum with the residual is left to the norm, whose kernel adds in passing."""

    def __init__(self, ops: Ops, packed: PackedMatrix) -> None:
        super().__init__(ops)
        self.packed = packed

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.packed.tensors()

    def matmul(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        return self.packed.linear(x_TI, bias_O)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.packed.embed(ids_T)

    def write(self, row: int, piece: QuantizedTensor) -> None:
        assert isinstance(self.packed, WritableMatrix)
        self.packed.write(row, piece)


class FusedWeight(PackedWeight):
    """Weights of fewer bits whose kernels norm, gate and add. Rows in fp8 go from one such weight to the
    next, and nobody between them looks at them: they pass as tensors."""

    packed: FusedMatrix

    def fp8_group(self, num_rows: int) -> int | None:
        return self.packed.fp8_group(num_rows)

    def add(
        self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, residual_TO: torch.Tensor
    ) -> torch.Tensor | None:
        return self.packed.add(x_TI, bias_O, residual_TO)

    def gated(
        self, x_TI: torch.Tensor, bias_2F: torch.Tensor | None, activation: str, reader: WeightFormat | None
    ) -> torch.Tensor:
        group = None if reader is None else reader.fp8_group(len(x_TI))
        return cast(torch.Tensor, self.packed.gated(x_TI, bias_2F, group, activation))

    def normed(
        self,
        x_TI: torch.Tensor | None,
        residual_TI: torch.Tensor,
        norm_weight_I: torch.Tensor,
        eps: float,
        bias_O: torch.Tensor | None,
        activation: str | None,
        reader: WeightFormat | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x_TI is None:
            product = self.packed.of_norm(residual_TI, norm_weight_I, eps, bias_O, activation)
            if product is not None:
                return product, residual_TI
        normed_TI = cast(torch.Tensor, self.packed.normed(x_TI, residual_TI, norm_weight_I, eps))
        if activation is None:
            return self.matmul(normed_TI, bias_O), residual_TI
        return self.gated(normed_TI, bias_O, activation, reader), residual_TI


def is_multiplied(tensor: QuantizedTensor, device: torch.device) -> bool:
    """Says if this kind of device has a matmul that takes such a tensor as it is."""
    return device.type in PACKED_BY[type(tensor)]


def check_stack(pieces: Iterable[QuantizedTensor]) -> None:
    """Raises CheckpointError for matrices of several experts that cannot be multiplied out of one matrix of
    all rows."""
    way_out = "name a dtype ('bfloat16') and no quantization, so that weights are unpacked while they load"
    for piece in pieces:
        if isinstance(piece, Int4Tensor) and piece.groups is not None:
            raise CheckpointError(
                f"no kernel here multiplies experts with act-order in 4 bits on a GPU; {way_out}, or use "
                "device='cpu'"
            )
        if not isinstance(piece, Fp8Tensor) and piece.shape[0] % EXPERT_ROWS:
            raise CheckpointError(
                f"experts have matrices of {piece.shape[0]} outputs on this rank, and in fewer bits a GPU "
                f"multiplies multiples of {EXPERT_ROWS}; {way_out}, or lower tensor_parallel_size"
            )


def have_expert_kernels(
    pieces: Sequence[QuantizedTensor], per_expert: int, device: torch.device, dtype: torch.dtype
) -> bool:
    """Says if kernels for experts take these matrices, of which an expert has `per_expert`."""
    module = EXPERTS_PACKED_BY.get(type(pieces[0]), {}).get(device.type)
    return module is not None and importlib.import_module(module).has_kernels(
        pieces, per_expert, device, dtype
    )


def pack(
    pieces: Sequence[QuantizedTensor],
    ops: Ops,
    replaced: WeightFormat,
    device: torch.device,
    dtype: torch.dtype,
    per_expert: int = 0,
) -> PackedWeight:
    """One matrix of all rows of the pieces, in order, for activations of this type. Where the format that it
    replaces fits, its memory is used again, so that new weights have the addresses of the old ones.
    `per_expert`: how many of the pieces are an expert's, for kernels of experts; 0: for others. Raises
    CheckpointError for pieces that do not fit the format that they replace."""
    old = replaced.packed if isinstance(replaced, PackedWeight) else None
    if per_expert:
        own = EXPERTS_PACKED_BY.get(type(pieces[0]))
        if own is None:
            formats = " or ".join(kind.__name__ for kind in EXPERTS_PACKED_BY)
            raise CheckpointError(
                f"new experts must be {formats}, as the engine's are, got {type(pieces[0]).__name__}; send "
                "such weights, or build a new engine"
            )
        module = importlib.import_module(own[device.type])
        return PackedWeight(ops, module.pack(pieces, old, per_expert, device))
    module = importlib.import_module(PACKED_BY[type(pieces[0])][device.type])
    where = () if device.type == "cpu" else (device, dtype)
    packed = cast(PackedMatrix, module.pack(pieces, old, *where))
    return FusedWeight(ops, packed) if isinstance(packed, FusedMatrix) else PackedWeight(ops, packed)
