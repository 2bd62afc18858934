"""GGUF files of the checkpoints in tests/tiny_families.py, written by the gguf package under the names that its
map has for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

IN_F32 = re.compile("_norm|ffn_gate_inp|ssm_conv1d|shortconv.conv")  # as llama.cpp has them
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj\.weight|w\d\.weight)")
# From a tensor's name, the tensor and the config to the tensors of the file that hold it, by name
Convert = Callable[[str, torch.Tensor, dict], dict[str, torch.Tensor]]


def write(
    path: Path,
    folder: Path,
    architecture: str,
    metadata: Callable[[gguf.GGUFWriter, dict], None],
    convert: Convert | None = None,
    kind: str | Callable[[str, torch.Tensor], str] = "F32",
    unpacked: bool = False,
    num_heads: int = 0,
) -> None:
    """Writes the file. `metadata` adds the keys that not all architectures share, `convert` is for tensors that
    the map has no name for. `kind`: the matrices' type, or a function from a tensor of the file to its type.
    `unpacked`: the values that these types have, in F32. `num_heads` blocks behind the last layer are draft
    heads."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    writer = gguf.GGUFWriter(path, architecture)
    length = ("max_position_embeddings", "model_max_length")
    writer.add_context_length(next(config[key] for key in length if key in config))
    writer.add_embedding_length(config["hidden_size"])
    num_blocks = config["num_hidden_layers"] + num_heads
    writer.add_block_count(num_blocks)
    if num_heads:
        writer.add_nextn_predict_layers(num_heads)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    eps = ("norm_eps", "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(config[key] for key in eps if key in config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token {i} \u00e9" for i in range(config["vocab_size"])])
    writer.add_token_scores([float(i) for i in range(config["vocab_size"])])
    writer.add_eos_token_id(5)
    metadata(writer, config)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    # newer architectures than the package's use Gemma 3's names
    number = numbers.get(architecture, gguf.MODEL_ARCH.GEMMA3)
    names = gguf.get_tensor_name_map(number, num_blocks)
    for name, tensor in stacked(text_tensors(folder)).items():
        for own, part in (convert(name, tensor, config) if convert else {name: tensor}).items():
            stored = own if own.startswith("blk.") else names.get_name(own, try_suffixes=(".weight", ".bias"))
            if stored is None and own.endswith("e_score_correction_bias"):
                stored = names.get_name(own.removesuffix("_bias"), try_suffixes=()) + ".bias"
            assert stored, own
            own_kind = kind if isinstance(kind, str) else kind(stored, part)
            if (
                part.dim() == 1
                or part.shape[-1] % 32
                or IN_F32.search(stored)
                or not stored.endswith(".weight")
            ):
                own_kind = "F32"
            number = gguf.GGMLQuantizationType[own_kind]
            data = packed(part.float().contiguous().numpy(), number)
            if unpacked:
                data, number = gguf.quants.dequantize(data, number), gguf.GGMLQuantizationType.F32
            writer.add_tensor(stored, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class FusingWriter(gguf.GGUFWriter):
    """Writes q, k and v of a layer that has all three as one tensor, as llama.cpp's converter does with
    --fuse-qkv. They must be of one type."""

    def write_header_to_file(self, path: Path | None = None) -> None:
        own = self.tensors[0]
        for name in [name for name in own if ".attn_q." in name]:
            parts = [name.replace(".attn_q.", f".attn_{part}.") for part in "qkv"]
            if all(part in own for part in parts):
                q, k, v = (own.pop(part) for part in parts)
                assert q.dtype == k.dtype == v.dtype
                rows = np.concatenate([part.tensor for part in (q, k, v)])
                fused = gguf.gguf_writer.TensorInfo(rows.shape, q.dtype, rows.nbytes, rows)
                own[name.replace(".attn_q.", ".attn_qkv.")] = self._in_numbers(fused)
        super().write_header_to_file(path)

    def _in_numbers(self, info: gguf.gguf_writer.TensorInfo) -> gguf.gguf_writer.TensorInfo:
        """The tensor with the shape of its numbers, which packed bytes are fewer than."""
        if info.tensor.dtype == np.uint8:
            info.shape = gguf.quant_shape_from_byte_shape(info.shape, info.dtype)
        return info


def like_q4_k_m(name: str, tensor: torch.Tensor) -> str:
    """A tensor's type as llama.cpp chooses it for Q4_K_M."""
    more = any(part in name for part in ("attn_v", "ffn_down", "token_embd", "output.weight"))
    if tensor.shape[-1] % 256:
        return "Q8_0" if more else "Q5_0"
    return "Q6_K" if more else "Q4_K"


def packed(values: np.ndarray, number: gguf.GGMLQuantizationType) -> np.ndarray:
    """The values in fewer bits. The package writes no K types."""
    write_groups = {"Q4_K": q4_k, "Q6_K": q6_k}.get(number.name)
    if write_groups is None:
        return gguf.quants.quantize(values, number)
    return write_groups(values.reshape(-1, 256)).reshape(*values.shape[:-1], -1)


def q4_k(groups: np.ndarray) -> np.ndarray:
    """Eight runs of 32 numbers q d s - e m, whose scales s and m have 6 bits each."""
    runs = groups.reshape(-1, 8, 32)
    least = np.maximum(-runs.min(axis=2), 0)
    scales = (runs.max(axis=2) + least) / 15
    of_scales, of_least = (
        (own.max(axis=1, keepdims=True) / 63).astype(np.float16) for own in (scales, least)
    )
    s, m = (
        np.rint(own / np.maximum(of.astype(np.float32), 1e-12)).clip(0, 63).astype(np.uint8)
        for own, of in ((scales, of_scales), (least, of_least))
    )
    steps, offsets = s * of_scales.astype(np.float32), m * of_least.astype(np.float32)
    quants = (
        np.rint((runs + offsets[..., None]) / np.maximum(steps, 1e-12)[..., None])
        .clip(0, 15)
        .astype(np.uint8)
    )
    low = s[:, :4] | s[:, 4:] >> 4 << 6
    high = m[:, :4] | m[:, 4:] >> 4 << 6
    rest = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    nibbles = quants[:, 0::2] | quants[:, 1::2] << 4
    return np.concatenate(
        (of_scales.view(np.uint8), of_least.view(np.uint8), low, high, rest, nibbles.reshape(len(runs), -1)),
        axis=1,
    )


def q6_k(groups: np.ndarray) -> np.ndarray:
    """Sixteen runs of 16 numbers (q - 32) d s, whose scales s have 8 bits."""
    runs = groups.reshape(-1, 16, 16)
    scales = np.abs(runs).max(axis=2) / 31
    of_scales = (scales.max(axis=1, keepdims=True) / 127).astype(np.float16)
    s = np.rint(scales / np.maximum(of_scales.astype(np.float32), 1e-12)).clip(0, 127).astype(np.int8)
    steps = np.maximum(s * of_scales.astype(np.float32), 1e-12)[..., None]
    quants = (np.rint(runs / steps).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quants[:, :, :2] & 15 | (quants[:, :, 2:] & 15) << 4
    high = (
        quants[:, :, 0] >> 4
        | quants[:, :, 1] >> 4 << 2
        | quants[:, :, 2] >> 4 << 4
        | quants[:, :, 3] >> 4 << 6
    )
    parts = (
        low.reshape(len(runs), -1),
        high.reshape(len(runs), -1),
        s.view(np.uint8),
        of_scales.view(np.uint8),
    )
    return np.concatenate(parts, axis=1)


def text_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the text model, under the names that they have in a checkpoint of its own."""
    tensors = load_file(folder / "model.safetensors")
    nested = {
        name.replace("language_model.", "", 1): tensors[name] for name in tensors if "language_model." in name
    }
    return (
        {**nested, **{name: tensors[name] for name in tensors if name == "lm_head.weight"}}
        if nested
        else tensors
    )


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of all experts of a layer as one tensor, under a name without the expert's number."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            found[name] = tensor
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    return found | {name: torch.stack([own[i] for i in sorted(own)]) for name, own in experts.items()}
