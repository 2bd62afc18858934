"""Reads the blocks of a ticket into a cache here, while their owner may still be computing them."""

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
from shoal.kv.transfer.ticket import ExportAddress, Failure, Progress, TransferError
from shoal.kv.transfer.transport import Peer, Pull
from shoal.kv.view import BlockView

MAX_IDLE_PEERS = 16
IDLE_S = 60.0  # a connection that no fetch used for so long is closed
WATCH_S = 0.5  # at most; then it is looked whether the fetch was cancelled
POLL_S = 0.00005
PATIENCE_S = 60.0
# After these a connection is not used again
BROKEN = (Failure.LOST, Failure.LATE, Failure.NONSENSE, Failure.UNREACHABLE, Failure.INCOMPATIBLE)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch has brought. `seconds` counts the time in which bytes were under way, without that in
    which the owner computed the next ones."""

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _Connection:
    """`peer` is None until it is connected, which happens under the connection's lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    transport: str = ""
    peer: Peer | None = None
    users: int = 0
    used_at: float = 0.0
    is_good: bool = True


class BlockReader:
    """The workers to which one cache is connected, and fetches from them. Connecting takes long, so some
    connections are kept that no fetch uses. Thread-safe. `model` names the model and its weights, as the
    owners' offers do. `now` is a clock in seconds."""

    def __init__(
        self, model: bytes, transports: Transports, into: BlockView, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self._transports, self._into, self._now = transports, into, now
        self._lock = threading.Lock()
        self._connections: OrderedDict[tuple[tuple[ExportAddress, ...], ...], _Connection] = OrderedDict()

    def fetch(
        self,
        lease: Lease,
        positions: Sequence[int],
        dst_ids: Sequence[int],
        patience_s: float = PATIENCE_S,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Fetched:
        """Reads the blocks at these positions of the ticket into the blocks `dst_ids` here, pairwise.
        Positions ascend. Layers are read as soon as their owner has computed them. Returns when all bytes are
        there and the owner has confirmed that they are what the ticket means. The lease stays open.

        Raises TransferError, after which the destination holds anything: LATE if nothing new came for
        `patience_s`, CANCELLED soon after `is_cancelled` says so. However it ends, nothing writes into the
        destination any more."""
        if len(positions) != len(dst_ids) or any(a >= b for a, b in pairwise(positions)):
            raise ValueError("the positions of a fetch ascend, and each has a destination")
        if lease.ticket.model != self.model:
            raise TransferError(
                Failure.INCOMPATIBLE,
                f"the blocks are of the model {lease.ticket.model!r}, and this worker runs {self.model!r}",
            )
        with self._connected(lease.ticket.ranks) as (transport, peer):
            pulls: list[Pull] = []
            num_bytes, seconds = 0, 0.0
            try:
                for parts in self._news(lease, positions, dst_ids, patience_s, is_cancelled):
                    started = self._now()
                    for part in parts:
                        pulls.append(peer.pull(*part))  # kept at once: the next one may fail
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
        """The connections that there are, in use or kept."""
        return len(self._connections)

    def tidy(self) -> None:
        """Closes connections that no fetch used for IDLE_S, and lets go of the memory behind them. To be
        called now and then."""
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
    ) -> Iterator[list[tuple[list[int], Sequence[int], range]]]:
        """What can be pulled, as it becomes known: blocks of the owner, blocks here, layers. What became
        known while the parts before were pulled comes at once. Ends when all of it was told."""
        blocks, num_layers = lease.ticket.blocks, lease.ticket.spec.num_layers
        if positions and positions[-1] >= len(blocks):
            raise ValueError(f"position {positions[-1]} is beyond the ticket's {len(blocks)} blocks")
        seen, heard_at = Progress(), self._now()
        wanted = positions[-1] + 1 if positions else 0
        while True:
            current = lease.progress
            if current.layers > num_layers or max(current.whole, current.blocks) > len(blocks):
                raise TransferError(
                    Failure.NONSENSE, f"{lease.ticket.server} says that more is there than can be"
                )
            parts = [
                ([blocks[i] for i in positions[which]], dst_ids[which], layers)
                for which, layers in news(positions, seen, current, num_layers)
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
        """Until all bytes are there."""
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
            raise TransferError(Failure.LATE, f"nothing new came for {patience_s:g} s")

    @contextmanager
    def _connected(self, ranks: tuple[tuple[ExportAddress, ...], ...]) -> Iterator[tuple[str, Peer]]:
        with self._lock:
            connection = self._connections.setdefault(ranks, _Connection())
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
                    else:  # whoever comes next connects anew
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
    """Which of the positions, as a slice, have which layers now that they did not have before."""
    cuts = sorted({0, seen.whole, seen.blocks, current.whole, current.blocks})
    for start, stop in pairwise(cuts):
        which = slice(bisect_left(positions, start), bisect_left(positions, stop))
        layers = range(seen.layers_of(start, num_layers), current.layers_of(start, num_layers))
        if layers and which.start < which.stop:
            yield which, layers
