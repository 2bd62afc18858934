"""The plane: what the processes of a fleet need of each other, as one small protocol.

    members     who lives: `register` with a lease, `members`, `watch`
    messages    `publish` and `subscribe`: at most once, in order for each publisher
    queue       `push`, `pull`: work that is done once, also when a worker dies over it
    streams     `serve` and `request`: a request that is answered by a stream of messages

Two planes implement it: `plane_embedded` for one host, without a server, and `plane_nats` for many. While a
plane is away (it restarts, say), publishing is lost and counted, calls wait for it, nobody's lease runs out,
and members, subscriptions and work come back with it. Messages are msgspec structs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from random import Random
from typing import Any, Generic, TypeVar

import msgspec

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.plane_inbox import Reader, Subscription, encode
from shoal.fleet.plane_streams import Handler, Stream, Streams
from shoal.wire import Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

LEASE_S = 6.0
TICK_S = 0.1  # how often leases are looked at; they end that much early, so that nobody outlives a lease
MAX_BUFFERED = 16_384  # messages of a subscription
MAX_QUEUED = 10_000  # items of a queue; further ones are refused
MAX_ATTEMPTS = 3  # workers that may fail at an item before it is given up
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


class QueueLength(msgspec.Struct, frozen=True):
    waiting: int
    running: int


class WorkItem(msgspec.Struct, array_like=True, frozen=True):
    """An item of a queue, as it travels. The id begins with the name of the process that asked."""

    id: str
    deadline_s: float  # for each attempt
    payload: bytes


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """How an item ended: a payload, or a failure."""

    payload: bytes = b""
    failure: Failure | None = None


class Ticket(Generic[A]):
    """An item's answer, for who pushed it."""

    def __init__(
        self, item: WorkItem, outcome: asyncio.Future[Outcome], read: Callable[[bytes], A | None]
    ) -> None:
        self.item_id = item.id
        self._outcome, self._read = outcome, read

    async def answer(self) -> A:
        """Waits for the end of the work. Raises what kept it from being done."""
        outcome = await asyncio.shield(self._outcome)
        if outcome.failure:
            raise outcome.failure.build()
        answer = self._read(outcome.payload)
        if answer is None:
            raise ShoalError(f"the answer of work item {self.item_id} cannot be read")
        return answer


class Work(Generic[T]):
    """An item that this process has taken. It comes again, to another process perhaps, when this one dies or
    `deadline_s` passes."""

    def __init__(
        self,
        item: WorkItem,
        message: T,
        attempt: int,
        finish: Callable[[Outcome], Awaitable[bool]],
        give_back: Callable[[], Awaitable[None]],
    ) -> None:
        self.id, self.message, self.attempt, self.deadline_s = item.id, message, attempt, item.deadline_s
        self._finish, self._give_back = finish, give_back

    async def done(self, answer: msgspec.Struct) -> bool:
        """Acknowledges the work with its answer. True: this is the answer that who asked gets, once. False:
        another worker's answer was there before, as this one took too long."""
        return await self._finish(Outcome(encode(answer)))

    async def fail(self, error: ShoalError) -> bool:
        """Nobody can do this work: who asked gets the error."""
        return await self._finish(Outcome(failure=Failure.of(error)))

    async def give_back(self) -> None:
        """Another attempt, by whoever pulls next."""
        await self._give_back()


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
        self._tickets: dict[str, tuple[str, WorkItem, asyncio.Future[Outcome]]] = {}
        self._num_pushed = 0
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

    # Queue

    async def push(
        self, queue: str, message: msgspec.Struct, answer: type[A], deadline_s: float = 60.0
    ) -> Ticket[A]:
        """Returns when the plane has the item. Raises UnavailableError when the queue is full. An item whose
        worker dies or lets the deadline pass is given to another, MAX_ATTEMPTS times in all."""
        self._num_pushed += 1
        item = WorkItem(f"{self.name}.{self._num_pushed}", deadline_s, encode(message))
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._tickets[item.id] = (check_name(queue), item, outcome)
        try:
            await self._push(queue, item)
        except BaseException:
            self._tickets.pop(item.id, None)
            raise
        kind = f"answer of queue {queue}"
        return Ticket(item, outcome, lambda payload: self.reader.read(kind, payload, answer))

    async def pull(self, queue: str, type_: type[T]) -> Work[T]:
        """Waits for an item. What cannot be read is failed, counted and skipped."""
        while True:
            item, attempt, finish, give_back = await self._pull(check_name(queue))
            message = self.reader.read(f"queue {queue}", item.payload, type_)
            if message is not None:
                return Work(item, message, attempt, finish, give_back)
            await finish(Outcome(failure=Failure.of(ShoalError(f"the item is no {type_.__name__}"))))

    @abstractmethod
    async def queue_length(self, queue: str) -> QueueLength: ...

    @abstractmethod
    async def _push(self, queue: str, item: WorkItem) -> None: ...

    @abstractmethod
    async def _pull(self, queue: str) -> Pulled: ...

    def _settle(self, item_id: str, outcome: Outcome) -> None:
        """The first outcome of an item is its ticket's."""
        _, _, future = self._tickets.pop(item_id, (None, None, None))
        if future and not future.done():
            future.set_result(outcome)

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
        for item_id in list(self._tickets):
            self._settle(item_id, Outcome(failure=Failure.of(has_left())))
        await self._leave()

    @abstractmethod
    async def _leave(self) -> None: ...


Pulled = tuple[WorkItem, int, Callable[[Outcome], Awaitable[bool]], Callable[[], Awaitable[None]]]


def check_name(name: str) -> str:
    """Subjects, queues and ids travel in NATS subjects, where blanks and wildcards mean something."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name on the plane: letters, digits, - and _, with dots between")
    return name


def gave_up(item: WorkItem) -> Outcome:
    error = ShoalError(f"work item {item.id} was given up: {MAX_ATTEMPTS} workers died or took too long")
    return Outcome(failure=Failure.of(error))


def has_left() -> UnavailableError:
    return UnavailableError("this process has left the plane")


def too_large(num_bytes: int, limit: int, way_out: str) -> ConfigError:
    return ConfigError(
        f"a message of {num_bytes} bytes is too large for the plane (limit {limit}); {way_out}"
    )
