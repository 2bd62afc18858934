"""A summary of a checkpoint for lists of models. It is made of the files' headers alone, without torch."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path

from shoal.api import ModelSummary
from shoal.weights.quantized import tensor_headers
from shoal.weights.safetensors import shards
from shoal.weights.source import CheckpointFiles


def summarize(files: CheckpointFiles) -> ModelSummary:
    """Raises CheckpointError where a header cannot be read. A folder without weights has no parameters."""
    config = files.config
    weights = Counter[str]()  # by type
    paths: list[Path] = []
    if files.file is not None:
        paths = [files.file]
        for tensor in files.header.tensors.values():
            weights[tensor.kind] += math.prod(tensor.shape)
    elif any(files.folder.glob("*.safetensors")):
        paths = list(shards(files.folder))
        for dtype, shape in tensor_headers(files.folder, config).values():
            weights[dtype] += math.prod(shape)
    stats = [path.stat() for path in paths]
    # The name of this version has to change when the files do. Their content would be gigabytes to read.
    identity = repr([(str(p.resolve()), stat.st_size, stat.st_mtime_ns) for p, stat in zip(paths, stats)])
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.attention.num_heads,
        "attention.head_count_kv": config.attention.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    return ModelSummary(
        config.architecture,
        "safetensors" if files.file is None else "gguf",
        weights.total(),
        weights.most_common(1)[0][0] if weights else "",
        sum(stat.st_size for stat in stats),
        max((stat.st_mtime for stat in stats), default=0.0),
        hashlib.sha256(identity.encode()).hexdigest(),
        sizes,
    )
