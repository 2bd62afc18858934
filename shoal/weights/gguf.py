"""The tensors of a GGUF file under their Hugging Face names, as views of the memory-mapped file. The header
is gguf_header.py's.

Experts are stacked in the file; here they come one by one. Files of some architectures hold the rows of q and
k in the order of interleaved rotary pairs; here they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.model_config import ModelConfig
from shoal.models.architecture import GGUFNames
from shoal.models.checkpoint_names import split
from shoal.models.registry import BY_GGUF
from shoal.models.registry import BY_NAME as ARCHITECTURES
from shoal.weights.gguf_header import ROPE_TENSORS, GGUFHeader, TensorInfo
from shoal.weights.gguf_latents import joined, suffix_of, whole_name, whole_shape

# names that all architectures share; each adds its own (models/architecture.py)
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.([0-9]{1,9})\.([\w.]+)")
Matrix = torch.Tensor | GGUFTensor | Mxfp4Tensor  # or a vector
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}  # numpy has no bfloat16: its bits


def gguf_tensors(header: GGUFHeader, config: ModelConfig) -> Iterator[tuple[str, Matrix]]:
    """Each tensor under its checkpoint name. Raises CheckpointError for a tensor that this engine has no
    place for."""
    data = np.memmap(header.path, dtype=np.uint8, mode="c")  # copy on write: torch wants writable memory
    names, stored = _names(header), ARCHITECTURES[config.architecture].tensors
    latents: dict[str, dict[str, list[Matrix]]] = {}
    for info in header.tensors.values():
        if info.name in ROPE_TENSORS:  # it is part of the config
            continue
        name = _hugging_face_name(info.name, names, header)
        if (whole := whole_name(name)) is not None:
            heads = [_view(data, matrix, header) for matrix in _experts(name, info, header)]
            latents.setdefault(whole, {})[suffix_of(name)] = heads
            if len(latents[whole]) == 2:
                yield whole, joined(latents.pop(whole))
            continue
        if "{}" in name:
            for expert, matrix in enumerate(_experts(name, info, header)):
                yield name.format(expert), _view(data, matrix, header)
            continue
        tensor = _view(data, info, header)
        if names.interleaved and (".q_proj." in name or ".k_proj." in name):
            attention = config.attention
            num_heads = attention.num_heads if ".q_proj." in name else attention.num_kv_heads
            tensor = _restore_rows(tensor, num_heads, attention.head_dim, info, header)
        for part in split(name, tuple(tensor.shape), stored, config):
            yield part.name, part.take(cast(torch.Tensor, tensor))  # a GGUFTensor has slices of rows, too


def gguf_shapes(header: GGUFHeader, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, from the header alone. Raises CheckpointError for a tensor that this engine
    has no place for."""
    names, num_experts = _names(header), 0 if config.experts is None else config.experts.num_experts
    stored = ARCHITECTURES[config.architecture].tensors
    shapes: dict[str, tuple[int, ...]] = {}
    latents: dict[str, dict[str, tuple[int, ...]]] = {}
    for info in header.tensors.values():
        if info.name in ROPE_TENSORS:
            continue
        name, shape = _hugging_face_name(info.name, names, header), info.shape
        if (whole := whole_name(name)) is not None:
            if len(shape) != _stacked_dims(name):
                raise CheckpointError(
                    f"{header.path}: the tensor {info.name} has shape {list(shape)} instead of three numbers"
                )
            latents.setdefault(whole, {})[suffix_of(name)] = shape
            if len(latents[whole]) == 2:
                shapes[whole] = whole_shape(latents[whole])
            continue
        if "{}" in name:
            if len(shape) != _stacked_dims(name) or shape[0] != num_experts:
                raise CheckpointError(
                    f"{header.path}: the tensor {info.name} has shape {list(shape)} "
                    f"instead of [experts, out, in] for {num_experts} experts"
                )
            shape = shape[1:]
        if info.kind not in PLAIN and len(shape) != 2:
            raise CheckpointError(
                f"{header.path}: the {info.kind} tensor {info.name} has shape "
                f"{list(info.shape)} instead of [out, in]"
            )
        for expert in range(num_experts if "{}" in name else 1):
            for part in split(name.format(expert), shape, stored, config):
                shapes[part.name] = part.shape
    return shapes


def _names(header: GGUFHeader) -> GGUFNames:
    names = BY_GGUF[header.metadata["general.architecture"]].gguf
    assert names is not None  # it is listed by it
    return names


def _hugging_face_name(name: str, names: GGUFNames, header: GGUFHeader) -> str:
    """The checkpoint's name of a tensor. The number of an expert is left open, as {}."""
    stem, _, parameter = name.rpartition(".")
    if stem in NAMES and parameter == "weight":
        return f"{NAMES[stem]}.weight"
    layer = LAYER_TENSOR.fullmatch(stem)
    if layer is not None and f"{layer[2]}.{parameter}" in names.tensors:
        return f"model.layers.{layer[1]}.{names.tensors[f'{layer[2]}.{parameter}']}"
    in_layer = None if layer is None else names.tensors.get(layer[2], LAYER_NAMES.get(layer[2]))
    if layer is None or in_layer is None or parameter not in ("weight", "bias"):
        raise CheckpointError(
            f"{header.path} holds the tensor {name}, which the architecture {names.architecture} does not "
            "have here"
        )
    return f"model.layers.{layer[1]}.{in_layer}.{parameter}"


def _stacked_dims(name: str) -> int:
    """The dimensions of a stack of experts' matrices, or of their biases."""
    return 2 if name.endswith(".bias") else 3


def _experts(name: str, info: TensorInfo, header: GGUFHeader) -> Iterator[TensorInfo]:
    """The matrices of a stack of experts, [E, out, in], or their biases, [E, out], one by one."""
    if len(info.shape) != _stacked_dims(name):
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} has shape {list(info.shape)} instead of [experts, out, "
            "in]"
        )
    size = info.num_bytes // info.shape[0]
    for expert in range(info.shape[0]):
        yield TensorInfo(info.name, info.kind, info.shape[1:], info.offset + expert * size, size)


def _view(data: np.ndarray, info: TensorInfo, header: GGUFHeader) -> Matrix:
    raw = data[info.offset : info.offset + info.num_bytes]
    if info.kind in PLAIN:
        tensor = torch.from_numpy(raw.view(PLAIN[info.kind])).view(info.shape)
        return tensor.view(torch.bfloat16) if info.kind == "BF16" else tensor
    if len(info.shape) != 2:
        raise CheckpointError(
            f"{header.path}: the {info.kind} tensor {info.name} has shape {list(info.shape)} instead of "
            "[out, in]"
        )
    rows, columns = info.shape
    if info.kind == "MXFP4":  # a copy, in the order that other files have
        return Mxfp4Tensor.of_ggml(torch.from_numpy(raw.reshape(rows, -1)))
    return GGUFTensor(info.kind, (rows, columns), raw.reshape(rows, -1))


def _restore_rows(
    tensor: Matrix, num_heads: int, head_dim: int, info: TensorInfo, header: GGUFHeader
) -> Matrix:
    """Puts back the rows of q or k. llama.cpp's converter interleaves the two halves of each head's rows: 0,
    N/2, 1, N/2 + 1, ... A row moves as a whole, so that packed rows can be moved too."""
    if info.shape[0] != num_heads * head_dim:
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} has shape {list(info.shape)}, but {num_heads} heads of "
            f"{head_dim} ask for {num_heads * head_dim} rows"
        )
    order = np.arange(info.shape[0]).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).ravel()
    if isinstance(tensor, GGUFTensor):
        return tensor.take_rows(order)
    index = torch.from_numpy(order)
    return tensor.take_rows(index) if isinstance(tensor, Mxfp4Tensor) else tensor[index]
