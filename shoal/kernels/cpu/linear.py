"""Linear layers on GGUF weights that stay quantized.

They are packed once, at load, for the C kernel, with 4 or 8 bits in groups of 32 columns. Q4_0, Q4_1 and Q8_0
keep every bit. Q4_K keeps its quants, and its scales are rounded to fp16. Other kinds become 8 bits. The
kernel rounds activations to 16 bits, group by group. Without the C library there is torch's int4 matmul, or
a plain matrix.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.cpu.build import Packed
from shoal.kernels.quant.ggml_types import FOUR_BITS, GROUPS
from shoal.kernels.quant.gguf_tensor import GGUFTensor

SCALE_GROUP = 32
CHUNK = 1 << 22  # As many weights are converted at a time: 16 MiB of float32.
LIBRARY = cpu_build.load()


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A matrix of weights, [outs, cols], in the C kernel's layout."""

    header: Packed
    address: int  # the header's address
    data: torch.Tensor  # the memory that the header points to
    library: ctypes.CDLL

    def linear(self, x_TD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias, [T, outs], in x's dtype, computed in float32."""
        x = x_TD if x_TD.dtype == torch.float32 and x_TD.is_contiguous() else x_TD.float().contiguous()
        bias = bias_O if bias_O is None or bias_O.dtype == torch.float32 else bias_O.float()
        tokens, cols = x.shape
        assert cols == self.header.cols
        out_TO = torch.empty((tokens, self.header.outs), dtype=torch.float32)
        if self.library.shoal_linear(
            self.address, x.data_ptr(), tokens, None if bias is None else bias.data_ptr(), out_TO.data_ptr()
        ):
            raise MemoryError(f"no memory for the activations of {tokens} tokens")
        return out_TO if x_TD.dtype == torch.float32 else out_TO.to(x_TD.dtype)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """The rows `ids_T`, dequantized: float32 [T, cols]. The weight must be made of one tensor."""
        ids = (
            ids_T
            if ids_T.dtype == torch.int32 and ids_T.is_contiguous()
            else ids_T.to(torch.int32).contiguous()
        )
        out_TD = torch.empty((ids.shape[0], self.header.cols), dtype=torch.float32)
        self.library.shoal_embed(self.address, ids.data_ptr(), ids.shape[0], out_TD.data_ptr())
        return out_TD

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.data}


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A matrix of weights for PyTorch alone. It is packed for PyTorch's int4 matmul if there are scales, and
    is a plain matrix otherwise."""

    source: GGUFTensor
    data: torch.Tensor
    scales_and_zeros: torch.Tensor | None = None

    def linear(self, x_TD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        if self.scales_and_zeros is None:
            out_TO = F.linear(x_TD.to(self.data.dtype), self.data)
        else:  # With float32 activations this matmul would be many times slower.
            out_TO = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x_TD.bfloat16(), self.data, SCALE_GROUP, self.scales_and_zeros
            )
        out_TO = out_TO.to(x_TD.dtype)
        return out_TO if bias_O is None else out_TO + bias_O

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.source.take_rows(ids_T).dequantize()

    def tensors(self) -> dict[str, torch.Tensor]:
        scales = {} if self.scales_and_zeros is None else {"scales": self.scales_and_zeros}
        return {"packed": self.data} | scales


def pack(
    tensors: Sequence[GGUFTensor], replaced: CpuWeight | TorchWeight | None = None
) -> CpuWeight | TorchWeight:
    """Makes one weight of all the tensors' rows, in order. If one tensor needs 8 bits, all get them. The
    memory of the weight `replaced` is used again if it fits, so that a new checkpoint has the addresses
    of the old one."""
    bits = 4 if all(t.kind in FOUR_BITS for t in tensors) else 8
    outs, cols = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    assert all(t.shape[1] == cols for t in tensors) and cols % SCALE_GROUP == 0
    if LIBRARY is None:
        return _pack_for_torch(tensors, bits, outs, cols)
    if isinstance(replaced, CpuWeight) and (
        replaced.header.outs,
        replaced.header.cols,
        replaced.header.bits,
    ) == (outs, cols, bits):
        data, header = replaced.data, replaced.header
    else:
        data = _zeros(LIBRARY.shoal_packed_bytes(outs, cols, bits))
        header = Packed(data.data_ptr(), outs, cols, bits)
    row = 0
    for tensor in tensors:
        for blocks, has_minimum in _ggml_blocks(tensor, bits):
            assert blocks.strides[1] == 1
            LIBRARY.shoal_pack(
                ctypes.addressof(header), blocks.ctypes.data, blocks.strides[0], len(blocks), row, has_minimum
            )
            row += len(blocks)
    return CpuWeight(header, ctypes.addressof(header), data, LIBRARY)


def _zeros(num_bytes: int) -> torch.Tensor:
    """Returns zeroed bytes. They are on huge pages where the system has them, because a large matrix is read
    faster so."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # The system's kernel may be built without them.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _ggml_blocks(tensor: GGUFTensor, bits: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields the rows, some at a time, as blocks of Q4_0, Q4_1 or Q8_0, [rows, bytes of a row], and whether
    their groups have a minimum."""
    native = tensor.kind == "Q8_0" if bits == 8 else tensor.kind in ("Q4_0", "Q4_1")
    if native and tensor.order is None:
        yield tensor.data, tensor.kind == "Q4_1"
        return
    step = max(1, CHUNK // tensor.shape[1])
    for start in range(0, tensor.shape[0], step):
        rows = tensor.rows(start, min(start + step, tensor.shape[0]))
        if native:
            yield _moved(rows.data, tensor), tensor.kind == "Q4_1"
        elif bits == 4:
            yield _moved(_q4_1_of_q4_k(rows.data), tensor), True
        else:
            yield _q8_0_of(rows.dequantize()), False


def _moved(blocks: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    """Returns the blocks of each row in the order of the tensor's columns."""
    if tensor.order is None:
        return blocks
    num_bytes = GROUPS["Q4_1" if tensor.kind == "Q4_K" else tensor.kind][1]
    return blocks.reshape(len(blocks), -1, num_bytes)[:, tensor.order].reshape(len(blocks), -1)


def _q8_0_of(weights: torch.Tensor) -> np.ndarray:
    """Rounds float32 rows to Q8_0. Each group of 32 has an fp16 scale, its largest magnitude / 127."""
    groups = weights.view(len(weights), -1, SCALE_GROUP)
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 127).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    quants = (groups * inverse).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), quants.view(torch.uint8)), dim=-1).flatten(1).numpy()


def _q4_1_of_q4_k(data: np.ndarray) -> np.ndarray:
    """Converts Q4_K rows to Q4_1. Eight groups of Q4_K share two fp16 numbers, and their scales and minima
    are 6-bit multiples of these. The matmuls are rounded to fp16."""
    blocks = np.ascontiguousarray(data).reshape(-1, 144)
    factors = blocks[:, :4].view(np.float16).astype(np.float32)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = factors[:, :1] * np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1)
    minima = factors[:, 1:] * np.concatenate((middle & 63, (high >> 4) | ((middle >> 2) & 48)), axis=1)
    pairs = blocks[:, 16:].reshape(-1, 4, 32)
    quants = np.stack((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 32)
    nibbles = quants[..., :16] | (quants[..., 16:] << 4)
    heads = np.stack((scales, -minima), axis=-1).astype(np.float16).view(np.uint8)
    return np.concatenate((heads, nibbles), axis=-1).reshape(len(data), -1)


def _pack_for_torch(tensors: Sequence[GGUFTensor], bits: int, outs: int, cols: int) -> TorchWeight:
    # torch's int8 matmul has no groups, and its int4 matmul needs multiples of sixteen rows.
    if bits == 8 or outs % 16:
        dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        return TorchWeight(tensors[0], torch.cat([t.dequantize().to(dtype) for t in tensors]))
    quants, scales, zeros = zip(
        *(
            _int4_groups(blocks, has_minimum, cols)
            for t in tensors
            for blocks, has_minimum in _ggml_blocks(t, 4)
        )
    )
    data = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.cat(quants), 1)
    return TorchWeight(
        tensors[0],
        data,
        torch.stack((torch.cat(scales).T, torch.cat(zeros).T), dim=-1).bfloat16().contiguous(),
    )


def _int4_groups(
    blocks: np.ndarray, has_minimum: bool, cols: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the quants, int32 [rows, cols], and the scales and zeros, [rows, groups], of Q4_0 or Q4_1 rows.
    A weight is (quant - 8) * scale + zero."""
    groups = torch.from_numpy(blocks.reshape(len(blocks), cols // SCALE_GROUP, -1).copy())
    scales = groups[..., 0:2].contiguous().view(torch.float16).squeeze(-1).float()
    zeros = (
        groups[..., 2:4].contiguous().view(torch.float16).squeeze(-1).float() + 8 * scales
        if has_minimum
        else torch.zeros_like(scales)
    )
    packed = groups[..., 4 if has_minimum else 2 :]
    return torch.cat((packed & 15, packed >> 4), dim=-1).reshape(len(blocks), cols).int(), scales, zeros
