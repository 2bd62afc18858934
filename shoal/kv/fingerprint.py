"""16 bytes that name a model by what it computes: cached KV of another one must never be found. A path or a
config can't tell fine-tunes apart, so the weights' content does; where the checkpoint came from plays no
part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import msgspec
import xxhash

from shoal.model_config import ModelConfig
from shoal.weights.update import FREE_FIELDS


def weights_fingerprint(checksums: Sequence[Mapping[str, str]], config: ModelConfig) -> bytes:
    """`checksums`: of each rank's tensors (weights/update.py), in rank order, as they lie in memory: sharded,
    merged, packed. So it differs between tensor-parallel sizes, dtypes, kinds of device, and an engine that
    keeps quantized weights packed and one that does not: blocks of theirs have other shapes, or other
    rounding."""
    fields = {name: value for name, value in asdict(config).items() if name not in FREE_FIELDS}
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode((sorted(fields.items()), [sorted(own.items()) for own in checksums]))
    )
