"""The device's memory as one engine sees it, and the pinned buffers through which steps travel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from shoal.config import ResolvedConfig
from shoal.errors import ConfigError


class DeviceMemory:
    """This engine's share of a GPU: `total * gpu_memory_utilization`. What other processes use does not count
    against it (as in vLLM), but a share larger than what is free at the start is refused with ConfigError."""

    def __init__(self, device: torch.device, config: ResolvedConfig) -> None:
        self.device, self.config = device, config
        if device.type != "cuda":
            return
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.torch_at_start = torch.cuda.memory_allocated(device)
        self.free_at_start, total = torch.cuda.mem_get_info(device)
        self.reserved_at_start = torch.cuda.memory_reserved(device)
        self.share = int(total * config.gpu_memory_utilization)
        if self.share > self.free_at_start:
            share, free, whole = (size / 2**30 for size in (self.share, self.free_at_start, total))
            raise ConfigError(
                f"gpu_memory_utilization {config.gpu_memory_utilization} asks for {share:.1f} GiB of "
                f"{device}, but only "
                f"{free:.1f} of {whole:.1f} GiB are free; lower it or end what else runs there"
            )

    def room(self, graph_bytes: int) -> int:
        """Bytes left for the KV cache: the share less torch's peak, what others took since the start (NCCL,
        kernels), and the graphs."""
        if self.config.kv_cache_memory_bytes:
            return self.config.kv_cache_memory_bytes
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.torch_at_start
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        in_torch = torch.cuda.memory_reserved(self.device) - self.reserved_at_start
        beside_torch = max(0, self.free_at_start - free - in_torch)
        return self.share - peak - beside_torch - graph_bytes


def queue_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src, non_blocking=True)


class PinnedRing:
    """Pinned host buffers and their twins on the device, used in turn. An event guards a buffer whose copy is
    still in flight. `copy`: from one to the other, without waiting."""

    def __init__(
        self, size: int, device: torch.device, copy: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        self.device, self.copy = device, copy
        self.host: list[torch.Tensor] = [self._pinned(1 << 14) for _ in range(size)]
        self.device_side = [torch.empty_like(h, device=device) for h in self.host]
        self.events = [torch.cuda.Event() for _ in range(size)]
        self.next = 0

    @staticmethod
    def _pinned(num_ints: int) -> torch.Tensor:
        return torch.empty(num_ints, dtype=torch.int32, device="cpu", pin_memory=True)

    def upload(self, packed: np.ndarray) -> torch.Tensor:
        """One asynchronous copy; the returned view is good until the ring comes round, in stream order."""
        i, self.next = self.next, (self.next + 1) % len(self.host)
        self.events[i].synchronize()
        if self.host[i].shape[0] < packed.shape[0]:  # grows to the largest step met, then never again
            self.host[i] = self._pinned(2 * packed.shape[0])
            self.device_side[i] = torch.empty_like(self.host[i], device=self.device)
        size = packed.shape[0]
        self.host[i].numpy()[:size] = packed
        view = self.device_side[i][:size]
        self.copy(view, self.host[i][:size])
        self.events[i].record()
        return view
