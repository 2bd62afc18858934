"""The plane: what the processes of a fleet need of each other, as one small protocol.

    members     who lives: `register` with a lease, `members`, `watch`
    messages    `publish` and `subscribe`: at most once, in order for each publisher
    streams     `serve` and `request`: a request that is answered by a stream of messages

Two planes implement it: `plane_embedded` for one host, without a server, and `plane_nats` for many. While a
plane is away (it restarts, say), publishing is lost and counted, calls wait for it, nobody's lease runs out,
and members and subscriptions come back with it. Messages are msgspec structs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from random import Random
from typing import Any, TypeVar

import msgspec

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.registry.streams import Handler, Stream, Streams
from shoal.fleet.registry.subscription import Reader, Subscription, encode

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

LEASE_S = 6.0
TICK_S = 0.1  # how often leases are looked at; they end that much early, so that nobody outlives a lease
MAX_BUFFERED = 16_384  # messages of a subscription
MAX_PAYLOAD_BYTES = 64 << 20
ROLES = ("both", "prefill", "decode")  # of workers
NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process that others see. `role`: one of ROLES, or "router", "supervisor", "planner"; `model`: what it
    serves; `address`: the URL at which it is reached; `details`: whatever else its kind tells."""

    id: str
    role: str
    address: str
    model: str = ""
    details: dict[str, Any] = {}


class View:
    """The members as one process sees them."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self._watchers: set[asyncio.Event] = set()

    def replace(self, members: Mapping[str, Member]) -> None:
        if members != self.members:
            self.members = dict(members)
            for changed in self._watchers:
                changed.set()

    async def watch(self) -> AsyncGenerator[Mapping[str, Member], None]:
        """The members now, and again after each change. A slow watcher sees the last state, not each step."""
        changed = asyncio.Event()
        changed.set()
        self._watchers.add(changed)
        try:
            while True:
                await changed.wait()
                changed.clear()
                yield self.members
        finally:
            self._watchers.discard(changed)


class Plane(ABC):
    """One process's end of the plane. An implementation has the abstract methods; everything that planes
    have in common is here."""

    def __init__(self, clock: Clock, random: Random, lease_s: float) -> None:
        """`lease_s`: a process that dies is gone from everyone's view within this time."""
        if lease_s < 5 * TICK_S:
            raise ConfigError(f"a lease of {lease_s:g} s is too short: at least {5 * TICK_S:g} s")
        self.clock, self.lease_s = clock, lease_s
        self.name = f"{random.getrandbits(64):016x}"  # of this process, unique on the plane
        self.reader = Reader()
        self.num_unsent = 0  # messages that were published while the plane was away
        self._view = View()
        self._streams = Streams(self, self.name, clock, lease_s, self.reader)
        self._is_closed = False

    # Members

    @property
    def members(self) -> Mapping[str, Member]:
        return self._view.members

    def watch(self) -> AsyncGenerator[Mapping[str, Member], None]:
        return self._view.watch()

    @abstractmethod
    async def register(self, member: Member) -> None:
        """Returns when all can see it. The lease is renewed until `unregister`, `close`, or the death of the
        process. Registering an id of one's own again changes what it says. An id that another living process
        has is a ConfigError, after the time of a lease in which that process could still turn out dead."""

    @abstractmethod
    async def unregister(self, member_id: str) -> None: ...

    # Messages

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        await self.send(check_name(subject), encode(message))

    async def subscribe(
        self, subject: str, type_: type[T], max_buffered: int = MAX_BUFFERED
    ) -> Subscription[T]:
        """Returns when messages that are published from now on will come."""
        subscription = Subscription(check_name(subject), type_, self.reader, max_buffered)
        subscription.stop_listening = await self.listen(subject, subscription.put)
        return subscription

    @abstractmethod
    async def send(self, subject: str, payload: bytes) -> None:
        """Waits while what is on its way out is at its bound, and until the plane was there once. Raises
        ConfigError for a payload that is too large for the plane."""

    @abstractmethod
    async def listen(self, subject: str, take: Callable[[bytes], None]) -> Callable[[], None]:
        """Calls `take` with each message; returns how to stop that."""

    # Streams

    async def serve(self, name: str, type_: type[T], handler: Handler[T]) -> Callable[[], None]:
        """Answers requests of a name, which one process serves. `handler` is an async generator function;
        it is closed when the caller cancels or dies. Returns how to stop taking new ones."""
        return await self._streams.serve(check_name(name), type_, handler)

    async def request(self, name: str, message: msgspec.Struct, type_: type[A]) -> Stream[A]:
        return await self._streams.call(check_name(name), message, type_)

    async def close(self) -> None:
        """Leaves, and all see it at once."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._streams.close()
        await self._leave()

    @abstractmethod
    async def _leave(self) -> None: ...


def check_name(name: str) -> str:
    """Subjects and ids travel in NATS subjects, where blanks and wildcards mean something."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name on the plane: letters, digits, - and _, with dots between")
    return name


def has_left() -> UnavailableError:
    return UnavailableError("this process has left the plane")


def too_large(num_bytes: int, limit: int, way_out: str) -> ConfigError:
    return ConfigError(
        f"a message of {num_bytes} bytes is too large for the plane (limit {limit}); {way_out}"
    )
