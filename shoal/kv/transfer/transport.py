"""How one worker reads the KV blocks of another: the protocol of all ways there are.

The owner opens an export over its cache and gives out the export's address, in tickets
(kv/transfer/ticket.py). A
reader connects its own cache to exports of the owner, and pulls blocks, layer by layer if it likes. Readers
pull and owners never push, so whoever has memory is the only one who writes it (docs/decisions/fleet.md).
Which ways there are, and in which order they are tried, says kv/transfer/registry.py."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

from shoal.errors import UserError
from shoal.kv.transfer.ticket import ExportAddress
from shoal.kv.view import BlockView


class TransportError(UserError):
    """Memory that no other worker can read as things are: of the wrong kind, or something is not
    installed."""


class Reach(IntEnum):
    """How far away a reader may be."""

    PROCESS = 1
    HOST = 2
    NETWORK = 3


class Export(Protocol):
    """A cache that others may read."""

    @property
    def address(self) -> ExportAddress:
        """Plain data. It has what is needed to read the memory, so it is given to readers alone."""
        ...

    def close(self) -> None:
        """Nobody can connect any more. Readers that did connect may read on, and their reads fail or are
        found out to be stale. Safe to call twice."""
        ...


class Pull(Protocol):
    """Blocks on their way. Until it is done or cancelled, the destination's blocks must be held."""

    num_bytes: int

    def done(self) -> bool:
        """Whether all bytes are there. Does not wait. Raises TransferError if they will not come."""
        ...

    def cancel(self) -> None:
        """When it returns, this pull writes nothing any more. Does nothing to one that is done."""
        ...


class Peer(Protocol):
    """The exports of another worker's ranks, connected to one cache here. Thread-safe, but for `close`."""

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range) -> Pull:
        """Begins to read these layers of the other worker's blocks `src_ids` into the blocks `dst_ids` here,
        pairwise: the heads that this rank has. What was there before is lost. Raises BlockCopyError for ids
        that can't be, and TransferError."""
        ...

    def close(self) -> None:
        """Lets go of the other worker's memory. All pulls are done or cancelled. Safe to call twice."""
        ...


class Transport(Protocol):
    """One way. Thread-safe."""

    name: str
    reach: Reach

    def export(self, view: BlockView) -> Export:
        """Raises TransportError if this memory can't be read by this way, with what would have to be
        different."""
        ...

    def connect(self, exports: Sequence[ExportAddress], into: BlockView) -> Peer:
        """`exports` are addresses of this transport, one for each of the owner's ranks that has heads of
        `into`. Raises TransferError, UNREACHABLE if this way does not lead from here to there, and
        TransportError if `into` can't be filled by this way."""
        ...
