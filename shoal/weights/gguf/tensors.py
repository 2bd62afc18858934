"""The tensors of a GGUF file under their Hugging Face names, as views of the memory-mapped file. The header
is header.py's.

Experts are stacked in the file; here they come one by one, and so do q, k and v if the file holds them as one
matrix. Files of some architectures hold the rows of q and k in the order of interleaved rotary pairs; here
they are put back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kernels.quant.gguf_tensor import GGUFTensor
from shoal.kernels.quant.mxfp4_tensor import Mxfp4Tensor
from shoal.model_config import ModelConfig
from shoal.models.architecture import GGUFNames
from shoal.models.checkpoint_names import Part, split
from shoal.models.config_gguf import LAYER_TENSOR
from shoal.models.registry import BY_GGUF
from shoal.models.registry import BY_NAME as ARCHITECTURES
from shoal.weights.gguf.header import ROPE_TENSORS, GGUFHeader, TensorInfo
from shoal.weights.gguf.latents import joined, suffix_of, whole_name, whole_shape
from shoal.weights.gguf.recurrent import Restored, by_key_heads, restored, take_rows
from shoal.weights.safetensors import Naming

# names that all architectures share; each adds its own (models/architecture.py)
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # older files of LFM2
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
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
    # as llama.cpp's converter fuses them if asked
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    # tensors that only layers which draft have; they are left out
    **{f"nextn.{part}": part for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
FUSED = re.compile(r"model\.layers\.([0-9]{1,9})\.self_attn\.qkv_proj\.(weight|bias)")
Matrix = torch.Tensor | GGUFTensor | Mxfp4Tensor  # or a vector
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}  # numpy has no bfloat16: its bits


class Found(NamedTuple):
    """A tensor under its checkpoint name. `read` makes it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Matrix]


def every_name(name: str) -> str:
    """The Naming that takes all tensors under their checkpoint names."""
    return name


def gguf_tensors(
    header: GGUFHeader, config: ModelConfig, naming: Naming = every_name
) -> Iterator[tuple[str, Matrix]]:
    """Each tensor under the name that `naming` makes of its checkpoint name. Raises CheckpointError for a
    tensor that this engine has no place for."""
    for found in _found(header, config, naming):
        yield found.name, found.read()


def gguf_shapes(
    header: GGUFHeader, config: ModelConfig, naming: Naming = every_name
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that `naming` takes, from the header alone. Raises CheckpointError for a
    tensor that this engine has no place for."""
    return {found.name: found.shape for found in _found(header, config, naming)}


def stored_tensors(header: GGUFHeader) -> Iterator[tuple[str, TensorInfo]]:
    """Yields the file's tensors with their checkpoint names, in which {} is the number of an expert. Raises
    CheckpointError for a tensor that this engine has no place for."""
    names = _names(header)
    for info in header.tensors.values():
        if info.name not in ROPE_TENSORS:  # they are part of the config
            yield _hugging_face_name(info.name, names, header), info


def _found(header: GGUFHeader, config: ModelConfig, naming: Naming) -> Iterator[Found]:
    data = np.memmap(header.path, dtype=np.uint8, mode="c")  # copy on write: torch wants writable memory
    num_experts = 0 if config.experts is None else config.experts.num_experts
    latents: dict[str, dict[str, TensorInfo]] = {}
    for stored, info in stored_tensors(header):
        name = naming(stored)
        if name is None:
            continue
        if (whole := whole_name(name)) is not None:
            _check_stack(name, info, header)
            latents.setdefault(whole, {})[suffix_of(name)] = info
            if len(latents[whole]) == 2:
                yield _joined(whole, latents.pop(whole), data, header)
        elif "{}" in name:
            _check_stack(name, info, header, num_experts)
            for expert, matrix in enumerate(_stacked(info)):
                _check_matrix(matrix, header)
                for own, part in _gate_and_up(name.format(expert), matrix, header):
                    yield Found(own, part.shape, partial(_view, data, part, header))
        else:
            for own, part in _query_key_value(name, info, header, config):
                yield from _parts(own, part, data, header, config)


def _joined(name: str, parts: dict[str, TensorInfo], data: np.ndarray, header: GGUFHeader) -> Found:
    """The one matrix of those that make keys and values from latents."""

    def read() -> torch.Tensor:
        return joined(
            {key: [_view(data, own, header) for own in _stacked(part)] for key, part in parts.items()}
        )

    return Found(name, whole_shape({key: part.shape for key, part in parts.items()}), read)


def _parts(
    name: str, info: TensorInfo, data: np.ndarray, header: GGUFHeader, config: ModelConfig
) -> Iterator[Found]:
    """The decoder's tensors that one of the file holds, each as a checkpoint has it."""
    names, shape = _names(header), info.shape
    whole = restored(name, shape)
    if name.endswith(names.raised):
        whole = Restored(shape, lambda stored: stored.float() - 1)
    _check_matrix(info, header)
    if whole is not None:
        if info.kind not in PLAIN:
            raise CheckpointError(
                f"{header.path}: the tensor {info.name} must be {', '.join(PLAIN)}, got {info.kind}; convert "
                "the model again"
            )
        shape = whole.shape

    def read() -> Matrix:
        tensor = _view(data, info, header)
        if whole is not None:
            return cast(Matrix, whole.restore(tensor))
        if names.interleaved and (".q_proj." in name or ".k_proj." in name):
            attention = config.attention
            num_heads = attention.num_heads if ".q_proj." in name else attention.num_kv_heads
            return _restore_rows(tensor, num_heads, attention.head_dim, info, header)
        return tensor

    for part in split(name, shape, ARCHITECTURES[config.architecture].tensors, config):
        moved = by_key_heads(part.name, config) if names.moves_value_heads else None

        def read_part(part: Part = part, moved: Callable[[Matrix], Matrix] | None = moved) -> Matrix:
            own = part.take(cast(torch.Tensor, read()))  # a GGUFTensor has slices of rows, too
            return own if moved is None else moved(own)

        yield Found(part.name, part.shape, read_part)


def _names(header: GGUFHeader) -> GGUFNames:
    names = BY_GGUF[header.metadata["general.architecture"]].gguf
    assert names is not None  # it is listed by it
    return names


def _hugging_face_name(name: str, names: GGUFNames, header: GGUFHeader) -> str:
    """The checkpoint's name of a tensor. The number of an expert is left open, as {}."""
    stem, _, parameter = name.rpartition(".")
    if stem in NAMES and parameter == "weight":
        return f"{NAMES[stem]}.weight"
    whole, layer = LAYER_TENSOR.fullmatch(name), LAYER_TENSOR.fullmatch(stem)
    if whole is not None and whole[2] in names.tensors:
        return f"model.layers.{whole[1]}.{names.tensors[whole[2]]}"
    in_layer = None if layer is None else names.tensors.get(layer[2], LAYER_NAMES.get(layer[2]))
    # A delta net's tensor of this name is another one.
    if (
        layer is not None
        and layer[2] == "attn_qkv"
        and f"blk.{layer[1]}.attn_output.weight" in header.tensors
    ):
        in_layer = LAYER_NAMES["attn_qkv"]
    if layer is None or in_layer is None or parameter not in ("weight", "bias"):
        raise CheckpointError(
            f"{header.path} holds the tensor {name}, which the architecture {names.architecture} does not "
            "have here"
        )
    return f"model.layers.{layer[1]}.{in_layer}.{parameter}"


def _check_stack(name: str, info: TensorInfo, header: GGUFHeader, count: int | None = None) -> None:
    """Raises CheckpointError unless the tensor is a stack of matrices, or of their biases, of `count` experts
    or of any number of heads."""
    dims = 2 if name.endswith(".bias") else 3
    if len(info.shape) != dims or count not in (None, info.shape[0]):
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} has shape {list(info.shape)} instead of "
            + ("three numbers" if count is None else f"[experts, out, in] for {count} experts")
        )


def _stacked(info: TensorInfo) -> Iterator[TensorInfo]:
    """The matrices or vectors of a stack, one by one."""
    size = info.num_bytes // info.shape[0]
    for i in range(info.shape[0]):
        yield TensorInfo(info.name, info.kind, info.shape[1:], info.offset + i * size, size)


def _gate_and_up(name: str, matrix: TensorInfo, header: GGUFHeader) -> Iterator[tuple[str, TensorInfo]]:
    """An expert's matrix, or the two that it holds, gate above up."""
    if ".gate_up_proj." not in name:
        yield name, matrix
        return
    rows = matrix.shape[0]
    if rows % 2:
        raise CheckpointError(
            f"{header.path}: the tensor {matrix.name} must have an even number of rows, got {rows}"
        )
    for part, own in zip(("gate", "up"), _by_rows(matrix, (rows // 2, rows // 2))):
        yield name.replace("gate_up", part), own


def _query_key_value(
    name: str, info: TensorInfo, header: GGUFHeader, config: ModelConfig
) -> Iterator[tuple[str, TensorInfo]]:
    """A tensor, or the three that it holds, the rows of q above the rows of k and v. Rows beyond k's and v's
    are q's, as a layer may have a gate among them."""
    fused = FUSED.fullmatch(name)
    if fused is None or int(fused[1]) >= len(config.layers):  # a layer that drafts is left out
        yield name, info
        return
    attention = config.layers[int(fused[1])].attention
    num_rows = 0 if attention is None else attention.num_kv_heads * attention.head_dim
    own = info.shape[0] - 2 * num_rows
    if attention is None or own <= 0 or own % (attention.num_heads * attention.head_dim):
        raise CheckpointError(
            f"{header.path}: the tensor {info.name} has shape {list(info.shape)}, which does not hold q, k "
            "and v of the layer's heads; fetch the file again"
        )
    for part, rows in zip("qkv", _by_rows(info, (own, num_rows, num_rows))):
        yield name.replace("qkv_proj", f"{part}_proj"), rows


def _by_rows(info: TensorInfo, counts: Sequence[int]) -> Iterator[TensorInfo]:
    """Yields consecutive parts of a tensor with these counts of rows."""
    offset = info.offset
    for count in counts:
        num_bytes = info.num_bytes // info.shape[0] * count
        yield TensorInfo(info.name, info.kind, (count, *info.shape[1:]), offset, num_bytes)
        offset += num_bytes


def _check_matrix(info: TensorInfo, header: GGUFHeader) -> None:
    if info.kind not in PLAIN and len(info.shape) != 2:
        raise CheckpointError(
            f"{header.path}: the {info.kind} tensor {info.name} has shape {list(info.shape)} instead of "
            "[out, in]"
        )


def _view(data: np.ndarray, info: TensorInfo, header: GGUFHeader) -> Matrix:
    raw = data[info.offset : info.offset + info.num_bytes]
    if info.kind in PLAIN:
        tensor = torch.from_numpy(raw.view(PLAIN[info.kind])).view(info.shape)
        return tensor.view(torch.bfloat16) if info.kind == "BF16" else tensor
    _check_matrix(info, header)
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
    return cast(Matrix, take_rows(tensor, order))
