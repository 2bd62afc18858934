"""`KvCache`: one rank's KV cache, the memory that steps write and attention reads. cache_plan.py says what a
block holds. Block ids are kv/blocks.py's; rank_kv.py and rank_peers.py copy blocks from and to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shoal.engine.runner.cache_plan import CachePlan
from shoal.errors import ConfigError
from shoal.kernels.layer_cache import LayerCache, LayerState
from shoal.kv.layout import ITEM_BYTES
from shoal.kv.storage import Memory, StorageError, memory_of, shared_memory
from shoal.kv.view import BlockView
from shoal.model_config import LayerKind


class KvCache:
    """`blocks` is the memory of all groups, [blocks, numbers of a block]: a block is one contiguous range,
    and belongs to a group at a time. To group g it is the shape of `plan.specs[g]`, [layers, planes, kv
    heads, block_size, head_dim], and padding. There is one block until `allocate`. `layers` has the memory of
    each layer: a view of the blocks, or if the layer is recurrent, of `states`.

    `scales`: the scales of an fp8 cache, for each layer [2, kv heads of the model].

    `is_shared`: other processes may read the cache. On the CPU it is then in shared memory; a GPU's memory
    can be shared as it is."""

    def __init__(
        self,
        plan: CachePlan,
        kinds: Sequence[LayerKind],
        scales: Sequence[torch.Tensor] | None,
        states: Mapping[int, LayerState],
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        self.plan = plan
        self._kinds, self._device, self._is_shared, self._states = kinds, device, is_shared, states
        self._scales: dict[int, torch.Tensor] = {}
        if scales is not None:
            for group, spec in zip(plan.groups, plan.specs, strict=True):
                for i in group.layers:
                    own = scales[i][:, spec.first_head : spec.first_head + spec.heads]
                    self._scales[i] = own.contiguous().to(device)
        self._allocate()

    def allocate(self, num_blocks: int) -> None:
        """Replaces `blocks` by that many empty ones. Raises MemoryError, torch.OutOfMemoryError, and
        ConfigError where others are to read them and the system has no shared memory."""
        self.plan = self.plan.with_specs(num_blocks=num_blocks)
        self._allocate()

    def views(self) -> tuple[BlockView, ...]:
        """The cache as transports read it, a view for each group. They keep the memory."""
        return tuple(BlockView.over(spec, self._storage) for spec in self.plan.specs)

    def _allocate(self) -> None:
        plan, dtype = self.plan, getattr(torch, self.plan.dtype)
        shape = plan.num_blocks, plan.block_bytes // dtype.itemsize
        if self._device.type == "cuda":
            self.blocks = torch.zeros(shape, dtype=dtype, device=self._device)
            self._storage = memory_of(self.blocks)
        else:
            self._storage = self._host_memory(plan.num_blocks * plan.block_bytes)
            self.blocks = self._storage.tensor().view(dtype).view(shape)
        layers: dict[int, LayerCache] = {}
        for g, (group, spec) in enumerate(zip(plan.groups, plan.specs, strict=True)):
            size = (spec.block_bytes - spec.padding) // ITEM_BYTES[spec.dtype]
            for i, view in zip(group.layers, self.blocks[:, :size].view(spec.shape).unbind(1), strict=True):
                attention = self._kinds[i].attention
                assert attention is not None
                in_chunks = attention.in_chunks and group.window is not None
                layers[i] = LayerCache(view, g, group.window, self._scales.get(i), in_chunks)
        memory: dict[int, LayerCache | LayerState] = {**layers, **self._states}
        sources = (None if kind.attention is None else kind.attention.kv_layer for kind in self._kinds)
        self.layers = tuple(memory.get(i if source is None else source) for i, source in enumerate(sources))

    def _host_memory(self, num_bytes: int) -> Memory:
        if self._is_shared:
            try:
                return shared_memory(num_bytes)
            except StorageError as error:
                raise ConfigError(
                    f"kv_transfer_config lets other processes read the KV cache: {error} With kv_role "
                    "'kv_consumer', or without that option, the cache is this process's own"
                ) from None
        # The kernel gives numpy's zeros, and takes memory for them when they are written. torch's zeros would
        # be written at every start.
        return memory_of(torch.from_numpy(np.zeros(num_bytes, np.uint8)))
