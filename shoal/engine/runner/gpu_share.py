"""How much of a GPU's memory one engine may use, and how much of it is left for the KV cache."""

from __future__ import annotations

import torch

from shoal.config import ResolvedConfig
from shoal.errors import ConfigError


class GpuShare:
    """`total * gpu_memory_utilization` bytes of a GPU. As in vLLM, what other processes use does not count
    against it, but a share larger than what is free at the start is refused with ConfigError. It must be made
    before anything is allocated on the device. An engine that is told how large its cache is has none."""

    def __init__(self, device: torch.device, config: ResolvedConfig) -> None:
        self.device = device
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self.torch_at_start = torch.cuda.memory_allocated(device)
        self.free_at_start, total = torch.cuda.mem_get_info(device)
        self.reserved_at_start = torch.cuda.memory_reserved(device)
        self.num_bytes = int(total * config.gpu_memory_utilization)
        if self.num_bytes > self.free_at_start:
            asked, free, whole = (size / 2**30 for size in (self.num_bytes, self.free_at_start, total))
            raise ConfigError(
                f"gpu_memory_utilization {config.gpu_memory_utilization} asks for {asked:.1f} GiB of "
                f"{device}, but only {free:.1f} of {whole:.1f} GiB are free; lower it, set "
                "kv_cache_memory_bytes or end what else runs there"
            )

    def room(self, graph_bytes: int) -> int:
        """Bytes left for the KV cache: the share less torch's peak so far, what others took since the start
        (NCCL, kernels), and `graph_bytes`."""
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - self.torch_at_start
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        in_torch = torch.cuda.memory_reserved(self.device) - self.reserved_at_start
        beside_torch = max(0, self.free_at_start - free - in_torch)
        return self.num_bytes - peak - beside_torch - graph_bytes
