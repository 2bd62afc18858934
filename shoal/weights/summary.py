"""What a checkpoint's files say of it, for whoever lists models: from headers alone, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from pathlib import Path

from shoal.api import ModelSummary
from shoal.errors import CheckpointError
from shoal.weights.source import CheckpointFiles


def summarize(files: CheckpointFiles) -> ModelSummary:
    """Raises CheckpointError where a header cannot be read. A folder without weights has no parameters."""
    config = files.config
    paths = [files.file] if files.file is not None else sorted(files.folder.glob("*.safetensors"))
    weights = Counter[str]()    # by type
    for path in paths:
        weights += _gguf_weights(files) if path == files.file else _safetensors_weights(path)
    stats = [path.stat() for path in paths]
    # The files' content is not read: gigabytes, for a name that only has to change when they do.
    identity = repr([(str(p.resolve()), stat.st_size, stat.st_mtime_ns) for p, stat in zip(paths, stats)])
    sizes = {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
             "block_count": config.num_layers, "feed_forward_length": config.intermediate_size,
             "attention.head_count": config.num_heads,
             "attention.head_count_kv": config.num_kv_heads, "vocab_size": config.vocab_size}
    return ModelSummary(config.architecture, "safetensors" if files.file is None else "gguf", weights.total(),
                        weights.most_common(1)[0][0] if weights else "", sum(stat.st_size for stat in stats),
                        max((stat.st_mtime for stat in stats), default=0.0),
                        hashlib.sha256(identity.encode()).hexdigest(), sizes)


def _gguf_weights(files: CheckpointFiles) -> Counter[str]:
    found = Counter[str]()
    for tensor in files.header.tensors.values():
        found[tensor.kind] += math.prod(tensor.shape)
    return found


def _safetensors_weights(path: Path) -> Counter[str]:
    found = Counter[str]()
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        for name, tensor in header.items():
            if name != "__metadata__":
                found[tensor["dtype"]] += math.prod(tensor["shape"])
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the header of {path} cannot be read ({error}); fetch it again") from None
    return found
