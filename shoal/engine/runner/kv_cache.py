"""The KV cache of one rank: the tensor that steps write and attention reads, and that block transfers copy
from and to."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from shoal.config import ResolvedConfig
from shoal.kv.layout import CacheSpec, Layout
from shoal.model_config import ModelConfig


def cache_spec(config: ResolvedConfig, model: ModelConfig, tp_rank: int = 0) -> CacheSpec:
    """Describes a rank's cache of one block. Whatever needs the shape of a cache derives it from this. Raises
    LayoutError if the ranks can't share the model's KV heads."""
    return CacheSpec(
        layout=Layout.WHOLE_BLOCKS,
        num_layers=model.num_layers,
        num_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=config.dtype,
        block_size=config.block_size,
        tp_rank=tp_rank,
        tp_size=config.tensor_parallel_size,
    )


class KvCache:
    """`blocks` is a tensor of shape `spec.shape`, [blocks, layers, 2, kv heads, block_size, head_dim], so one
    block is one contiguous piece over all layers. There is one block until `allocate`."""

    def __init__(self, spec: CacheSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self.blocks = self._new()

    def allocate(self, num_blocks: int) -> None:
        """Replaces `blocks` by that many empty ones. Raises MemoryError or torch.OutOfMemoryError."""
        self.spec = replace(self.spec, num_blocks=num_blocks)
        self.blocks = self._new()

    def _new(self) -> torch.Tensor:
        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        if self._device.type == "cuda":
            return torch.zeros(spec.shape, dtype=dtype, device=self._device)
        # The kernel gives numpy's zeros, and takes memory for them when they are written. torch's zeros would
        # be written at every start.
        return torch.from_numpy(np.zeros(spec.num_bytes, np.uint8)).view(dtype).view(spec.shape)
