"""What each rank does when the engine sleeps, wakes or gets new weights: a part of ModelRunner, commanded by sleep.py and weights.py."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch

from shoal.config import EngineConfig
from shoal.engine.regions import CpuRegions
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import Decoder
from shoal.weights.loader import load_weights
from shoal.weights.source import resolve
from shoal.weights.transfer import Handle, WeightsGroup, open_tensor
from shoal.weights.update import checksums


class RankCommands:
    config: EngineConfig
    tp: TensorParallel
    device: torch.device
    model: Decoder
    regions: CpuRegions
    weights_groups: dict[str, WeightsGroup]

    # Sleep

    def reserve_host(self, tag: str) -> None:
        """Makes sure of the host memory that keeping `tag` takes. Raises if there is not enough; then nothing has changed."""
        self.regions.reserve_host(tag)

    def release_memory(self, tags: Sequence[str], kept: Sequence[str]) -> dict[str, int]:
        """Gives back the memory of `tags`, after copying those in `kept` to the host. What sleeps already stays so; of a tag asleep that is
        not in `kept`, the host's copy is dropped."""
        gc.collect()
        report = self.regions.release(list(tags), list(kept))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()    # activations of the largest step
        return report

    def take_memory(self, tags: Sequence[str]) -> dict[str, int]:
        """Takes it again, at the same addresses, with the content that was kept. Raises, and changes nothing, if there is not enough."""
        return self.regions.take(list(tags))

    def memory_usage(self) -> dict[str, dict[str, int]]:
        return self.regions.usage()

    # Weights

    def load_checkpoint(self, path: str, dummy: bool) -> None:
        load_weights(self.model, resolve(path), dummy=dummy, show_progress=self.tp.rank == 0)
        self._finish()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.model.begin_loading(tensors)
        for name, tensor in tensors.items():
            self.model.load_weight(name, tensor)
        self.model.finish_loading()
        self._finish()

    def load_shared(self, handles: Sequence[Handle]) -> None:
        self.model.begin_loading(h["name"] for h in handles)
        for handle in handles:
            self.model.load_weight(handle["name"], open_tensor(handle))
        self.model.finish_loading()
        self._finish()

    def join_weights_group(self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str) -> None:
        device = self.device if backend == "nccl" else torch.device("cpu")
        self.weights_groups[group_name] = WeightsGroup(address, port, rank_offset + self.tp.rank, world_size, group_name, backend, device)

    def leave_weights_group(self, group_name: str) -> None:
        group = self.weights_groups.pop(group_name, None)
        if group is not None:
            group.close()

    def receive_weights(self, listed: Sequence[tuple[str, str, Sequence[int]]], taken: Sequence[str], group_name: str) -> None:
        """One whole tensor at a time; those that are not `taken` follow from others."""
        group, names = self.weights_groups[group_name], set(taken)
        self.model.begin_loading(names)
        for name, dtype, shape in listed:
            tensor = group.broadcast(torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=group.device))
            if name in names:
                self.model.load_weight(name, tensor)
        self.model.finish_loading()
        self._finish()

    def checksums(self) -> dict[str, str]:
        return checksums(self.model)

    def _finish(self) -> None:
        """Sources may be let go when a command has returned: all copies have ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
