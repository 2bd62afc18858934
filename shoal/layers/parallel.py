"""TensorParallel: the collectives of one engine's ranks, by NCCL on GPUs and by Gloo on the CPU. For one rank
they do nothing. How the ranks meet is in engine/ranks/rendezvous.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from shoal.layers.pieces import LargeSums


class PeerSums(Protocol):
    """Sums of small tensors over the ranks by other means than the group's (engine/ranks/peer_sums.py). What
    it takes depends on shapes alone, as all ranks must decide alike."""

    def takes(self, x: torch.Tensor) -> bool: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks, in place, and returns it."""

    def takes_rows(self, x_TD: torch.Tensor) -> bool: ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += the sum of the ranks' x, in place; returns the norm of that."""

    def release(self) -> None:
        """Ends all waits for other ranks. Any thread may call it."""


class TensorParallel:
    """This rank's number, and what the ranks do together. Every rank must make the same calls in the same
    order."""

    def __init__(self, rank: int, size: int, device: torch.device, group: Any | None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.sums: PeerSums | None = None  # for what it takes; the group sums the rest
        self.large_sums: LargeSums | None = None
        self.waits = False  # whether this rank waits for others in a collective; another thread may look
        self._group = group  # a ProcessGroupNCCL or ProcessGroupGloo; torch's stubs don't know their methods

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> TensorParallel:
        return cls(0, 1, torch.device(device), None)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks, in place, and returns it. x must be contiguous."""
        if self.sums is not None and self.sums.takes(x):
            return self.sums.all_reduce(x)
        if self._group is not None:
            options = dist.AllreduceOptions()
            # With NCCL the kernel then goes onto the current stream, and not onto NCCL's own between two
            # events. So there is nothing to wait for, the caching allocator needs no record_stream, and a
            # graph captures one node instead of three.
            options.asyncOp = False
            self._finish(self._group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors (of equal shapes) joined along `dim` in rank order."""
        if self._group is None:
            return x
        joined = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        options = dist.distributed_c10d.AllgatherOptions()
        options.asyncOp = False
        self._finish(self._group._allgather_base(joined.view(-1), x.contiguous().view(-1), options))
        shape = list(x.shape)
        shape[dim] *= self.size
        return joined.movedim(0, dim - 1 if dim < 0 else dim).reshape(shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrites x with rank 0's, and returns it."""
        if self._group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.asyncOp = False
            self._finish(self._group.broadcast([x], options))
        return x

    def _finish(self, work: dist.Work | None) -> None:
        """With Gloo, waits until the result is here, and raises RuntimeError if a rank has died. With NCCL
        there is nothing to wait for, as the current stream is in order."""
        if work is not None:
            self.waits = True
            try:
                work.wait()
            finally:
                self.waits = False

    def barrier(self) -> None:
        """Returns when every rank has come here, with this rank's device idle."""
        self.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abort(self) -> None:
        """Breaks off collectives that run on a GPU, so that nobody waits for a rank that is gone. Any thread
        may call it."""
        group = self._group
        if self.sums is not None:
            self.sums.release()
        if group is not None and self.device.type == "cuda":
            group.abort()

    def close(self) -> None:
        """Ends the group without asking the other ranks, which may be dead. Collectives that still run on a
        GPU are aborted. Safe to call twice."""
        group, self._group = self._group, None
        sums, self.sums = self.sums, None
        if sums is not None:
            sums.release()
        if group is not None and self.device.type == "cuda":
            group.abort()
