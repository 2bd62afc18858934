"""Rendezvous: how the ranks of an engine meet and make their process group.

Each engine builds a process group of its own, not torch.distributed's global one, so that engines can follow
each other or live side by side in a process. The ranks meet at a store that rank 0 opens on the loopback
address, at a port that the kernel picks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import EngineDeadError
from shoal.layers.parallel import TensorParallel

LOOPBACK = "127.0.0.1"
# Each rank has to start Python and to import torch. Eight of them may do so at once, from a cold disk.
RENDEZVOUS_TIMEOUT_S = 120.0
# The most that one rank may lag behind another, also while it loads weights. A rank that died is noticed at
# once, without this limit.
COLLECTIVE_TIMEOUT_S = 600.0


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


def join(
    rank: int, size: int, device: str | torch.device, port: int, timeout_s: float = RENDEZVOUS_TIMEOUT_S
) -> TensorParallel:
    """For ranks 1 and up: meets the others at rank 0's store. Raises EngineDeadError if they don't come in
    time."""
    try:
        store = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=timeout_s))
        return _meet(store, rank, size, device, timeout_s, None)
    except RuntimeError as error:
        raise _no_rendezvous(rank, port, timeout_s, error) from error


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
