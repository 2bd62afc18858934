"""What transports have in common that see the owner's memory at addresses of their own: a pull is a copy
between two caches (kv/copy.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from shoal.kv.copy import copy_shards
from shoal.kv.layout import CacheSpec, LayoutError, shared_heads
from shoal.kv.storage import Kind, Storage, StorageError
from shoal.kv.ticket import NO_MESSAGE, Failure, TransferError, WindowAddress
from shoal.kv.transport import TransportError
from shoal.kv.view import BlockView

T = TypeVar("T")


@functools.cache
def boot_id() -> str:
    """Names this host, and this run of its kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def one_piece(view: BlockView) -> tuple[int, int]:
    """The address and the bytes of a cache that lies as `BlockView.over` says. Raises TransportError for any
    other."""
    expected = BlockView.over(
        view.spec, ForeignMemory(view.storage.kind, view.spec.num_bytes, view.storage.device, 0)
    )
    address = int(view.addresses[0])
    if view.strides != expected.strides or (view.addresses - address != expected.addresses).any():
        raise TransportError(
            f"a cache of shape {view.spec.shape} does not lie in one piece, so it can't be read by others; "
            "allocate it as one"
        )
    return address, view.spec.num_bytes


def check_fit(specs: Sequence[CacheSpec], into: CacheSpec) -> None:
    """Raises TransferError unless these ranks' blocks can become blocks of `into`."""
    try:
        shared_heads(specs, [into])
    except LayoutError as error:
        raise TransferError(
            Failure.INCOMPATIBLE,
            f"{error}; workers that hand blocks over need the same model, dtype and block_size",
        ) from None


def some_layers(view: BlockView, layers: range) -> BlockView:
    """The same blocks with these layers alone."""
    spec = replace(view.spec, num_layers=len(layers))
    return BlockView(spec, [view.layer(i, mutable=True) for i in layers])


class ForeignMemory(Storage):
    """Memory of another process, seen at an address here. It is read by copies alone, and whoever makes it
    keeps it mapped."""

    def __init__(self, kind: Kind, num_bytes: int, device: torch.device, address: int) -> None:
        super().__init__(kind, num_bytes, device)
        self._address = address

    @property
    def address(self) -> int:
        return self._address

    def tensor(self) -> torch.Tensor:
        raise StorageError("another process's memory is no tensor here: copy blocks out of it")

    def read(self, offset: int, into: np.ndarray) -> None:
        raise StorageError("another process's memory is read by copies of blocks alone")

    def write(self, offset: int, data: np.ndarray) -> None:
        raise StorageError("another process's memory is only read")

    def _let_go(self) -> None: ...


def decode(window: WindowAddress, kind: type[T]) -> T:
    """A transport's own part of an address. Raises TransferError for anything else."""
    try:
        return msgspec.msgpack.decode(window.memory, type=kind)
    except NO_MESSAGE as error:
        raise TransferError(
            Failure.DAMAGED, f"no address of a window of {window.transport}: {error}"
        ) from None


class CopyPull:
    """A pull that is a copy: over when it is made, on the host, or when its event comes."""

    def __init__(self, num_bytes: int, event: torch.cuda.Event | None) -> None:
        self.num_bytes = num_bytes
        self._event = event

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def cancel(self) -> None:
        """A copy that is queued can't be called back, so this waits for it."""
        if self._event is not None:
            self._event.synchronize()


class MappedPeer:
    """Copies out of `views`, each of one rank of the owner. `release` lets go of their memory."""

    def __init__(self, views: Sequence[BlockView], into: BlockView, release: Callable[[], None]) -> None:
        check_fit([view.spec for view in views], into.spec)
        self._views, self._into, self._release = list(views), into, release
        self._stream = torch.cuda.Stream(into.storage.device) if into.storage.kind is Kind.DEVICE else None

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range) -> CopyPull:
        srcs = [some_layers(view, layers) for view in self._views]
        into = some_layers(self._into, layers)
        event = copy_shards(srcs, src_ids, [into], dst_ids, self._stream)
        return CopyPull(len(dst_ids) * into.spec.block_bytes, event)

    def close(self) -> None:
        self._views = []
        release, self._release = self._release, lambda: None
        release()
