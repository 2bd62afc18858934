"""`EmbeddedRegistry`: the registry of one host over ZMQ, without a server: one of its processes, the
router's, hosts it. `Host` has the sockets and the clock; the state, members and subscribers, is in hub.py.

The first process that may host it binds the address and holds the state (`hub`); all others connect,
and join again when it comes back. It takes loopback addresses and Unix sockets alone, and with the fleet key
only processes that have the key join: a fleet of many hosts needs NATS. A `Host` without an address serves
registries of its own process alone, on any clock: tests on virtual time use that.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Any, Protocol
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from shoal.errors import ConfigError
from shoal.fleet.clock import Clock
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.hub import (
    Announce,
    Answered,
    Ask,
    Asked,
    Bye,
    Delivery,
    FromHub,
    Hub,
    HubMessage,
    Members,
    Publish,
    Register,
    Renew,
    Reply,
    Respond,
    Subscribe,
    Unsubscribe,
    Welcome,
    WhoAreYou,
)
from shoal.fleet.registry.registry import (
    LEASE_S,
    MAX_PAYLOAD_BYTES,
    TICK_S,
    Answer,
    Member,
    Registry,
    SendAnswer,
    check_size,
    has_left,
    was_away,
)
from shoal.fleet.registry.subscription import encode
from shoal.hosts import is_loopback
from shoal.tasks import start, stop

logger = logging.getLogger(__name__)

HIGH_WATER = 16_384  # messages that wait for one process; further ones for its subscriptions are lost
MAX_OUT = 1024  # messages that wait to leave a process; `publish` waits beyond them
RETRY_S = 0.005  # a full socket is tried again after this time
ROOM_FOR_HEAD = 4096  # bytes of a message in addition to its payload


class Connection(Protocol):
    """One process's connection to the hub."""

    def try_send(self, payload: bytes) -> bool:
        """False: not connected, or full."""

    async def receive(self) -> bytes: ...

    def close(self) -> None: ...


class Host:
    """The hub with its clock and its sockets."""

    def __init__(self, clock: Clock, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._hub = Hub(clock.now(), lease_s)
        self.num_dropped = 0  # messages to processes whose queue was full
        self._local: dict[str, asyncio.Queue[bytes]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._lock: int | None = None
        self._authenticator: ThreadAuthenticator | None = None
        self._tasks = [start(self._tick())]

    @property
    def num_unreadable(self) -> int:
        return self._hub.reader.num_unreadable.total()

    def bind(self, address: str, key: FleetKey | None = None) -> None:
        """Raises BlockingIOError where another process hosts the registry at this address. `key`: processes
        without it cannot connect."""
        if address.startswith("ipc://"):
            # libzmq would take the socket file away from the process that has it, so a lock file guards it.
            self._lock = os.open(address.removeprefix("ipc://") + ".lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        context = self._context = zmq.asyncio.Context()  # its own: libzmq asks one authenticator per context
        socket = self._socket = context.socket(zmq.ROUTER)
        if key is not None:
            self._authenticator = key.authenticate(context)
            key.protect_server(socket)
        socket.router_mandatory = True
        socket.router_handover = True
        socket.maxmsgsize = MAX_PAYLOAD_BYTES + ROOM_FOR_HEAD
        socket.sndhwm = socket.rcvhwm = HIGH_WATER
        socket.linger = 0
        socket.ipv6 = "[" in address
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise BlockingIOError from None
            raise
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)
        self._tasks.append(start(self._read(socket)))

    def attach(self, name: str) -> asyncio.Queue[bytes]:
        """Connects the process of the host itself."""
        queue = self._local[name] = asyncio.Queue(HIGH_WATER)
        return queue

    def detach(self, name: str) -> None:
        self._local.pop(name, None)

    def take(self, name: str, payload: bytes) -> None:
        self._hub.take(name, payload, self._clock.now())
        self._flush()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._socket:
            self._socket.close()
        if self._authenticator:
            self._authenticator.stop()
        if self._context:
            self._context.term()
        if self._lock is not None:
            os.close(self._lock)

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S / 2)
            self._hub.tick(self._clock.now())
            self._flush()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            name = frames[0].decode("latin-1")
            self.take(name, frames[1] if len(frames) == 2 else b"")
            await asyncio.sleep(0)  # asyncio runs no other task for a message that was there already

    def _flush(self) -> None:
        encoded: tuple[object, bytes] = (None, b"")
        for name, message in self._hub.sends():
            if message is not encoded[0]:
                encoded = (message, encode(message))
            if not self._try_send(name, encoded[1]):
                self.num_dropped += 1
                if self.num_dropped == 1:
                    logger.warning(
                        "the queue to process %s of the fleet is full; messages to it are dropped without a "
                        "further warning",
                        name,
                    )

    def _try_send(self, name: str, payload: bytes) -> bool:
        if name in self._local:
            try:
                self._local[name].put_nowait(payload)
            except asyncio.QueueFull:
                return False
            return True
        if self._socket is None:
            return False
        return _is_sent(self._socket.send_multipart([name.encode("latin-1"), payload], zmq.NOBLOCK))


class _LocalConnection:
    def __init__(self, host: Host, name: str) -> None:
        self._host, self._name = host, name
        self._queue = host.attach(name)

    def try_send(self, payload: bytes) -> bool:
        self._host.take(self._name, payload)
        return True

    async def receive(self) -> bytes:
        return await self._queue.get()

    def close(self) -> None:
        self._host.detach(self._name)


class _ZmqConnection:
    def __init__(self, address: str, name: str, key: FleetKey | None) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        if key is not None:
            key.protect_client(self._socket)
        self._socket.routing_id = name.encode()
        self._socket.immediate = True  # libzmq keeps no messages for a hub that is away
        self._socket.sndhwm = self._socket.rcvhwm = HIGH_WATER
        self._socket.linger = 100
        self._socket.ipv6 = "[" in address
        self._socket.connect(address)

    def try_send(self, payload: bytes) -> bool:
        return _is_sent(self._socket.send(payload, zmq.NOBLOCK))

    async def receive(self) -> bytes:
        return await self._socket.recv()

    def close(self) -> None:
        self._socket.close()


class EmbeddedRegistry(Registry):
    """The connection of one process to the embedded registry."""

    def __init__(
        self, clock: Clock, random: Random, lease_s: float, connect: Callable[[str], Connection]
    ) -> None:
        """`connect` gets the name of this process."""
        super().__init__(clock, random, lease_s)
        self._connection = connect(self.name)
        self._owned_host: Host | None = None
        self._is_joined = False
        self._was_joined = asyncio.Event()
        self._heard_at = clock.now()
        self._version = 0  # the version of the last list of members
        self._known_before: dict[str, Member] = {}  # members that may yet join a hub that has just started
        self._out: deque[HubMessage] = deque()
        self._has_out, self._has_room = asyncio.Event(), asyncio.Event()
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[Register | Subscribe, asyncio.Future[Reply]]] = {}
        self._asks: dict[int, tuple[Ask, asyncio.Future[Answer | None]]] = {}
        self._registered: dict[str, Member] = {}
        self._listeners: dict[str, list[Callable[[bytes], None]]] = {}
        self._takers: dict[str, Callable[[bytes, SendAnswer], None]] = {}  # by the id of the member
        self._tasks = [start(loop()) for loop in (self._read, self._write, self._renew)]

    @classmethod
    def open(
        cls,
        url: str,
        clock: Clock,
        random: Random,
        lease_s: float = LEASE_S,
        may_host: bool = False,
        key: FleetKey | None = None,
    ) -> EmbeddedRegistry:
        """`may_host`: hosts the registry itself, unless another process does so at this address. All other
        processes wait for the host, so its process must live as long as the registry. `key`: the fleet's."""
        if may_host:
            host = Host(clock, lease_s)
            try:
                host.bind(url, key)
            except BlockingIOError:
                host.close()
            except (OSError, zmq.ZMQError) as error:
                host.close()
                raise ConfigError(
                    f"plane must be an address to listen at, got {url!r} ({error}); choose another"
                ) from None
            else:
                registry = cls.of_host(host, clock, random, lease_s)
                registry._owned_host = host
                return registry
        try:
            return cls(clock, random, lease_s, lambda name: _ZmqConnection(url, name, key))
        except zmq.ZMQError as error:
            raise ConfigError(
                f"plane must be an address to connect to, got {url!r} ({error}); choose another"
            ) from None

    @classmethod
    def of_host(cls, host: Host, clock: Clock, random: Random, lease_s: float = LEASE_S) -> EmbeddedRegistry:
        """Returns a registry in the host's own process."""
        return cls(clock, random, lease_s, lambda name: _LocalConnection(host, name))

    @property
    def host(self) -> Host | None:
        """The host, if this process is the one."""
        return self._owned_host

    # Members

    async def register(self, member: Member) -> None:
        patience = self.clock.now() + self.lease_s
        while True:
            reply = await self._call(lambda call_id: Register(call_id, member))
            if reply.failure is None:
                self._registered[member.id] = member
                return
            if self.clock.now() > patience:
                raise reply.failure.build()
            await self.clock.sleep(TICK_S)

    # Broadcast

    async def send(self, subject: str, payload: bytes) -> None:
        check_size(len(payload), MAX_PAYLOAD_BYTES, "send smaller messages")
        if not self._is_closed:
            await self._was_joined.wait()
        while self._is_joined and len(self._out) >= MAX_OUT:
            self._has_room.clear()
            await self._has_room.wait()
        self._post(Publish(subject, payload))
        await asyncio.sleep(0)  # a loop that publishes leaves time to tasks that read

    async def listen(self, subject: str, take: Callable[[bytes], None]) -> Callable[[], None]:
        listeners = self._listeners.setdefault(subject, [])
        listeners.append(take)
        await self._call(lambda call_id: Subscribe(call_id, subject))

        def stop_listening() -> None:
            listeners.remove(take)
            if not listeners and self._listeners.get(subject) is listeners:
                del self._listeners[subject]
                self._post(Unsubscribe(subject))

        return stop_listening

    # Requests

    async def _ask(self, member_id: str, payload: bytes) -> Answer | None:
        check_size(len(payload), MAX_PAYLOAD_BYTES, "send a smaller request")
        if self._is_closed:
            raise has_left()
        ask = Ask(next(self._ids), member_id, payload)
        future: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self._asks[ask.call_id] = (ask, future)
        self._post(ask)
        try:
            return await future
        finally:
            del self._asks[ask.call_id]

    async def _take_requests(
        self, member_id: str, take: Callable[[bytes, SendAnswer], None]
    ) -> Callable[[], None]:
        self._takers[member_id] = take

        def stop_taking() -> None:
            self._takers.pop(member_id, None)

        return stop_taking

    def _asked(self, asked: Asked) -> None:
        async def send_answer(answer: Answer) -> None:
            check_size(len(answer.payload), MAX_PAYLOAD_BYTES, "reply with less")
            self._post(Respond(asked.asker, asked.call_id, answer))

        take = self._takers.get(asked.member_id)
        if take is None:
            self._post(Respond(asked.asker, asked.call_id, None))
        else:
            take(asked.payload, send_answer)

    async def _leave(self) -> None:
        self._post(Bye())
        while self._is_joined and self._out:
            await self.clock.sleep(RETRY_S)
        await stop(self._tasks)
        waiting: list[asyncio.Future[Any]] = [future for _, future in self._calls.values()]
        waiting += [future for _, future in self._asks.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(has_left())
        self._connection.close()
        if self._owned_host:
            self._owned_host.close()

    # Messages to and from the hub

    async def _call(self, build: Callable[[int], Register | Subscribe]) -> Reply:
        """Waits for the reply, and for the hub while it is away."""
        call_id = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        message = build(call_id)
        self._calls[call_id] = (message, future)
        self._post(message)
        try:
            return await future
        finally:
            del self._calls[call_id]

    def _post(self, message: HubMessage) -> None:
        """Drops the message while the hub is away: `_rejoin` repeats everything that still matters. Answers
        are kept for the hub, as the requester may wait for them without having lost it."""
        if self._is_joined:
            self._out.append(message)
            self._has_out.set()
        elif isinstance(message, Respond):
            self._keep_answers([*self._out, message])

    def _keep_answers(self, messages: Iterable[HubMessage]) -> None:
        self._out = deque([each for each in messages if isinstance(each, Respond)][-MAX_OUT:])

    def _lose_hub(self) -> None:
        self._is_joined = False
        self._keep_answers(self._out)
        self._has_room.set()
        for _, future in self._asks.values():  # a request that was sent must not be sent again
            if not future.done():
                future.set_exception(was_away())

    def _announce(self) -> None:
        self._connection.try_send(encode(Announce(self.lease_s, list(self._registered))))

    def _rejoin(self) -> None:
        self._is_joined = True
        self._was_joined.set()
        self._has_out.set()  # answers may have waited for the hub
        for subject in self._listeners:
            self._post(Subscribe(0, subject))
        for message, _ in self._calls.values():
            self._post(message)
        for ask, future in self._asks.values():
            if not future.done():
                self._post(ask)
        for member in self._registered.values():
            self._post(Register(0, member))

    async def _write(self) -> None:
        while True:
            while self._is_joined and self._out:
                if self._connection.try_send(encode(self._out[0])):
                    self._out.popleft()
                    self._has_room.set()
                else:
                    await self.clock.sleep(RETRY_S)
            self._has_out.clear()
            await self._has_out.wait()

    async def _renew(self) -> None:
        """Renews the lease three times in its time, or announces itself until the hub answers."""
        warns_at = self.clock.now() + self.lease_s
        while True:
            if not self._was_joined.is_set() and self.clock.now() >= warns_at:
                warns_at = math.inf
                logger.warning("no router hosts the plane yet; still waiting")
            if self._is_joined and self.clock.now() - self._heard_at >= self.lease_s:
                logger.warning("the plane does not answer; waiting for it to come back")
                self._lose_hub()
            if self._is_joined:
                self._post(Renew(self._version))
            else:
                self._announce()
            await self.clock.sleep(self.lease_s / 3 if self._is_joined else TICK_S)

    async def _read(self) -> None:
        while True:
            payload = await self._connection.receive()
            message: HubMessage | None = self.reader.read("the hub", payload, FromHub)  # type: ignore[arg-type]
            self._heard_at = self.clock.now()
            if message is not None:
                self._take(message)
            await asyncio.sleep(0)

    def _take(self, message: HubMessage) -> None:
        match message:
            case Delivery():
                for take in self._listeners.get(message.subject, ()):
                    take(message.payload)
            case Welcome():
                if not self._is_joined:
                    self._known_before = dict(self.members)
                    self._rejoin()
            case WhoAreYou():
                if self._is_joined:
                    self._lose_hub()
                    self._announce()
            case Members():
                self._version = message.version
                for member_id in list(self._known_before):
                    if message.is_whole or member_id in message.members:
                        del self._known_before[member_id]
                self._view.replace(self._known_before | message.members)
            case Reply():
                self._replied(message)
            case Asked():
                self._asked(message)
            case Answered():
                _, answered = self._asks.get(message.call_id, (None, None))
                if answered and not answered.done():
                    answered.set_result(message.answer)

    def _replied(self, reply: Reply) -> None:
        _, future = self._calls.get(reply.call_id, (None, None))
        if future and not future.done():
            future.set_result(reply)
        elif reply.failure:
            logger.error("the plane came back and refused: %s", reply.failure.message)


def _is_sent(sending: Awaitable[object]) -> bool:
    """With NOBLOCK, the future that a socket returns is done already."""
    assert isinstance(sending, asyncio.Future)
    return sending.exception() is None


def check_address(url: str) -> None:
    """Raises ConfigError for an address that other hosts could reach."""
    if url.startswith("ipc:///"):
        return
    try:
        parts = urlsplit(url)
        is_local = parts.scheme == "tcp" and bool(parts.port) and is_loopback(parts.hostname or "")
    except ValueError:
        is_local = False
    if not is_local:
        raise ConfigError(
            "plane must be tcp://127.0.0.1:PORT or ipc:///PATH, as the embedded plane is for one host, got "
            f"{url!r}; many hosts need a NATS server, nats://HOST:4222, and a key (--fleet-key-file)"
        )
