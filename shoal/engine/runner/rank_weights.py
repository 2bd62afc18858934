"""`RankWeights`: one rank's part in new weights and checksums. engine/lifecycle/weight_updates.py decides
what is loaded; weights/loader.py reads checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from shoal.engine.drafting.rank_head import RankHead, weights_of
from shoal.engine.runner.rank_export import RankExporter, encode
from shoal.errors import ShoalError
from shoal.layers.parallel import TensorParallel
from shoal.models.checkpoint_names import Part
from shoal.models.decoder import Decoder
from shoal.models.loading import Loading
from shoal.weights.loader import load_weights
from shoal.weights.source import resolve
from shoal.weights.trainer_names import trainer_parts
from shoal.weights.transfer import Handle, Listed, WeightsGroup, open_tensor
from shoal.weights.update import checksums


class RankWeights:
    """New weights are written into the memory of the old ones. Each way of loading raises CheckpointError for
    what does not fit the model, and returns when the device has them."""

    def __init__(
        self, model: Decoder, tp: TensorParallel, device: torch.device, head: RankHead | None = None
    ) -> None:
        self.model, self.tp, self.device, self.head = model, tp, device, head
        self.groups: dict[str, WeightsGroup] = {}  # the trainers' process groups that this rank is in
        self._exporter: RankExporter | None = None  # while other workers may read the weights

    def load_checkpoint(self, path: str, dummy: bool) -> None:
        """Loads a whole checkpoint, with the draft head that it holds. `dummy`: makes weights up instead."""
        files = resolve(path)
        load_weights(self.model, files, dummy=dummy, show_progress=self.tp.rank == 0)
        if self.head is not None:
            self.head.follow(files, dummy)
        self._synchronize()

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads these whole tensors on rank 0, and broadcasts them to the other ranks, which call
        `load_broadcast` meanwhile."""

        def broadcast(tensor: torch.Tensor) -> torch.Tensor:
            if self.tp.size == 1:
                return tensor
            return self.tp.broadcast(tensor.detach().to(self.device).contiguous())

        self._load(tensors, ((name, broadcast(tensor)) for name, tensor in tensors.items()))

    def load_broadcast(self, listed: Sequence[Listed]) -> None:
        """Loads the tensors that rank 0 broadcasts. `listed`: names, dtypes and shapes, in rank 0's order."""
        tensors = (
            (name, self.tp.broadcast(empty(dtype, shape, self.device))) for name, dtype, shape in listed
        )
        self._load([name for name, _, _ in listed], tensors)

    def load_shared(self, handles: Sequence[Handle], taken: Sequence[str]) -> None:
        """Takes tensors that another process shares. `taken`: the decoder's names of those to load."""
        wanted = set(taken)

        def opened() -> Iterator[tuple[str, torch.Tensor]]:
            for handle in handles:
                parts = [part for part in self._parts(handle["name"], handle["shape"]) if part.name in wanted]
                if parts:
                    tensor = open_tensor(handle)
                    yield from ((part.name, part.take(tensor)) for part in parts)

        self._load(taken, opened())

    def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a trainer's process group as rank `rank_offset` + this rank. Returns when all have joined."""
        device = self.device if backend == "nccl" else torch.device("cpu")
        self.groups[group_name] = WeightsGroup(
            address, port, rank_offset + self.tp.rank, world_size, group_name, backend, device
        )

    def leave_group(self, group_name: str) -> None:
        """Does nothing if this rank is not in the group."""
        group = self.groups.pop(group_name, None)
        if group is not None:
            group.close()

    def receive(self, listed: Sequence[Listed], taken: Sequence[str], group_name: str) -> None:
        """Takes whole tensors from a trainer's group, one at a time, in the order of `listed`. `taken`: the
        decoder's names of those to load; others are derived from these, and are dropped."""
        group = self.groups[group_name]

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, dtype, shape in listed:
                tensor = group.broadcast(empty(dtype, shape, group.device))
                for part in self._parts(name, shape):
                    yield part.name, part.take(tensor)

        self._load(taken, received())

    def export(self) -> bytes:
        """Opens the weights to other workers, and returns a RankExport. Raises CheckpointError if they cannot
        be exported."""
        self.end_export()  # one that an interrupt has left
        self._exporter = RankExporter(self.model)
        return encode(self._exporter.export)

    def end_export(self) -> None:
        """Ends `export`. Does nothing if the weights are not exported."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()

    def checksums(self) -> dict[str, str]:
        """A checksum of each of this rank's tensors, by its name in the model."""
        return checksums(dict(weights_of(self.model, self.head)))

    def close(self) -> None:
        """Leaves all groups, and ends the export."""
        self.end_export()
        for name in list(self.groups):
            self.leave_group(name)

    def _parts(self, name: str, shape: Sequence[int]) -> Iterator[Part]:
        return trainer_parts(name, tuple(shape), self.model.config)

    def _load(self, names: Collection[str], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Takes every tensor, also after one that does not fit, because others take part in sending them. The
        sender may let the tensors go when this returns."""
        loading, wanted, first = Loading(self.model, names), set(names), None
        for name, tensor in tensors:
            try:
                if name in wanted:
                    loading.take(name, self._on_this_card(tensor))
            except ShoalError as error:
                first = first or error
        if first is not None:
            raise first
        loading.finish()
        self._synchronize()

    def _on_this_card(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy of it if it is on another GPU. Weights that can sleep are in memory
        that their own card alone may write, and a copy between cards is made by the sender's."""
        return tensor.to(self.device) if tensor.is_cuda and tensor.device != self.device else tensor

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def empty(dtype: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
