"""`Registry`: discovery and messages between a fleet's processes, as etcd and NATS are for Dynamo: one
interface. embedded.py implements it for one host, nats.py for many; native workers' tokens and KV events
bypass it (native/worker_server.py).

    members     `register` with a lease, `members`, `watch`
    broadcast   `publish` and `subscribe`: at most once, in order for each publisher
    requests    `request` and `serving`: one message to the process of a member, and one reply

Members are routers, workers, supervisors and planners. Router replicas broadcast their active requests, and
planners send requests. Options and errors call it the plane (`--plane URL`). While it is away (it restarts,
say), published messages are lost, calls wait for it, no lease runs out, and members and subscriptions come
back with it. Messages are msgspec structs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar

import msgspec

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.registry.subscription import Reader, Subscription, encode
from shoal.tasks import start, stop
from shoal.wire import Failure

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

LEASE_S = 6.0
TICK_S = 0.1  # leases are checked this often, and end this much early, so that no member outlives its lease
MAX_BUFFERED = 16_384  # messages per subscription
MAX_PAYLOAD_BYTES = 64 << 20
ROLES = ("both", "prefill", "decode")  # workers; other members are "router", "supervisor" or "planner"
NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process that registered. `role`: one of ROLES, or "router", "supervisor", "planner"; `model`: the
    model that it serves; `address`: the URL at which it is reached; `details`: fields of its role."""

    id: str
    role: str
    address: str
    model: str = ""
    details: dict[str, Any] = {}


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The reply to a request as it travels: a payload, or a failure."""

    payload: bytes = b""
    failure: Failure | None = None


SendAnswer = Callable[[Answer], Awaitable[None]]


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
        """Yields the members now, and again after each change. A slow watcher gets the last state, not each
        step."""
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


class Registry(ABC):
    """The connection of one process to the registry. The implementations share everything here but the
    abstract methods."""

    def __init__(self, clock: Clock, random: Random, lease_s: float) -> None:
        """`lease_s`: a process that dies disappears from all views within this time."""
        if lease_s < 5 * TICK_S:
            raise ConfigError(
                f"lease must be at least {5 * TICK_S:g} s, got {lease_s:g}; choose a longer one"
            )
        self.clock, self.lease_s = clock, lease_s
        self.name = f"{random.getrandbits(64):016x}"  # unique to this process
        self.reader = Reader()
        self._view = View()
        self._is_closed = False

    # Members

    @property
    def members(self) -> Mapping[str, Member]:
        return self._view.members

    def watch(self) -> AsyncGenerator[Mapping[str, Member], None]:
        return self._view.watch()

    @abstractmethod
    async def register(self, member: Member) -> None:
        """Returns when all processes can see the member. Its lease is renewed until `close`, or the death of
        the process. Registering an id of this process again replaces the fields. Raises ConfigError for an id
        of another living process, after the time of a lease in which that process could still turn out dead.
        """

    # Broadcast

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        await self.send(check_name(subject), encode(message))

    async def subscribe(
        self, subject: str, type_: type[T], max_buffered: int = MAX_BUFFERED
    ) -> Subscription[T]:
        """Returns when the subscription gets every message that is published from now on."""
        subscription = Subscription(check_name(subject), type_, self.reader, max_buffered)
        subscription.stop_listening = await self.listen(subject, subscription.put)
        return subscription

    @abstractmethod
    async def send(self, subject: str, payload: bytes) -> None:
        """Publishes a payload. Waits while the outgoing messages are at their limit, and until the registry
        was reached once. Raises ConfigError for a payload that is too large."""

    @abstractmethod
    async def listen(self, subject: str, take: Callable[[bytes], None]) -> Callable[[], None]:
        """Calls `take` with each payload; returns a function that ends this."""

    # Requests

    async def request(self, member_id: str, message: msgspec.Struct, type_: type[A]) -> A:
        """Sends a message to the process of a member, at most once, and returns its reply. Raises the error
        that the handler raised. Raises UnavailableError if for the time of a lease no such member takes
        requests, if the member leaves or dies before it replies, and if the registry goes away meanwhile: the
        request may have been carried out then."""
        check_name(member_id)
        payload, patience = encode(message), self.clock.now() + self.lease_s
        while member_id not in self.members or (answer := await self._ask_living(member_id, payload)) is None:
            if self.clock.now() > patience:
                raise UnavailableError(f"member {member_id!r} takes no requests; is its process running?")
            await self.clock.sleep(TICK_S)
        if answer.failure is not None:
            raise answer.failure.build()
        reply = self.reader.read(f"reply of {member_id}", answer.payload, type_)
        if reply is None:
            raise UnavailableError(
                f"the reply of member {member_id!r} cannot be read; is its version another?"
            )
        return reply

    @asynccontextmanager
    async def serving(
        self, member_id: str, type_: type[T], handler: Callable[[T], Awaitable[msgspec.Struct]]
    ) -> AsyncGenerator[None, None]:
        """Replies to requests to a member of this process, by `handler`, within the block. The member must
        be registered before: until then, another process may have its id. A handler runs to its end when the
        requester gives up or dies, and is cancelled at the end of the block."""
        running: set[asyncio.Task[None]] = set()

        def take(payload: bytes, send_answer: SendAnswer) -> None:
            task = start(self._answer(f"request to {member_id}", payload, type_, handler, send_answer))
            running.add(task)
            task.add_done_callback(running.discard)

        stop_taking = await self._take_requests(check_name(member_id), take)
        try:
            yield
        finally:
            stop_taking()
            await stop(running)

    async def _answer(
        self,
        kind: str,
        payload: bytes,
        type_: type[T],
        handler: Callable[[T], Awaitable[msgspec.Struct]],
        send_answer: SendAnswer,
    ) -> None:
        try:
            message = self.reader.read(kind, payload, type_)
            if message is None:
                raise ShoalError(f"the {kind} cannot be read; do both processes run one version?")
            answer = Answer(encode(await handler(message)))
        except ShoalError as error:
            answer = Answer(failure=Failure.of(error))
        except Exception as error:
            logger.error("a %s failed", kind, exc_info=error)
            answer = Answer(failure=Failure.of(error))
        try:
            await send_answer(answer)
        except ConfigError as error:  # a reply that is too large
            await send_answer(Answer(failure=Failure.of(error)))

    async def _ask_living(self, member_id: str, payload: bytes) -> Answer | None:
        async def departure() -> None:
            async for members in self.watch():
                if member_id not in members:
                    return

        asking, leaving = asyncio.create_task(self._ask(member_id, payload)), asyncio.create_task(departure())
        try:
            await asyncio.wait([asking, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise UnavailableError(f"member {member_id!r} has left, or died, before it replied")
            return asking.result()
        finally:
            await stop([asking, leaving])

    @abstractmethod
    async def _ask(self, member_id: str, payload: bytes) -> Answer | None:
        """Sends one request and waits for the answer. None: no process has taken the request. Raises
        UnavailableError where the registry goes away before the answer."""

    @abstractmethod
    async def _take_requests(
        self, member_id: str, take: Callable[[bytes, SendAnswer], None]
    ) -> Callable[[], None]:
        """Calls `take` with each request to the member; returns a function that ends this."""

    async def close(self) -> None:
        """Leaves, which all processes see at once."""
        if not self._is_closed:
            self._is_closed = True
            await self._leave()

    @abstractmethod
    async def _leave(self) -> None: ...


def check_name(name: str) -> str:
    """Subjects and ids travel in NATS subjects, where blanks and wildcards mean something."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"a name on the plane must be letters, digits, - and _ with dots between, got {name!r}"
        )
    return name


def has_left() -> UnavailableError:
    return UnavailableError("this process has left the plane")


def was_away() -> UnavailableError:
    return UnavailableError("the plane was away, so that the reply to a request is lost; ask again")


def is_taken(member_id: str) -> ConfigError:
    return ConfigError(
        f"member id must be unique on the plane, got {member_id!r}, which another process has; choose another"
    )


def check_size(num_bytes: int, limit: int, way_out: str) -> None:
    if num_bytes > limit:
        raise ConfigError(f"a message on the plane must be at most {limit} bytes, got {num_bytes}; {way_out}")
