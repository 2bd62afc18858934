"""GGUF files of the models with MTP heads in tests/mtp_heads.py, as llama.cpp's converter writes them: the head is one
more block, with its other tensors as `nextn.*`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests import gguf_files
from tests.cpu.models.test_gguf_hybrids import (
    add_delta,
    add_nemotron,
    convert_delta,
    convert_nemotron,
    text_alone,
    with_letters,
)
from tests.cpu.models.test_gguf_mixtures import add_deepseek, add_glm, by_head
from tests.mtp_heads import write_mtp

Tensors = dict[str, torch.Tensor]
# names behind `model.layers.N.`, which the gguf package has for some architectures alone
NEXTN = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "embed_tokens": "embed_tokens",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
}
# `_QwenMtpMixin` and `NemotronHModel._MTP_SPECIAL_RENAMES` of llama.cpp's conversion/
QWEN = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
NEMOTRON = {
    "mtp.layers.0.enorm.": "enorm.",
    "mtp.layers.0.hnorm.": "hnorm.",
    "mtp.layers.0.eh_proj.": "eh_proj.",
    "mtp.layers.1.norm.": "post_attention_layernorm.",
    "mtp.layers.1.final_layernorm.": "shared_head.norm.",
    "mtp.layers.0.": "",
    "mtp.layers.1.": "",
}


def add_nemotron_head(writer, config) -> None:
    """The head's block counts as one with attention and with experts."""
    add_nemotron(writer, config)
    letters, heads, size = (
        config["hybrid_override_pattern"],
        config["num_key_value_heads"],
        config["moe_intermediate_size"],
    )
    writer.add_head_count_kv([heads if letter == "*" else 0 for letter in letters] + [heads])
    writer.add_feed_forward_length([size if letter == "E" else 0 for letter in letters] + [size])


def with_head(convert: Callable[..., Tensors] | None, renamed: dict[str, str]) -> Callable[..., Tensors]:
    """A Convert of the tensors of a model and its head."""

    def converted(name: str, tensor: torch.Tensor, config: dict) -> Tensors:
        last = config["num_hidden_layers"]
        for prefix, own in renamed.items():
            if name.startswith(prefix):
                name = f"model.layers.{last}.{own}{name.removeprefix(prefix)}"
                break
        found = {name: tensor} if convert is None else convert(name, tensor, config)
        return {_stored(own, last): part for own, part in found.items()}

    return converted


def _stored(name: str, last: int) -> str:
    """The file's name of a tensor, if the gguf package lacks it."""
    module, _, parameter = name.rpartition(".")
    own = module.partition(f".layers.{last}.")[2]
    if own in NEXTN:
        return f"blk.{last}.nextn.{NEXTN[own]}.{parameter}"
    if own == "post_attention_layernorm" and "backbone" in name:  # Nemotron's
        return f"blk.{last}.post_attention_norm.{parameter}"
    return name


# name in tests/mtp_heads.py -> the architecture in the file, its keys and its tensors
FILES = {
    "glm4-moe": ("glm4moe", add_glm, with_head(None, {})),
    "deepseek-v3": ("deepseek2", add_deepseek, with_head(by_head, {})),
    "glm4-flash": ("deepseek2", add_deepseek, with_head(by_head, {})),
    "qwen3.5": ("qwen35", add_delta, with_head(convert_delta, QWEN)),
    "qwen3.5-moe": ("qwen35moe", add_delta, with_head(convert_delta, QWEN)),
    "qwen3-next": ("qwen3next", add_delta, with_head(convert_delta, QWEN)),
    "nemotron-h": ("nemotron_h_moe", add_nemotron_head, with_head(convert_nemotron, NEMOTRON)),
    "nemotron-latent": ("nemotron_h_moe", add_nemotron_head, with_head(convert_nemotron, NEMOTRON)),
}
CHANGES = {
    "deepseek-v3": dict(attention_bias=False),
    "glm4-flash": dict(attention_bias=False, rope_interleave=True),
    "nemotron-h": dict(hybrid_override_pattern="ME*E"),
    "nemotron-latent": dict(hybrid_override_pattern="ME*E"),
}


def write(root: Path, name: str, kind: str = "F32", num_heads: int = 1, **changes) -> tuple[Path, Path]:
    """Returns the folder of the model with its head, and the file that was written from it."""
    folder = write_mtp(root, name, **CHANGES.get(name, {}) | changes)
    folder = text_alone(folder) if name == "qwen3.5-moe" else folder
    folder = with_letters(folder, "ME*E") if name == "nemotron-latent" else folder
    architecture, metadata, convert = FILES[name]
    path = root / f"{name}-{kind}-{num_heads}.gguf"
    if not path.exists():
        gguf_files.write(path, folder, architecture, metadata, convert, kind, num_heads=num_heads)
    return folder, path
