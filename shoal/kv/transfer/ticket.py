"""What one worker gives another so that it can read KV blocks: a ticket, which is plain data and can cross a
network. Also why a transfer fails. Without torch.

A ticket says where the blocks lie, what they look like, and whom to ask about them. Its `id` is random and
long: whoever knows it was given it. The owner's books of tickets are kv/transfer/offers.py.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.errors import ShoalError
from shoal.hashing import KEY_SIZE
from shoal.kv.layout import CacheSpec

VERSION = 1
ID_BYTES = 16
DIGEST_BYTES = 16
MAX_BLOCKS = 1 << 18  # of a ticket: four million tokens in blocks of 16
MAX_TICKET_BYTES = 8 << 20
NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises for garbage


class Failure(StrEnum):
    """Why the blocks of a ticket can't be had. Each of them means that they are computed instead."""

    DAMAGED = "damaged"  # these bytes are no ticket
    UNKNOWN = "unknown"  # the owner gave out no such ticket, or its end is long ago
    FORGED = "forged"  # the owner gave out a ticket of this id, but with other content
    EXPIRED = "expired"  # nobody renewed the lease in time
    ENDED = "ended"  # the owner took the blocks back, or a reader was done with them
    STALE = "stale"  # the owner has put something else into the blocks
    INCOMPATIBLE = "incompatible"  # no copy makes blocks of this cache out of those
    UNREACHABLE = "unreachable"  # no transport leads from here to there
    LOST = "lost"  # the owner went away
    LATE = "late"  # nothing came from the owner for too long
    NONSENSE = "nonsense"  # the owner answered with something that is no answer
    CANCELLED = "cancelled"  # the reader itself gave up


class TransferError(ShoalError):
    """Blocks did not come, or can't be trusted. Whoever wanted them computes them, or does without.
    `transport` is the one by which they were to come; empty if none was chosen yet."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
        self.transport = ""


class ExportAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one rank's cache can be read, and by which transport."""

    transport: Annotated[str, Meta(max_length=32)]
    spec: CacheSpec
    memory: Annotated[bytes, Meta(max_length=64 << 10)]  # how that transport finds the memory; it may read it


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How much of a ticket's blocks is there already, in the ticket's order: the first `whole` blocks with
    all layers, and those up to `blocks` with their first `layers` layers."""

    whole: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    layers: Annotated[int, Meta(ge=0, le=1 << 16)] = 0

    def layers_of(self, position: int, num_layers: int) -> int:
        """How many layers the block at a position of the ticket has."""
        if position < self.whole:
            return num_layers
        return self.layers if position < self.blocks else 0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one worker that another one may read. `ranks` has the addresses of each rank's cache, one for
    each transport that leads there."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    server: Annotated[str, Meta(max_length=256)]  # host:port of the owner's OfferServer
    # Names the model and its weights. Blocks of another one have the same shape and mean something else.
    model: Annotated[bytes, Meta(max_length=64)]
    # The owner gives the blocks up so many seconds after it last heard of a reader. It counts them itself, so
    # no two clocks have to agree.
    lease_s: Annotated[float, Meta(gt=0)]
    blocks: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=MAX_BLOCKS)]
    generations: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_BLOCKS)]
    ranks: Annotated[
        tuple[Annotated[tuple[ExportAddress, ...], Meta(min_length=1, max_length=16)], ...],
        Meta(min_length=1, max_length=1024),
    ]
    # The key of each block (hashing.py), so that a reader takes no block of another prompt for its own. Empty
    # where the reader knows by other means what the blocks hold.
    keys: Annotated[tuple[Annotated[bytes, Meta(max_length=KEY_SIZE)], ...], Meta(max_length=MAX_BLOCKS)] = ()
    version: int = VERSION

    @property
    def spec(self) -> CacheSpec:
        """The cache of the first rank."""
        return self.ranks[0][0].spec


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)


def seal(ticket: Ticket) -> bytes:
    """The ticket as it travels: a digest, then msgpack."""
    body = _encoder.encode(ticket)
    return _digest(body) + body


def unseal(sealed: bytes) -> Ticket:
    """The other way. Raises TransferError for bytes that are no ticket. That the owner gave it out is not
    known yet: only the owner can say so."""
    body = sealed[DIGEST_BYTES:]
    if len(sealed) > MAX_TICKET_BYTES or _digest(body) != sealed[:DIGEST_BYTES]:
        raise TransferError(Failure.DAMAGED, f"{len(sealed)} bytes are no whole ticket for KV blocks")
    try:
        ticket = _decoder.decode(body)
    except NO_MESSAGE as error:
        raise TransferError(Failure.DAMAGED, f"no ticket for KV blocks: {error}") from None
    if reason := _flaw(ticket):
        raise TransferError(Failure.DAMAGED, f"no ticket for KV blocks: {reason}")
    return ticket


def digest_of(sealed: bytes) -> bytes:
    """What tells a ticket from all others."""
    return sealed[:DIGEST_BYTES]


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _flaw(ticket: Ticket) -> str | None:
    """What is wrong with a ticket whose fields are of the right types."""
    if ticket.version != VERSION:
        return (
            f"its version is {ticket.version}, and this worker knows {VERSION}; run equal versions of Shoal"
        )
    if not ticket.blocks or len(set(ticket.blocks)) < len(ticket.blocks):
        return "it names no block, or one of them twice"
    if len(ticket.blocks) != len(ticket.generations):
        return f"{len(ticket.blocks)} blocks have {len(ticket.generations)} generation numbers"
    if ticket.keys and len(ticket.keys) != len(ticket.blocks):
        return f"{len(ticket.blocks)} blocks have {len(ticket.keys)} keys"
    last = max(ticket.blocks)
    for rank, addresses in enumerate(ticket.ranks):
        for address in addresses:
            spec = address.spec
            if (spec.tp_rank, spec.tp_size) != (rank, len(ticket.ranks)):
                return f"rank {rank} of {len(ticket.ranks)} says that it is {spec.tp_rank} of {spec.tp_size}"
            if reason := ticket.spec.mismatch(spec):
                return f"its ranks differ: {reason}"
            if last >= spec.num_blocks:
                return f"it names block {last} of a cache of {spec.num_blocks}"
    return None
