"""Tickets, with which one worker reads another's KV blocks: plain data that can cross a network. Also the
reasons of failed transfers. Without torch.

A ticket contains the location and form of the blocks and the address of their owner. Its `id` is long and
random, so only its receivers know it. The owner's index of tickets is kv/transfer/offers.py.
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

VERSION = 2
ID_BYTES = 16
DIGEST_BYTES = 16
MAX_BLOCKS = 1 << 18  # per ticket: four million tokens in blocks of 16
MAX_GROUPS = 255  # groups of layers
MAX_TICKET_BYTES = 8 << 20
NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # msgspec's errors for invalid bytes


class Failure(StrEnum):
    """The reason of a failed transfer. In every case the blocks are computed instead."""

    DAMAGED = "damaged"  # the bytes are not a valid ticket
    UNKNOWN = "unknown"  # the owner did not issue this ticket, or it ended long ago
    FORGED = "forged"  # the owner issued a ticket with this id, but with other content
    EXPIRED = "expired"  # the lease was not renewed in time
    ENDED = "ended"  # the owner withdrew the blocks, or a reader was done with them
    STALE = "stale"  # the owner has overwritten the blocks
    INCOMPATIBLE = "incompatible"  # the blocks can't be converted to blocks of this cache
    UNREACHABLE = "unreachable"  # no transport connects the two caches
    LOST = "lost"  # the owner is gone
    LATE = "late"  # the owner sent nothing for too long
    NONSENSE = "nonsense"  # the owner's answer was invalid
    CANCELLED = "cancelled"  # the reader gave up


class TransferError(ShoalError):
    """A transfer failed, or its blocks can't be trusted. `transport` names the transport in use; empty if it
    was not chosen yet."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure
        self.transport = ""


class ExportAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The location of one rank's readable cache, and the transport that reads it."""

    transport: Annotated[str, Meta(max_length=32)]
    # the blocks of each group of layers (kv/groups.py); all of them are in the same memory
    specs: Annotated[tuple[CacheSpec, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    memory: Annotated[bytes, Meta(max_length=64 << 10)]  # the transport's own address of the memory


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Computed part of a ticket's blocks, in the ticket's order: the first `whole` blocks have all layers,
    and the next ones up to `blocks` have their first `layers` layers. Blocks of a cache with several groups
    of layers are reported whole."""

    whole: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    layers: Annotated[int, Meta(ge=0, le=1 << 16)] = 0

    def layers_of(self, position: int, num_layers: int) -> int:
        """Number of computed layers of the block at a position of the ticket."""
        if position < self.whole:
            return num_layers
        return self.layers if position < self.blocks else 0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one worker that another one may read. `ranks` has the addresses of each rank's cache, one per
    transport."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    server: Annotated[str, Meta(max_length=256)]  # host:port of the owner's OfferServer
    # Identifies the model and its weights: another model's blocks may have the same shape.
    model: Annotated[bytes, Meta(max_length=64)]
    # The owner releases the blocks this many seconds after a reader's last message. It measures the time
    # itself, so clocks need not agree.
    lease_s: Annotated[float, Meta(gt=0)]
    blocks: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 40)], ...], Meta(max_length=MAX_BLOCKS)]
    generations: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...], Meta(max_length=MAX_BLOCKS)]
    ranks: Annotated[
        tuple[Annotated[tuple[ExportAddress, ...], Meta(min_length=1, max_length=16)], ...],
        Meta(min_length=1, max_length=1024),
    ]
    # The key of each block (hashing.py), so that a reader can't use a block of another prompt. Empty where
    # the reader knows the blocks' content by other means.
    keys: Annotated[tuple[Annotated[bytes, Meta(max_length=KEY_SIZE)], ...], Meta(max_length=MAX_BLOCKS)] = ()
    # The group of layers of each block. Empty where there is one group.
    groups: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_GROUPS)], ...], Meta(max_length=MAX_BLOCKS)] = ()
    version: int = VERSION

    @property
    def specs(self) -> tuple[CacheSpec, ...]:
        """The cache of the first rank, for each group of layers."""
        return self.ranks[0][0].specs

    @property
    def num_layers(self) -> int:
        """Layers of a block, as Progress counts them: blocks of several groups are reported whole."""
        return self.specs[0].num_layers if len(self.specs) == 1 else 1


class _Versioned(msgspec.Struct):
    """Reads a ticket's version alone."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ticket)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def seal(ticket: Ticket) -> bytes:
    """Encodes a ticket: a digest, then msgpack."""
    body = _encoder.encode(ticket)
    return _digest(body) + body


def unseal(sealed: bytes) -> Ticket:
    """Decodes a ticket. Raises TransferError for invalid bytes. Only the owner can confirm that it issued the
    ticket."""
    body = sealed[DIGEST_BYTES:]
    if len(sealed) > MAX_TICKET_BYTES or _digest(body) != sealed[:DIGEST_BYTES]:
        raise TransferError(Failure.DAMAGED, f"the KV ticket of {len(sealed)} bytes is damaged or incomplete")
    try:
        version = _version_decoder.decode(body).version
        if version != VERSION:
            raise TransferError(
                Failure.DAMAGED,
                f"invalid KV ticket: its version is {version}, and this worker knows {VERSION}; run equal "
                "versions of Shoal",
            )
        ticket = _decoder.decode(body)
    except NO_MESSAGE as error:
        raise TransferError(Failure.DAMAGED, f"invalid KV ticket: {error}") from None
    if reason := _flaw(ticket):
        raise TransferError(Failure.DAMAGED, f"invalid KV ticket: {reason}")
    return ticket


def digest_of(sealed: bytes) -> bytes:
    """The digest that distinguishes a ticket from all others."""
    return sealed[:DIGEST_BYTES]


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def _flaw(ticket: Ticket) -> str | None:
    """Returns what is wrong with a ticket whose fields have the right types; None: it is valid."""
    if not ticket.blocks or len(set(ticket.blocks)) < len(ticket.blocks):
        return "it has no block, or one of them twice"
    if len(ticket.blocks) != len(ticket.generations):
        return f"{len(ticket.blocks)} blocks have {len(ticket.generations)} generation numbers"
    if ticket.keys and len(ticket.keys) != len(ticket.blocks):
        return f"{len(ticket.blocks)} blocks have {len(ticket.keys)} keys"
    num_groups = len(ticket.specs)
    if num_groups > 1 and len(ticket.groups) != len(ticket.blocks):
        return f"{len(ticket.blocks)} blocks of {num_groups} groups have {len(ticket.groups)} group numbers"
    if ticket.groups and max(ticket.groups) >= num_groups:
        return f"it contains a block of group {max(ticket.groups)} of a cache of {num_groups} groups"
    for rank, addresses in enumerate(ticket.ranks):
        for address in addresses:
            if len(address.specs) != num_groups:
                return (
                    f"its ranks differ: one has {len(address.specs)} groups of layers, another {num_groups}"
                )
            for spec, first in zip(address.specs, ticket.specs):
                if reason := _flaw_of_rank(ticket, rank, spec, first):
                    return reason
    return None


def _flaw_of_rank(ticket: Ticket, rank: int, spec: CacheSpec, first: CacheSpec) -> str | None:
    """`first`: the same group's spec on the first rank."""
    if (spec.tp_rank, spec.tp_size) != (rank, len(ticket.ranks)):
        return f"rank {rank} of {len(ticket.ranks)} has the spec of rank {spec.tp_rank} of {spec.tp_size}"
    if reason := first.mismatch(spec):
        return f"its ranks differ: {reason}"
    if (last := max(ticket.blocks)) >= spec.num_blocks:
        return f"it contains block {last} of a cache of {spec.num_blocks} blocks"
    return None
