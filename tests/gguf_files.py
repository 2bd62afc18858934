"""GGUF files of the checkpoints in tests/tiny_families.py, written by the gguf package under the names that its
map has for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj\.weight|w\d\.weight)")
# From a tensor's name, the tensor and the config to the tensors of the file that hold it, by name
Convert = Callable[[str, torch.Tensor, dict], dict[str, torch.Tensor]]


def write(
    path: Path,
    folder: Path,
    architecture: str,
    metadata: Callable[[gguf.GGUFWriter, dict], None],
    convert: Convert | None = None,
    kind: str = "F32",
    num_heads: int = 0,
) -> None:
    """Writes the file. `metadata` adds the keys that not all architectures share, `convert` is for tensors that
    the map has no name for, `num_heads` blocks behind the last layer are draft heads."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    num_blocks = config["num_hidden_layers"] + num_heads
    writer.add_block_count(num_blocks)
    if num_heads:
        writer.add_nextn_predict_layers(num_heads)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    eps = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(config[key] for key in eps if key in config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_list([f"token {i} \u00e9" for i in range(config["vocab_size"])])
    writer.add_token_scores([float(i) for i in range(config["vocab_size"])])
    writer.add_eos_token_id(5)
    metadata(writer, config)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], num_blocks)
    for name, tensor in stacked(load_file(folder / "model.safetensors")).items():
        for own, part in (convert(name, tensor, config) if convert else {name: tensor}).items():
            number = gguf.GGMLQuantizationType["F32" if part.dim() == 1 or part.shape[-1] % 32 else kind]
            stored = own if own.startswith("blk.") else names.get_name(own, try_suffixes=(".weight", ".bias"))
            if stored is None and own.endswith("e_score_correction_bias"):
                stored = names.get_name(own.removesuffix("_bias"), try_suffixes=()) + ".bias"
            assert stored, own
            data = gguf.quants.quantize(part.float().contiguous().numpy(), number)
            writer.add_tensor(stored, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
