"""Offers: the KV blocks that other workers may read, with their readers, progress and leases. No I/O, and no
torch.

An offer begins with a ticket (kv/transfer/ticket.py). It ends when a reader releases it, when all its readers
have left, when its lease expires, or when the owner withdraws it. The owner holds the blocks from the
beginning until `take_ended` returns the offer. Readers' calls come from other threads
(kv/transfer/offer_server.py).
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.kv.transfer.ticket import (
    ID_BYTES,
    ExportAddress,
    Failure,
    Progress,
    Ticket,
    TransferError,
    digest_of,
    seal,
)

LEASE_S = 30.0
REMEMBERED = 4096  # ended offers, so that a late reader gets the reason


@dataclass(frozen=True, slots=True)
class EndedOffer:
    """An offer whose blocks may be released. Without a `failure`, a reader released it."""

    id: bytes
    blocks: tuple[int, ...]
    failure: Failure | None
    message: str


@dataclass(slots=True)
class _Offer:
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    num_layers: int
    digest: bytes
    deadline: float
    progress: Progress
    readers: set[object] = field(default_factory=set)


class Offers:
    """`model` names the model and its weights, in at most 64 bytes: a reader with another name computes the
    blocks itself. `ranks` has the addresses of each rank's exports. `generation_of(block)` changes whenever
    something else is put into a block (`BlockPool.generation`). `now` is a clock in seconds."""

    def __init__(
        self,
        model: bytes,
        ranks: Sequence[Sequence[ExportAddress]],
        generation_of: Callable[[int], int],
        now: Callable[[], float],
        lease_s: float = LEASE_S,
    ) -> None:
        self.model = model
        self.ranks = tuple(tuple(addresses) for addresses in ranks)
        self.lease_s = lease_s
        self.server = ""  # where readers ask; kv/transfer/offer_server.py writes it
        self._on_change: Callable[[], None] = lambda: None
        self._generation_of, self._now = generation_of, now
        self._lock = threading.Lock()
        self._offers: dict[bytes, _Offer] = {}
        self._ended: list[EndedOffer] = []
        self._past: OrderedDict[bytes, TransferError] = OrderedDict()

    def call_on_change(self, on_change: Callable[[], None]) -> None:
        """Replaces the callback for changes that a waiting reader may need. It runs in any thread and with
        a lock held, so it must only wake another thread."""
        with self._lock:
            self._on_change = on_change

    # The owner's calls

    def offer(
        self, blocks: Sequence[int], whole: int = 0, keys: Sequence[bytes] = (), groups: Sequence[int] = ()
    ) -> bytes:
        """Returns a sealed ticket for these blocks; the first `whole` have all their bytes already. They
        are in the order of a sequence, with the keys of their content, and the caller holds them. `groups`:
        each block's group of layers, where there are several."""
        offered = tuple(blocks)
        ticket = Ticket(
            id=secrets.token_bytes(ID_BYTES),
            server=self.server,
            model=self.model,
            lease_s=self.lease_s,
            blocks=offered,
            generations=tuple(map(self._generation_of, offered)),
            keys=tuple(keys),
            groups=tuple(groups),
            ranks=self.ranks,
        )
        sealed = seal(ticket)
        with self._lock:
            self._offers[ticket.id] = _Offer(
                offered,
                ticket.generations,
                ticket.num_layers,
                digest_of(sealed),
                self._now() + self.lease_s,
                Progress(whole, whole, 0),
            )
        return sealed

    def advance(self, ticket_id: bytes, num_blocks: int, num_layers: int) -> None:
        """Records that the first `num_blocks` blocks have their first `num_layers` layers. Whole blocks
        stay whole. A step's blocks come layer by layer, before the next step's blocks. Does nothing if the
        offer has ended."""
        with self._lock:
            offer = self._offers.get(ticket_id)
            if offer is None:
                return
            whole = offer.progress.whole
            if num_layers >= offer.num_layers:
                whole = max(whole, num_blocks)
                offer.progress = Progress(whole, whole, 0)
            elif num_blocks > whole:
                offer.progress = Progress(whole, num_blocks, num_layers)
            self._on_change()

    def withdraw(self, message: str, ticket_id: bytes | None = None) -> None:
        """Ends an offer, or all of them: the request was aborted here, or the weights changed."""
        with self._lock:
            for known in [ticket_id] if ticket_id is not None else list(self._offers):
                if known in self._offers:
                    self._end(known, Failure.ENDED, message)

    def expire(self) -> None:
        """Ends offers whose lease has expired. Must be called from time to time."""
        with self._lock:
            for ticket_id, offer in list(self._offers.items()):
                if offer.deadline <= self._now():
                    self._end_late(ticket_id)

    def take_ended(self) -> list[EndedOffer]:
        """Returns the offers that ended since the last call; the caller releases their blocks."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def held(self) -> list[int]:
        """Returns every block held for an offer, once for each offer; ended ones count until `take_ended`."""
        with self._lock:
            blocks = [block for offer in self._offers.values() for block in offer.blocks]
            return blocks + [block for ended in self._ended for block in ended.blocks]

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        return len(self._offers)

    # The readers' calls. `reader` is an object that stands for one connection. All raise TransferError.

    def open(self, ticket_id: bytes, digest: bytes, reader: object) -> Progress:
        """Adds a reader that shows a ticket, which must be the one that was given out."""
        with self._lock:
            offer = self._live(ticket_id)
            if not secrets.compare_digest(offer.digest, digest):
                raise TransferError(Failure.FORGED, "this is not the ticket that was given out under its id")
            self._check_blocks(offer)
            offer.readers.add(reader)
            self._renew(offer)
            return offer.progress

    def progress(self, ticket_id: bytes) -> Progress:
        """Returns the progress. Does not renew the lease."""
        with self._lock:
            return self._live(ticket_id).progress

    def renew(self, ticket_id: bytes) -> None:
        with self._lock:
            self._renew(self._live(ticket_id))

    def verify(self, ticket_id: bytes) -> None:
        """Raises STALE unless all bytes read before this call match the ticket. A reader calls it when all
        its bytes have arrived: a block that was reused meanwhile has another generation by now."""
        with self._lock:
            offer = self._live(ticket_id)
            self._check_blocks(offer)
            self._renew(offer)

    def release(self, ticket_id: bytes) -> None:
        """Ends the offer: the reader has all it needs."""
        with self._lock:
            self._live(ticket_id)
            self._end(ticket_id, None, "a reader was done with it")

    def leave(self, ticket_id: bytes, reader: object) -> None:
        """Removes a reader whose connection has ended. The offer ends with its last reader."""
        with self._lock:
            offer = self._offers.get(ticket_id)
            if offer is None or reader not in offer.readers:
                return
            offer.readers.remove(reader)
            if not offer.readers:
                self._end(ticket_id, Failure.LOST, "its reader went away")

    # Inside, with the lock held

    def _live(self, ticket_id: bytes) -> _Offer:
        offer = self._offers.get(ticket_id)
        if offer is not None and offer.deadline <= self._now():
            self._end_late(ticket_id)
            offer = None
        if offer is None:
            unknown = TransferError(Failure.UNKNOWN, "no ticket of this id was given out here lately")
            past = self._past.get(ticket_id, unknown)
            raise TransferError(past.failure, str(past))
        return offer

    def _renew(self, offer: _Offer) -> None:
        offer.deadline = self._now() + self.lease_s

    def _check_blocks(self, offer: _Offer) -> None:
        for block, generation in zip(offer.blocks, offer.generations):
            if self._generation_of(block) != generation:
                raise TransferError(Failure.STALE, f"something else was put into block {block}")

    def _end_late(self, ticket_id: bytes) -> None:
        self._end(ticket_id, Failure.EXPIRED, f"its lease of {self.lease_s:g} s was not renewed in time")

    def _end(self, ticket_id: bytes, failure: Failure | None, message: str) -> None:
        offer = self._offers.pop(ticket_id)
        self._ended.append(EndedOffer(ticket_id, offer.blocks, failure, message))
        reason = f"the ticket has ended: {message}"
        self._past[ticket_id] = TransferError(failure or Failure.ENDED, reason)
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
        self._on_change()
