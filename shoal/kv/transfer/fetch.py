"""Fetches the blocks of a ticket into a local cache, possibly while their owner is still computing them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.kv.transfer.lease import Lease
from shoal.kv.transfer.registry import Transports
from shoal.kv.transfer.ticket import ExportAddress, Failure, Progress, Ticket, TransferError
from shoal.kv.transfer.transport import CacheViews, Peer, Pull

MAX_IDLE_PEERS = 16
IDLE_S = 60.0  # a connection that was unused for this long is closed
WATCH_S = 0.5  # maximum time between checks for cancellation
POLL_S = 0.00005
PATIENCE_S = 60.0
# Failures after which a connection is not used again
BROKEN = (Failure.LOST, Failure.LATE, Failure.NONSENSE, Failure.UNREACHABLE, Failure.INCOMPATIBLE)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch. `seconds` is the time in which bytes were under way; time spent waiting for the
    owner to compute blocks is not included."""

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _OwnerConnection:
    """A connection to one peer. It connects under `lock`, and has no `peer` before."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    transport: str = ""
    peer: Peer | None = None
    users: int = 0
    used_at: float = 0.0
    is_good: bool = True


class BlockReader:
    """Connections of one cache to other workers, and fetches over them. Connecting is slow, so some idle
    connections are kept. Thread-safe. `model` identifies the model and its weights, as in the owners' offers.
    `now` is a clock in seconds."""

    def __init__(
        self,
        model: bytes,
        transports: Transports,
        into: CacheViews,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self._transports, self._into, self._now = transports, into, now
        self._lock = threading.Lock()
        self._connections: OrderedDict[tuple[tuple[ExportAddress, ...], ...], _OwnerConnection] = (
            OrderedDict()
        )

    def fetch(
        self,
        lease: Lease,
        positions: Sequence[int],
        dst_ids: Sequence[int],
        patience_s: float = PATIENCE_S,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        """Reads the blocks at these positions of the ticket into the local blocks `dst_ids`, pairwise.
        Positions ascend. Layers are read as soon as their owner has computed them. Returns when all bytes
        have arrived and the owner has confirmed that the blocks still have the ticket's content. The lease
        stays open.

        Raises TransferError, after which the destination holds anything: LATE if nothing arrived for
        `patience_s`, CANCELLED soon after `is_cancelled` returns True. In every case, the destination is no
        longer written after the call."""
        if len(positions) != len(dst_ids) or any(a >= b for a, b in pairwise(positions)):
            raise ValueError(
                f"positions must ascend and match dst_ids, got {len(positions)} positions and {len(dst_ids)} "
                "destinations"
            )
        if lease.ticket.model != self.model:
            raise TransferError(
                Failure.INCOMPATIBLE,
                f"the blocks belong to the model {lease.ticket.model!r}, and this worker runs {self.model!r}"
                "; workers that hand blocks over need the same weights, and with recurrent layers the same "
                "dtype and mamba_ssm_cache_dtype, too",
            )
        with self._connected(lease.ticket.ranks) as (transport, peer):
            pulls: list[Pull] = []
            num_bytes, seconds = 0, 0.0
            try:
                for parts in self._news(lease, positions, dst_ids, patience_s, is_cancelled):
                    started = self._now()
                    for part in parts:
                        pulls.append(peer.pull(*part))  # one by one, as the next pull may fail
                    self._wait(pulls, lease, patience_s, is_cancelled)
                    seconds += self._now() - started
                    num_bytes += sum(pull.num_bytes for pull in pulls)
                    pulls.clear()
                lease.verify()
            finally:
                for pull in pulls:
                    pull.cancel()
            return Fetched(transport, len(dst_ids), num_bytes, seconds)

    @property
    def num_connected(self) -> int:
        """Number of connections, in use or idle."""
        return len(self._connections)

    def tidy(self) -> None:
        """Closes connections that were unused for IDLE_S, and releases their memory. Call it regularly."""
        with self._lock:
            self._close_idle(self._now() - IDLE_S)

    def close(self) -> None:
        """Closes all connections; no fetch may be under way. Safe to call twice."""
        with self._lock:
            self._close_idle(float("inf"))

    def _news(
        self,
        lease: Lease,
        positions: Sequence[int],
        dst_ids: Sequence[int],
        patience_s: float,
        is_cancelled: Callable[[], bool],
    ) -> Iterator[list[tuple[list[int], Sequence[int], range, int]]]:
        """Yields the parts that can be pulled, as the owner reports them: (the owner's blocks, local blocks,
        layers, group of layers). Progress during the earlier pulls is yielded at once. Ends when all blocks
        were yielded."""
        blocks, num_layers = lease.ticket.blocks, lease.ticket.num_layers
        if positions and positions[-1] >= len(blocks):
            raise ValueError(
                f"positions must be less than the ticket's {len(blocks)} blocks, got {positions[-1]}"
            )
        seen, heard_at = Progress(), self._now()
        wanted = positions[-1] + 1 if positions else 0
        while True:
            current = lease.progress
            if current.layers > num_layers or max(current.whole, current.blocks) > len(blocks):
                raise TransferError(
                    Failure.NONSENSE,
                    f"{lease.ticket.server} reports more progress than the ticket has blocks",
                )
            parts = [
                part
                for which, layers in news(positions, seen, current, num_layers)
                for part in by_group(lease.ticket, positions[which], dst_ids[which], layers)
            ]
            if parts:
                yield parts
            if current.whole >= wanted:
                return
            if current != seen:
                heard_at = self._now()
            seen = current
            self._check(heard_at, patience_s, is_cancelled)
            lease.watch(min(WATCH_S, patience_s))

    def _wait(
        self, pulls: Sequence[Pull], lease: Lease, patience_s: float, is_cancelled: Callable[[], bool]
    ) -> None:
        """Waits until all bytes have arrived."""
        started = renewed_at = self._now()
        for pull in pulls:
            while not pull.done():
                self._check(started, patience_s, is_cancelled)
                if self._now() - renewed_at > lease.ticket.lease_s / 3:
                    lease.renew()
                    renewed_at = self._now()
                time.sleep(POLL_S)

    def _check(self, since: float, patience_s: float, is_cancelled: Callable[[], bool]) -> None:
        if is_cancelled():
            raise TransferError(Failure.CANCELLED, "the fetch was cancelled")
        if self._now() - since > patience_s:
            raise TransferError(Failure.LATE, f"no new data for {patience_s:g} s")

    @contextmanager
    def _connected(self, ranks: tuple[tuple[ExportAddress, ...], ...]) -> Iterator[tuple[str, Peer]]:
        with self._lock:
            connection = self._connections.setdefault(ranks, _OwnerConnection())
            connection.users += 1
        try:
            with connection.lock:
                if connection.peer is None:
                    connection.transport, connection.peer = self._transports.connect(ranks, self._into)
            yield connection.transport, connection.peer
        except TransferError as error:
            error.transport = connection.transport
            if error.failure in BROKEN:
                connection.is_good = False
            raise
        finally:
            with self._lock:
                connection.users -= 1
                connection.used_at = self._now()
                if self._connections.get(ranks) is connection:
                    if connection.is_good:
                        self._connections.move_to_end(ranks)
                    else:  # the next fetch connects anew
                        del self._connections[ranks]
                if not connection.is_good and not connection.users and connection.peer is not None:
                    connection.peer.close()
                self._close_idle(self._now() - IDLE_S)

    def _close_idle(self, used_before: float) -> None:
        """With the lock held."""
        idle = [ranks for ranks, connection in self._connections.items() if not connection.users]
        surplus = len(idle) - MAX_IDLE_PEERS
        for i, ranks in enumerate(idle):
            if i < surplus or self._connections[ranks].used_at <= used_before:
                peer = self._connections.pop(ranks).peer
                if peer is not None:
                    peer.close()


def news(
    positions: Sequence[int], seen: Progress, current: Progress, num_layers: int
) -> Iterator[tuple[slice, range]]:
    """Yields (slice of `positions`, layers) for the layers that `current` has and `seen` had not."""
    cuts = sorted({0, seen.whole, seen.blocks, current.whole, current.blocks})
    for start, stop in pairwise(cuts):
        which = slice(bisect_left(positions, start), bisect_left(positions, stop))
        layers = range(seen.layers_of(start, num_layers), current.layers_of(start, num_layers))
        if layers and which.start < which.stop:
            yield which, layers


def by_group(
    ticket: Ticket, positions: Sequence[int], dst_ids: Sequence[int], layers: range
) -> Iterator[tuple[list[int], Sequence[int], range, int]]:
    """Yields these blocks of a ticket group by group: (the owner's blocks, local blocks, layers, group). If
    there are several groups, blocks come with all their layers."""
    if not ticket.groups:
        yield [ticket.blocks[i] for i in positions], dst_ids, layers, 0
        return
    for group in sorted({ticket.groups[i] for i in positions}):
        which = [at for at, i in enumerate(positions) if ticket.groups[i] == group]
        src_ids = [ticket.blocks[positions[at]] for at in which]
        yield src_ids, [dst_ids[at] for at in which], range(ticket.specs[group].num_layers), group
