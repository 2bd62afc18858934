"""TensorParallel: the collectives of one engine's ranks, by NCCL on GPUs and by Gloo on the CPU. For one rank
they do nothing.

Each engine builds a process group of its own, not torch.distributed's global one, so that engines can follow
each other or live side by side in a process. The ranks meet at a store that rank 0 opens on the loopback
address, at a port that the kernel picks (`Rendezvous`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shoal.errors import EngineDeadError

LOOPBACK = "127.0.0.1"
# Each rank has to start Python and to import torch. Eight of them may do so at once, from a cold disk.
RENDEZVOUS_TIMEOUT_S = 120.0
# The most that one rank may lag behind another, also while it loads weights. A rank that died is noticed at
# once, without this limit.
COLLECTIVE_TIMEOUT_S = 600.0


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
        self.waits = False  # whether this rank waits for others in a collective; another thread may look
        self._group = group  # a ProcessGroupNCCL or ProcessGroupGloo; torch's stubs don't know their methods

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> TensorParallel:
        return cls(0, 1, torch.device(device), None)

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        device: str | torch.device,
        port: int,
        timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    ) -> TensorParallel:
        """For ranks 1 and up: meets the others at rank 0's store. Raises EngineDeadError if they don't come
        in time."""
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(LOOPBACK, port, None, False, limit)
            return _meet(store, rank, size, device, timeout_s, None)
        except RuntimeError as error:
            raise _no_rendezvous(rank, port, timeout_s, error) from error

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


class Rendezvous:
    """Rank 0's side of the meeting. `port` is open as soon as this exists; give it to the other ranks."""

    def __init__(self) -> None:
        # The store's own socket would listen on every interface, and it trusts every client.
        listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK,
            self.port,
            None,
            True,
            timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def connect(
        self,
        rank: int,
        size: int,
        device: str | torch.device,
        check: Callable[[], None] | None = None,
        timeout_s: float = RENDEZVOUS_TIMEOUT_S,
    ) -> TensorParallel:
        """Waits for the other ranks. Meanwhile `check` is called, which raises if one of them has died.
        Raises EngineDeadError if they don't come in time."""
        try:
            return _meet(self._store, rank, size, device, timeout_s, check)
        except RuntimeError as error:
            if isinstance(error, EngineDeadError):
                raise
            raise _no_rendezvous(rank, self.port, timeout_s, error) from error


def _meet(
    store: dist.Store,
    rank: int,
    size: int,
    device: str | torch.device,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> TensorParallel:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + timeout_s
    store.set(f"here/{rank}", "")
    while missing := [r for r in range(size) if not store.check([f"here/{r}"])]:
        if check is not None:
            check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {missing} of {size} did not come")
        time.sleep(0.01)
    tp = TensorParallel(
        rank, size, device, _build_group(dist.PrefixStore("group", store), rank, size, device)
    )
    # NCCL connects at the first collective. It is this one, before memory is measured and graphs are
    # captured.
    tp.barrier()
    return tp


def _build_group(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    limit = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    # By default Gloo takes the address of the host's name, which may lead nowhere.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _no_rendezvous(rank: int, port: int, timeout_s: float, error: RuntimeError) -> EngineDeadError:
    return EngineDeadError(
        f"rank {rank} did not meet the other ranks at {LOOPBACK}:{port} within {timeout_s:g} s: {error}"
    )
