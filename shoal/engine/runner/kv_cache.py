"""The KV cache of one rank: the tensor that steps write and attention reads, and that block transfers copy
from and to."""

from __future__ import annotations

import math

import numpy as np
import torch

from shoal.config import ResolvedConfig
from shoal.model_config import ModelConfig


class KvCache:
    """`blocks` is [blocks, layers, 2, kv heads, block_size, head_dim], so one block is one contiguous piece
    over all layers. It has one block until `allocate`."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: ModelConfig,
        num_kv_heads: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`num_kv_heads`: this rank's."""
        self.block_shape = (model.num_layers, 2, num_kv_heads, config.block_size, model.head_dim)
        self.block_bytes = math.prod(self.block_shape) * dtype.itemsize
        self._device, self._dtype = device, dtype
        self.blocks = self._new(1)

    def allocate(self, num_blocks: int) -> None:
        """Replaces `blocks` by that many empty ones. Raises MemoryError or torch.OutOfMemoryError."""
        self.blocks = self._new(num_blocks)

    def _new(self, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, *self.block_shape)
        if self._device.type == "cuda":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # The kernel gives numpy's zeros, and takes memory for them when they are written. torch's zeros would
        # be written at every start.
        zeros = np.zeros(num_blocks * self.block_bytes, np.uint8)
        return torch.from_numpy(zeros).view(self._dtype).view(shape)
