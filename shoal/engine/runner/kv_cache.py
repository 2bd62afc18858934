"""`KvCache`: one rank's KV cache, the tensor that steps write and attention reads. Block ids are
kv/blocks.py's; rank_kv.py and rank_peers.py copy blocks from and to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from shoal.config import ResolvedConfig
from shoal.errors import ConfigError
from shoal.kernels.layer_cache import LayerCache
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.storage import Memory, StorageError, memory_of, shared_memory
from shoal.kv.view import BlockView
from shoal.model_config import ModelConfig
from shoal.weights.kv_scales import kv_scales
from shoal.weights.source import CheckpointFiles

FP8 = "float8_e4m3fn"


def cache_dtype(config: ResolvedConfig) -> str:
    """The name of the torch.dtype that the cache's numbers have."""
    return config.dtype if config.kv_cache_dtype == "auto" else FP8


def cache_spec(config: ResolvedConfig, model: ModelConfig, tp_rank: int = 0) -> CacheSpec:
    """Describes a rank's cache of one block, but for the scales of an fp8 cache. Whatever needs the shape of
    a cache derives it from this. Raises LayoutError if the ranks can't share the model's KV heads."""
    [(num_kv_heads, head_dim)] = {(kind.mixer.num_kv_heads, kind.mixer.head_dim) for kind in model.layers}
    return CacheSpec(
        layout=Layout.WHOLE_BLOCKS,
        num_layers=model.num_layers,
        num_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=cache_dtype(config),
        block_size=config.block_size,
        tp_rank=tp_rank,
        tp_size=config.tensor_parallel_size,
    )


def cache_scales(config: ResolvedConfig, files: CheckpointFiles) -> torch.Tensor:
    """The scales of an fp8 cache, float32 [layers, 2, kv heads of the model]: the checkpoint's, or 1. Raises
    CheckpointError."""
    found = None if config.load_format == "dummy" else kv_scales(files)
    num_layers, num_kv_heads = files.config.num_layers, files.config.attention.num_kv_heads
    return torch.ones(num_layers, 2, num_kv_heads) if found is None else found


class KvCache:
    """`blocks` is a tensor of shape `spec.shape`, [blocks, layers, 2, kv heads, block_size, head_dim], so one
    block is one contiguous range over all layers. `layers` has a view of it for each layer. There is one
    block until `allocate`.

    `scales_L2G`: the scales of an fp8 cache, for all kv heads of the model.

    `is_shared`: other processes may read the cache. On the CPU it then lies in shared memory; a GPU's memory
    can be shared as it is."""

    def __init__(
        self,
        spec: CacheSpec,
        windows: Sequence[int | None],
        scales_L2G: torch.Tensor | None,
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        self.spec = spec
        self._windows, self._device, self._is_shared = windows, device, is_shared
        self._scales: list[torch.Tensor | None] = [None] * spec.num_layers
        if scales_L2G is not None:
            own_L2G = scales_L2G[:, :, spec.first_head : spec.first_head + spec.heads]
            self._scales = [scales_2G.contiguous().to(device) for scales_2G in own_L2G]
        self._allocate()

    def allocate(self, num_blocks: int) -> None:
        """Replaces `blocks` by that many empty ones. Raises MemoryError, torch.OutOfMemoryError, and
        ConfigError where others are to read them and the system has no shared memory."""
        self.spec = replace(self.spec, num_blocks=num_blocks)
        self._allocate()

    def view(self) -> BlockView:
        """The cache as transports read it. It keeps the memory."""
        return BlockView.over(self.spec, self._storage)

    def _allocate(self) -> None:
        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        if self._device.type == "cuda":
            self.blocks = torch.zeros(spec.shape, dtype=dtype, device=self._device)
            self._storage = memory_of(self.blocks)
        else:
            self._storage = self._host_memory()
            self.blocks = self._storage.tensor().view(dtype).view(spec.shape)
        views = self.blocks.unbind(1)
        self.layers = tuple(
            LayerCache(view, window=window, scales_2G=scales_2G)
            for view, window, scales_2G in zip(views, self._windows, self._scales, strict=True)
        )

    def _host_memory(self) -> Memory:
        if self._is_shared:
            try:
                return shared_memory(self.spec.num_bytes)
            except StorageError as error:
                raise ConfigError(
                    f"kv_transfer_config lets other processes read the KV cache: {error} With kv_role "
                    "'kv_consumer', or without that option, the cache is this process's own"
                ) from None
        # The kernel gives numpy's zeros, and takes memory for them when they are written. torch's zeros would
        # be written at every start.
        return memory_of(torch.from_numpy(np.zeros(self.spec.num_bytes, np.uint8)))
