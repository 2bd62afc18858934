"""GGUF files of Ollama's own converters, as llama.cpp's converter would have written them: other names of
keys and tensors, and the tensors of images and sounds in the text model's file. No torch.

Ollama's own translation to llama.cpp (its llama/compat) has the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.weights.gguf.header import GGUFHeader

# Encoders and projectors of images and sounds, and draft heads in a form that llama.cpp does not have.
OTHER_PARTS = ("v.", "mm.", "a.", "model.vision_tower.", "mtp.")
# lists of metadata with an entry for each token
BY_TOKEN = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type"))
TOKENIZER, PRE_TOKENIZER = "tokenizer.ggml.model", "tokenizer.ggml.pre"
EPSILON = "attention.layer_norm_rms_epsilon"  # all of Ollama's files of Gemma 3 with images lack it
# Gemma 3's sizes whose rope is scaled have this context, and the smaller ones have less.
SCALED_CONTEXT = 131072
SCALED = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences of Ollama's files of one architecture. Keys are without the architecture's prefix."""

    architecture: str  # llama.cpp's name
    keys: Mapping[str, str] = field(default_factory=dict)  # Ollama's name -> llama.cpp's
    missing: Mapping[str, Any] = field(default_factory=dict)  # values of keys that its files lack
    tensors: Mapping[str, str] = field(default_factory=dict)  # the end of a name -> llama.cpp's


DELTA = {".ssm_dt": ".ssm_dt.bias"}
DIALECTS = {
    "gemma3": Dialect(
        "gemma3",
        keys={"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"},
        missing={"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
    ),
    "gemma4": Dialect("gemma4", tensors={".ffn_gate_inp.per_expert_scale": ".ffn_down_exps.scale"}),
    "mistral3": Dialect(
        "mistral3",
        keys={
            "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
            "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
            "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
            "rope.scaling_beta": "attention.temperature_scale",
        },
    ),
    "nemotron_h_omni": Dialect("nemotron_h_moe"),
    "qwen25vl": Dialect("qwen2vl"),
    "qwen35": Dialect("qwen35", tensors=DELTA),
    "qwen35moe": Dialect("qwen35moe", tensors=DELTA),
    "qwen3next": Dialect("qwen3next", tensors=DELTA),
}


def as_llama_cpp(header: GGUFHeader) -> GGUFHeader:
    """Returns the header with llama.cpp's names and without the tensors of other parts than the text model. A
    header that llama.cpp's converter wrote has the names already."""
    own = header.metadata.get("general.architecture")
    dialect = DIALECTS.get(own) if isinstance(own, str) else None
    kept = [info for info in header.tensors.values() if not info.name.startswith(OTHER_PARTS)]
    left_out, metadata = len(header.tensors) - len(kept), header.metadata
    if dialect is not None:
        kept = [replace(info, name=_renamed(info.name, dialect.tensors)) for info in kept]
        metadata = _with_usual_keys(metadata, str(own), dialect)
    tensors = {info.name: info for info in kept}
    if left_out and "token_embd.weight" in tensors:
        metadata = _with_usual_tokenizer(metadata, tensors["token_embd.weight"].shape[0])
    return GGUFHeader(header.path, metadata, tensors, left_out)


def _renamed(name: str, ends: Mapping[str, str]) -> str:
    for end, usual in ends.items():
        if name.endswith(end):
            return name.removesuffix(end) + usual
    return name


def _with_usual_keys(stored: Mapping[str, Any], own: str, dialect: Dialect) -> dict[str, Any]:
    """The metadata with llama.cpp's keys, and the values that Ollama's converter did not write."""
    prefix = f"{dialect.architecture}."
    metadata = {
        prefix + key.removeprefix(f"{own}.") if key.startswith(f"{own}.") else key: value
        for key, value in stored.items()
    }
    metadata["general.architecture"] = dialect.architecture
    for key, usual in dialect.keys.items():
        if prefix + key in metadata:
            metadata.setdefault(prefix + usual, metadata[prefix + key])
    missing = dialect.missing
    if own == "gemma3" and prefix + EPSILON not in metadata:
        is_scaled = metadata.get("gemma3.context_length") == SCALED_CONTEXT
        missing = {**missing, **SCALED} if is_scaled else missing
    for key, value in missing.items():
        metadata.setdefault(prefix + key, value)
    return metadata


def _with_usual_tokenizer(stored: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
    """The metadata with llama.cpp's names of tokenizers, and no more tokens than embeddings."""
    metadata = dict(stored)
    for key in BY_TOKEN:
        if isinstance(own := metadata.get(key), list):
            metadata[key] = own[:num_tokens]
    if metadata.get(PRE_TOKENIZER) == "gemma4":
        metadata[TOKENIZER] = "gemma4"
    is_unnamed = metadata.get(TOKENIZER) == "gpt2" and metadata.get(PRE_TOKENIZER) in (None, "default")
    if metadata.get("general.architecture") == "mistral3" and is_unnamed:
        metadata[PRE_TOKENIZER] = "tekken"
    return metadata
