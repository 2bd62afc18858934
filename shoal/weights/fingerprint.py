"""16 bytes that name a model by what it computes: cached KV of another one must never be found, and weights
of another one must never be lent. A path or a config can't tell fine-tunes apart, so the weights' content
does; where the checkpoint came from plays no part. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from shoal.model_config import ModelConfig
from shoal.weights.quantized import EVERY_DTYPE
from shoal.weights.safetensors import shards, tensor_spans
from shoal.weights.source import CheckpointFiles

# These fields say nothing about what is computed. Tensors are converted to the engine's dtype, and the engine
# has its own length and stop ids.
FREE_FIELDS = {"dtype", "max_position_embeddings", "bos_token_id", "eos_token_ids"}
SAMPLES = 16384  # of a file, or of all tensors
MOST_SAMPLES = 32  # of a tensor
SAMPLE_BYTES = 256
WHOLE_BYTES = 1 << 16  # What has at most so many is hashed whole.


def weights_fingerprint(checksums: Sequence[Mapping[str, str]], config: ModelConfig) -> bytes:
    """`checksums`: of each rank's tensors (weights/update.py), in rank order, as they lie in memory: sharded,
    merged, packed. So it differs between tensor-parallel sizes, dtypes, kinds of device, and an engine that
    keeps quantized weights packed and one that does not: blocks of theirs have other shapes, or other
    rounding."""
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((_fields(config), [sorted(own.items()) for own in checksums]))
    )


def checkpoint_fingerprint(files: CheckpointFiles, is_packed: bool) -> bytes:
    """The same for all engines that have read these files of weights, whatever their tensor-parallel size.
    Their blocks differ by rounding alone. `is_packed`: the weights stay as the files have them.

    The files are read at evenly spaced places, because whole ones take long. A checkpoint that differs in a
    few small tensors alone may go unnoticed. Raises CheckpointError and OSError."""
    hasher = xxhash.xxh3_128(msgspec.msgpack.encode((_fields(files.config), is_packed)))
    for path in weight_files(files):
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            hasher.update(size.to_bytes(8, "little"))
            _sample(hasher, file, 0, size, SAMPLES)
    return hasher.digest()


def tensors_fingerprint(files: CheckpointFiles) -> bytes:
    """Names the weights of a folder, which two workers may have in common, in little time: headers are read
    and some bytes of each tensor, as the files may be on a slow disk. Checkpoints that differ in a few rows
    of large matrices alone may have one name. Raises CheckpointError, OSError."""
    hasher = xxhash.xxh3_128(msgspec.msgpack.encode(_fields(files.config)))
    spans = {path: tensor_spans(path, EVERY_DTYPE) for path in weight_files(files)}
    samples = min(MOST_SAMPLES, max(2, SAMPLES // sum(map(len, spans.values()))))
    for path, tensors in spans.items():
        with open(path, "rb", buffering=0) as file:
            hasher.update(os.pread(file.fileno(), tensors[0][0], 0))  # names, types and shapes
            for start, end in tensors:
                _sample(hasher, file, start, end, samples)
    return hasher.digest()


def _sample(hasher: xxhash.xxh3_128, file: FileIO, start: int, end: int, samples: int) -> None:
    """Hashes the bytes from start to end of a file: all of them, or if they are many, so many pieces at
    evenly spaced places, the first and the last among them."""
    if end - start <= max(WHOLE_BYTES, samples * SAMPLE_BYTES):
        hasher.update(os.pread(file.fileno(), end - start, start))
        return
    last = end - start - SAMPLE_BYTES
    for i in range(samples):
        hasher.update(os.pread(file.fileno(), SAMPLE_BYTES, start + i * last // (samples - 1)))


def weight_files(files: CheckpointFiles) -> list[Path]:
    """The files that hold weights. Raises CheckpointError if one that should be there is not."""
    return [files.file] if files.file is not None else sorted(shards(files.folder))


def _fields(config: ModelConfig) -> list[tuple[str, object]]:
    """The config, but for FREE_FIELDS."""
    return sorted((name, value) for name, value in asdict(config).items() if name not in FREE_FIELDS)
