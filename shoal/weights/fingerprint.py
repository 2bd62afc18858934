"""Fingerprints: 16 bytes that name a model by its computation. Cached KV of another model must never be
found, and its weights must never be exported to a reader. A path or a config can't distinguish fine-tunes, so
the weights' content counts; the checkpoint's origin does not. No torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from shoal.kinds.experts import ExpertsKind, Router
from shoal.kinds.latent import LatentKind
from shoal.kinds.rope import RopeConfig
from shoal.model_config import AttentionKind, LayerKind, MixerKind, ModelConfig
from shoal.models.rope_scaling import at_length
from shoal.weights.quantized import EVERY_DTYPE
from shoal.weights.safetensors import shards, tensor_spans
from shoal.weights.source import CheckpointFiles

# These fields do not affect the computation. Tensors are converted to the engine's dtype, and the engine
# has its own length and stop ids.
FREE_FIELDS = {"dtype", "max_position_embeddings", "eos_token_ids", "num_draft_layers", "head_drafts"}
# The fields that these had when engines first wrote KV to disks. Later fields count where they differ from
# their defaults, so that KV of earlier versions is found.
FIRST_FIELDS = {
    "ModelConfig": "architecture vocab_size hidden_size intermediate_size rms_norm_eps tie_word_embeddings "
    "has_head qk_norm qkv_bias o_bias mlp_bias embedding_multiplier residual_multiplier logits_scaling "
    "quantization",
    "RopeConfig": "theta kind factor original_max_position_embeddings low_freq_factor high_freq_factor "
    "beta_fast beta_slow truncate attention_factor factors",
}
SAMPLES = 16384  # in a file, or in all tensors
MOST_SAMPLES = 32  # in a tensor
SAMPLE_BYTES = 256
WHOLE_BYTES = 1 << 16  # files and tensors up to this size are hashed whole


def weights_fingerprint(
    checksums: Sequence[Mapping[str, str]], config: ModelConfig, max_model_len: int
) -> bytes:
    """Returns the fingerprint of weights in memory and of their KV. `checksums` are each rank's
    (weights/update.py), in rank order, of its sharded, merged and packed tensors. So the fingerprint differs
    between tensor-parallel sizes, dtypes and kinds of device, and if an engine keeps quantized weights
    packed: their blocks have other shapes, or other rounding. Names of modules count, so a renamed one costs
    the KV on disks. `max_model_len`: the engine's, on which some ropes depend."""
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode(
            (_fields(_at_length(config, max_model_len)), [sorted(own.items()) for own in checksums])
        )
    )


def checkpoint_fingerprint(files: CheckpointFiles, is_packed: bool, max_model_len: int) -> bytes:
    """Returns a fingerprint that is equal for all engines with these files, at any tensor-parallel size.
    Their blocks differ by rounding alone. `is_packed`: the weights stay quantized as in the files.

    The files are read at evenly spaced places, because whole ones take long. A checkpoint that differs in a
    few small tensors alone may go unnoticed. Raises CheckpointError and OSError."""
    fields = _fields(_at_length(files.config, max_model_len))
    hasher = xxhash.xxh3_128(msgspec.msgpack.encode((fields, is_packed)))
    for path in [*weight_files(files), *([] if files.head is None else files.head.weight_files())]:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(size.to_bytes(8, "little"))
            _sample(hasher, file, 0, size, SAMPLES)
    return hasher.digest()


def tensors_fingerprint(files: CheckpointFiles) -> bytes:
    """Returns a fingerprint of a folder's weights quickly: it reads headers and some bytes of each tensor, as
    the files may be on a slow disk. Checkpoints that differ in a few rows of large matrices alone may have
    the same one. Raises CheckpointError, OSError."""
    hasher = xxhash.xxh3_128(msgspec.msgpack.encode(_fields(files.config)))
    spans = {path: tensor_spans(path, EVERY_DTYPE) for path in weight_files(files)}
    samples = min(MOST_SAMPLES, max(2, SAMPLES // sum(map(len, spans.values()))))
    for path, tensors in spans.items():
        with open(path, "rb", buffering=0) as file:
            hasher.update(os.pread(file.fileno(), tensors[0][0], 0))  # names, types and shapes
            for start, end in tensors:
                _sample(hasher, file, start, end, samples)
    return hasher.digest()


def _at_length(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """Returns the config with the ropes of an engine of this length: KV of another table is other KV."""
    layers = []
    for kind in config.layers:
        if (attention := kind.attention) is not None and attention.rope is not None:
            kind = kind.with_attention(rope=at_length(attention.rope, attention.rotary_dim, max_model_len))
        layers.append(kind)
    return replace(config, layers=tuple(layers))


def _sample(hasher: xxhash.xxh3_128, file: FileIO, start: int, end: int, samples: int) -> None:
    """Hashes the bytes from start to end of a file: all of them, or if they are many, `samples` ranges at
    evenly spaced positions, the first and the last among them."""
    if end - start <= max(WHOLE_BYTES, samples * SAMPLE_BYTES):
        hasher.update(os.pread(file.fileno(), end - start, start))
        return
    last = end - start - SAMPLE_BYTES
    for i in range(samples):
        hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, start + i * last // (samples - 1)))


def weight_files(files: CheckpointFiles) -> list[Path]:
    """Returns the files that hold weights. Raises CheckpointError if a file is missing."""
    return [files.file] if files.file is not None else sorted(shards(files.folder))


def _fields(config: ModelConfig) -> list[tuple[str, object]]:
    """Returns the config without FREE_FIELDS. KV on disks is found by these names and values, so layers are
    described as in a config.json, whose fields hold for all of them. Layers that differ in more than windows
    and a choice between MLP and experts are listed as well."""
    fields = {name: value for name, value in _counting(config).items() if name not in FREE_FIELDS}
    del fields["layers"]
    attention, experts = config.attention, config.experts
    usual_scale = attention.head_dim**-0.5
    fields |= {
        "num_layers": config.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope": None if attention.rope is None else _counting(attention.rope),
        "attention_multiplier": None if attention.scale == usual_scale else attention.scale,
        "windows": tuple(kind.attention and kind.attention.window for kind in config.layers),
        "num_experts": 0 if experts is None else experts.num_experts,
        "num_experts_per_tok": 0 if experts is None else experts.router.top_k,
        "moe_intermediate_size": 0 if experts is None else experts.intermediate_size,
        "norm_topk_prob": experts is not None and experts.router.renormalize,
    }
    if experts is not None and experts != _plain(experts):
        fields["experts"] = asdict(experts)
    if attention != _plain_attention(attention):
        fields["attention"] = _of_mixer(asdict(attention))
    sparse = [i for i, kind in enumerate(config.layers, 1) if kind.experts is not None]
    step = fields["decoder_sparse_step"] = math.gcd(*sparse) or 1
    every = range(step, config.num_layers + 1, step) if sparse else ()
    fields["mlp_only_layers"] = tuple(i - 1 for i in every if i not in sparse)
    first = _without_window(attention)
    if any(
        _without_window(kind.mixer) != first or kind.experts not in (None, experts) or not kind.has_mlp
        for kind in config.layers
    ):
        fields["layers"] = tuple(_described(kind) for kind in config.layers)
    return sorted(fields.items())


def _plain(experts: ExpertsKind) -> ExpertsKind:
    """Returns the experts that the fields of a Qwen3-MoE describe."""
    router = Router(experts.router.top_k, experts.router.renormalize)
    return ExpertsKind(experts.num_experts, experts.intermediate_size, router)


def _counting(value: ModelConfig | RopeConfig) -> dict[str, object]:
    """Returns the fields that count: all first ones, and others that differ from their defaults."""
    first = FIRST_FIELDS[type(value).__name__].split()
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return {name: own for name, own in asdict(value).items() if name in first or own != defaults[name]}


def _plain_attention(attention: AttentionKind | LatentKind) -> AttentionKind:
    """Returns the attention that the fields of a Qwen3 describe."""
    heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return AttentionKind(*heads, attention.scale, attention.rope, attention.window)


def _without_window(kind: MixerKind | None) -> MixerKind | None:
    return replace(kind, window=None) if isinstance(kind, AttentionKind) else kind


def _described(kind: LayerKind) -> dict[str, object]:
    fields = asdict(kind)
    if kind.has_mlp:
        del fields["has_mlp"]
    if kind.mixer is not None:
        fields["mixer"] = _of_mixer(fields["mixer"])
    return fields


def _of_mixer(fields: dict[str, object]) -> dict[str, object]:
    """Returns the fields of a mixer without `in_chunks` where that is not set: earlier versions had no such
    field."""
    return {name: value for name, value in fields.items() if name != "in_chunks" or value}
