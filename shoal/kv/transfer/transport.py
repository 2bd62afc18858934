"""The protocol of transports: how one worker reads the KV blocks of another.

The owner exports its cache and gives out the export's address, in tickets (kv/transfer/ticket.py). A reader
connects its own cache to the owner's exports, and pulls blocks, layer by layer or all layers at once. Readers
pull and owners never push, so each worker alone writes its own memory (docs/decisions/fleet.md). The
transports and their order are in kv/transfer/registry.py."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from shoal.errors import UserError
from shoal.kv.transfer.ticket import ExportAddress
from shoal.kv.view import BlockView

CacheViews = Sequence[BlockView]  # one cache: a view of the same memory for each group of layers


class TransportError(UserError):
    """This memory can't be exported: it is of the wrong kind, or a package is missing."""


class Reach(IntEnum):
    """The distance of a reader."""

    PROCESS = 1
    HOST = 2
    NETWORK = 3


class Export(Protocol):
    """An exported cache, which others may read."""

    @property
    def address(self) -> ExportAddress:
        """Plain data that grants access to the memory, so it is given to readers alone."""
        ...

    def close(self) -> None:
        """Ends the export: no reader can connect any more. Connected readers may read on, and their reads
        fail or turn out stale. Safe to call twice."""
        ...


class Pull(Protocol):
    """A read in flight. The destination's blocks must be held until it is done or cancelled."""

    num_bytes: int

    def done(self) -> bool:
        """Says if all bytes are there. Does not wait. Raises TransferError if they will not come."""
        ...

    def cancel(self) -> None:
        """Ends the pull: it writes nothing after this call. Does nothing if it is done."""
        ...


class Peer(Protocol):
    """The exports of another worker's ranks, connected to one cache here. Thread-safe, but for `close`."""

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range, group: int = 0) -> Pull:
        """Begins to read these layers of the other worker's blocks `src_ids`, which belong to one group of
        layers, into the blocks `dst_ids` here, pairwise: the heads that this rank has. What was there before
        is lost. Raises BlockCopyError for ids that can't be, and TransferError."""
        ...

    def close(self) -> None:
        """Releases the other worker's memory. All pulls must be done or cancelled. Safe to call twice."""
        ...


class Transport(Protocol):
    """One way to read another worker's memory. Thread-safe."""

    name: str
    reach: Reach

    def export(self, views: CacheViews) -> Export:
        """Exports a cache. Raises TransportError, with the way out, if this transport can't read its
        memory."""
        ...

    def connect(self, exports: Sequence[ExportAddress], into: CacheViews) -> Peer:
        """`exports` are addresses of this transport, one for each of the owner's ranks that has heads of
        `into`. Raises TransferError, UNREACHABLE if this transport does not reach the owner, and
        TransportError if it can't write into `into`."""
        ...
