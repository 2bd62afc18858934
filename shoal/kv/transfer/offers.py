"""The owner's books of the KV blocks that other workers may read: who may, how much is there, and for how
long the blocks are held. No I/O, and no torch.

An offer begins with a ticket (kv/transfer/ticket.py). It ends when a reader is done, when all its readers
have left,
when nobody renewed it in time, or when the owner takes it back. The blocks must be held for it from the
beginning until `take_ended` tells of its end. Readers' calls come from other threads
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
REMEMBERED = 4096  # ended offers, so that a late reader is told why


@dataclass(frozen=True, slots=True)
class EndedOffer:
    """Its blocks need not be held any more. `failure` is None if a reader was done with them."""

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
        """It is called after each change that a waiting reader may want to know of, in any thread and with a
        lock held, so it must only wake somebody. Nobody calls the one before any more."""
        with self._lock:
            self._on_change = on_change

    # The owner's calls

    def offer(self, blocks: Sequence[int], whole: int = 0, keys: Sequence[bytes] = ()) -> bytes:
        """A ticket for these blocks, sealed, of which the first `whole` have all their bytes already. They
        are in the order of a sequence, with the keys of their content, and the caller holds them."""
        offered = tuple(blocks)
        ticket = Ticket(
            id=secrets.token_bytes(ID_BYTES),
            server=self.server,
            model=self.model,
            lease_s=self.lease_s,
            blocks=offered,
            generations=tuple(map(self._generation_of, offered)),
            keys=tuple(keys),
            ranks=self.ranks,
        )
        sealed = seal(ticket)
        with self._lock:
            self._offers[ticket.id] = _Offer(
                offered,
                ticket.generations,
                ticket.spec.num_layers,
                digest_of(sealed),
                self._now() + self.lease_s,
                Progress(whole, whole, 0),
            )
        return sealed

    def advance(self, ticket_id: bytes, num_blocks: int, num_layers: int) -> None:
        """The first `num_blocks` blocks have their first `num_layers` layers now. Blocks that were whole stay
        so. A step's blocks come layer after layer, before those of the next step. Nothing happens if the
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
        """Ends what nobody renewed in time. To be called now and then."""
        with self._lock:
            for ticket_id, offer in list(self._offers.items()):
                if offer.deadline <= self._now():
                    self._end_late(ticket_id)

    def take_ended(self) -> list[EndedOffer]:
        """What has ended since the last call; the caller lets go of the blocks."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def held(self) -> list[int]:
        """Every block that is held for an offer, once for each; those of `take_ended` included."""
        with self._lock:
            blocks = [block for offer in self._offers.values() for block in offer.blocks]
            return blocks + [block for ended in self._ended for block in ended.blocks]

    @property
    def num_live(self) -> int:
        """Offers that have not ended."""
        return len(self._offers)

    # The readers' calls. `reader` is an object that stands for one connection. All raise TransferError.

    def open(self, ticket_id: bytes, digest: bytes, reader: object) -> Progress:
        """A reader has come with a ticket, which must be the one that was given out."""
        with self._lock:
            offer = self._live(ticket_id)
            if not secrets.compare_digest(offer.digest, digest):
                raise TransferError(Failure.FORGED, "this is not the ticket that was given out under its id")
            self._check_blocks(offer)
            offer.readers.add(reader)
            self._renew(offer)
            return offer.progress

    def progress(self, ticket_id: bytes) -> Progress:
        """How much is there. It does not renew the lease."""
        with self._lock:
            return self._live(ticket_id).progress

    def renew(self, ticket_id: bytes) -> None:
        with self._lock:
            self._renew(self._live(ticket_id))

    def verify(self, ticket_id: bytes) -> None:
        """Whether what was read before this call was what the ticket means. A reader asks when all its bytes
        have come: a block that was given to something else meanwhile has another generation by now."""
        with self._lock:
            offer = self._live(ticket_id)
            self._check_blocks(offer)
            self._renew(offer)

    def release(self, ticket_id: bytes) -> None:
        """The reader has all it wants."""
        with self._lock:
            self._live(ticket_id)
            self._end(ticket_id, None, "a reader was done with it")

    def leave(self, ticket_id: bytes, reader: object) -> None:
        """A reader's connection has ended. With the last one the offer ends, too."""
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
        told = f"the ticket has ended: {message}"
        self._past[ticket_id] = TransferError(failure or Failure.ENDED, told)
        if len(self._past) > REMEMBERED:
            self._past.popitem(last=False)
        self._on_change()
