"""What each rank does when the engine sleeps, wakes or gets new weights: a part of ModelRunner, commanded by
sleep.py and weights.py."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from shoal.config import ResolvedConfig
from shoal.engine.runner.rank_memory import CpuRegions, GpuRegions
from shoal.engine.runner.sampling import LogitShaper
from shoal.errors import ShoalError, UnavailableError
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import Decoder
from shoal.weights.loader import load_weights
from shoal.weights.source import resolve
from shoal.weights.transfer import Handle, Listed, WeightsGroup, open_tensor
from shoal.weights.update import checksums


class RankCommands:
    config: ResolvedConfig
    tp: TensorParallel
    device: torch.device
    model: Decoder
    shaper: LogitShaper
    regions: CpuRegions | GpuRegions
    weights_groups: dict[str, WeightsGroup]

    # Sleep

    def release_memory(self, tags: Sequence[str], kept: Sequence[str]) -> dict[str, int]:
        """Gives back the memory of `tags`, after copying those in `kept` to the host. What sleeps already
        stays so; of a tag asleep that is not in `kept`, the host's copy is dropped. Raises UnavailableError,
        with nothing changed, if there is no host memory to copy to."""
        with not_now():
            report = self.regions.release(list(tags), list(kept))
        if "kv_cache" in tags:  # every sequence gives back its row
            self.shaper.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # activations of the largest step
        return report | self.regions.in_use()

    def take_memory(self, tags: Sequence[str]) -> dict[str, int]:
        """Takes it again, at the same addresses, with the content that was kept. Raises UnavailableError,
        with nothing changed, if there is not enough."""
        with not_now():
            return self.regions.take(list(tags))

    def wait_for_host(self) -> float:
        """Until the host memory of a level 1 sleep is ready. Seconds since its preparation began."""
        return self.regions.wait_for_host()

    def memory_usage(self) -> dict[str, dict[str, int]]:
        return self.regions.usage()

    # Weights

    def load_checkpoint(self, path: str, dummy: bool) -> None:
        load_weights(self.model, resolve(path), dummy=dummy, show_progress=self.tp.rank == 0)
        self._synchronize()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Of rank 0, which has them and tells the others (load_broadcast)."""

        def told(tensor: torch.Tensor) -> torch.Tensor:
            return (
                tensor
                if self.tp.size == 1
                else self.tp.broadcast(tensor.detach().to(self.device).contiguous())
            )

        self._load(tensors, ((name, told(tensor)) for name, tensor in tensors.items()))

    def load_broadcast(self, listed: Sequence[Listed]) -> None:
        tensors = (
            (name, self.tp.broadcast(empty(dtype, shape, self.device))) for name, dtype, shape in listed
        )
        self._load([name for name, _, _ in listed], tensors)

    def load_shared(self, handles: Sequence[Handle]) -> None:
        self._load([h["name"] for h in handles], ((h["name"], open_tensor(h)) for h in handles))

    def join_weights_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        device = self.device if backend == "nccl" else torch.device("cpu")
        self.weights_groups[group_name] = WeightsGroup(
            address, port, rank_offset + self.tp.rank, world_size, group_name, backend, device
        )

    def leave_weights_group(self, group_name: str) -> None:
        group = self.weights_groups.pop(group_name, None)
        if group is not None:
            group.close()

    def receive_weights(self, listed: Sequence[Listed], taken: Sequence[str], group_name: str) -> None:
        """One whole tensor at a time; those that are not `taken` follow from others."""
        group = self.weights_groups[group_name]
        self._load(
            taken,
            ((name, group.broadcast(empty(dtype, shape, group.device))) for name, dtype, shape in listed),
        )

    def checksums(self) -> dict[str, str]:
        return checksums(self.model)

    def _load(self, names: Collection[str], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Every tensor is taken, an unfit one too, as others take part in sending it. They may be let go when
        this returns."""
        self.model.begin_loading(names)
        wanted, first = set(names), None
        for name, tensor in tensors:
            try:
                if name in wanted:
                    self.model.load_weight(name, tensor)
            except ShoalError as error:
                first = first or error
        if first is not None:
            raise first
        self.model.finish_loading()
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def not_now() -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UnavailableError(f"{error}; nothing has changed, try again when there is more") from error


def empty(dtype: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
