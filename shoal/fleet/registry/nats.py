"""`NatsRegistry`: the registry of many hosts on a NATS server: core NATS for broadcast and requests, a
key-value bucket of JetStream for members. Encoding, replies and views of members are shared with embedded.py,
in registry.py.

A member is a key that its process writes three times a lease. Watchers see each write as a message, and a
member whose key is not written for its lease is gone. nats-py is imported here alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, KeyNotFoundError, KeyValueError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.key import FleetKey
from shoal.fleet.registry.registry import (
    TICK_S,
    Answer,
    Member,
    Registry,
    SendAnswer,
    check_name,
    check_size,
    has_left,
    is_taken,
    was_away,
)
from shoal.fleet.registry.subscription import encode
from shoal.tasks import start, stop

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "shoal"
MEMBERS = "shoal_members"  # the bucket
STREAM_OF_MEMBERS = f"KV_{MEMBERS}"
MEMBERS_TTL_S = 60.0  # the server keeps a key this long; the lease that counts is in the value
MAX_DEAD = 1000  # ids whose lease has run out, with their owners
AGAIN_S = 0.2  # a failed action is tried again after this time while the server is away
ROUND_TRIP_S = 10.0  # the server has processed the messages of this process within this time
PONG_S = 120  # a ping is abandoned then; a connection without a pong has ended before
MAX_PAUSE_S = 0.5  # between two checks of the leases; the process was suspended in a longer pause
ROOM_FOR_HEAD = 4096  # bytes of a message in addition to its payload
MAY_PASS = (404, 408, 503)  # no stream (yet), no answer in time, no JetStream (yet)
STREAM_EXISTS = 10058
UNUSABLE = "the NATS server cannot be used; still trying"


class _Lease(msgspec.Struct, array_like=True, frozen=True):
    """A member as it is stored in the bucket."""

    member: Member
    owner: str  # name of the process
    lease_s: float


class _Seen:
    def __init__(self, lease: _Lease, renewed_at: float) -> None:
        self.lease, self.renewed_at = lease, renewed_at


class NatsRegistry(Registry):
    """The connection of one process to the registry."""

    def __init__(self, clock: Clock, random: Random, lease_s: float, key: FleetKey | None) -> None:
        super().__init__(clock, random, lease_s)
        self._key = key
        if lease_s > MEMBERS_TTL_S:
            raise ConfigError(
                f"lease must be at most {MEMBERS_TTL_S:g} s on NATS, got {lease_s:g}; choose a shorter one"
            )
        self._client = Client()
        self._js: JetStreamContext = self._client.jetstream(timeout=max(0.5, lease_s / 3))
        self._members_bucket: KeyValue | None = None
        self._connected = asyncio.Event()  # and not yet joined
        self._joined = asyncio.Event()
        self._was_joined = asyncio.Event()
        self._heard_at = clock.now()
        self._registered: dict[str, Member] = {}
        self._revisions: dict[str, int] = {}  # by id, of this process's keys
        self._writing = asyncio.Lock()  # held while keys of members are written
        self._seen: dict[str, _Seen] = {}  # by id
        self._dead: dict[str, str] = {}  # by id: the owner whose lease has run out
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[Msg]] = set()
        self._pings: set[asyncio.Task[None]] = set()  # the connection must outlive them
        self._hints: dict[str, None] = {}  # subjects whose key has changed, in order
        self._has_hints = asyncio.Event()
        self._logged: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def open(
        cls,
        url: str,
        clock: Clock,
        random: Random,
        lease_s: float,
        credentials_file: str | None,
        key: FleetKey | None = None,
    ) -> NatsRegistry:
        """Connects in the background, and tries for ever, as the server may start later. `key`: the fleet's;
        messages of processes without it are ignored."""
        if credentials_file:
            _check_credentials(credentials_file)
        registry = cls(clock, random, lease_s, key)
        loops = (registry._keep_joined, registry._renew, registry._expire, registry._follow_hints)
        registry._tasks = [start(loop()) for loop in loops]
        registry._tasks.append(start(registry._connect(url, credentials_file)))
        return registry

    # Members

    async def register(self, member: Member) -> None:
        check_name(member.id)
        patience = self.clock.now() + self.lease_s

        async def claim() -> bool:
            async with self._writing:
                is_ours = await self._claim(member)
                if is_ours:
                    self._registered[member.id] = member
                return is_ours

        while not await self._insist(claim):
            if self.clock.now() > patience:
                raise is_taken(member.id)
            await self.clock.sleep(TICK_S)

    @property
    def _bucket(self) -> KeyValue:
        assert self._members_bucket
        return self._members_bucket

    async def _claim(self, member: Member) -> bool:
        """Writes the key of this process. False: another process, which may be alive, has it."""
        key = _member_key(member.id)
        value = self._seal(key, encode(_Lease(member, self.name, self.lease_s)))
        last = self._revisions.get(member.id)
        try:
            if last is None:
                try:
                    entry = await self._bucket.get(key)
                except KeyNotFoundError:
                    self._revisions[member.id] = await self._bucket.create(key, value)
                    return True
                lease = self._read_lease(key, entry.value)
                if lease and lease.owner not in (self.name, self._dead.get(member.id)):
                    if member.id not in self._seen:
                        self._see(lease, self.clock.now())
                    return False
                last = entry.revision
            self._revisions[member.id] = await self._bucket.update(key, value, last=last)
        except KeyWrongLastSequenceError:
            self._revisions.pop(member.id, None)
            return False
        return True

    async def _renew(self) -> None:
        """Renews the leases three times in their time."""
        while True:
            await self.clock.sleep(self.lease_s / 3)
            try:
                await self._round_trip(self.lease_s / 3)
                self._heard_at = self.clock.now()
                await self._claim_again()
            except nats.errors.Error as error:
                self._log_once("leases cannot be renewed", error)

    async def _claim_again(self) -> None:
        for member_id in list(self._registered):
            async with self._writing:
                # A renewal and a join may both be here: the one before may have lost the id.
                member = self._registered.get(member_id)
                # The first claim of a key that the server has forgotten fails, the second creates it.
                if member and not (await self._claim(member) or await self._claim(member)):
                    del self._registered[member_id]
                    logger.error("member %r: another process has the id now", member_id)

    async def _expire(self) -> None:
        """Ends leases. Time in which the server was away or this process was suspended does not count."""
        ticked_at = self.clock.now()
        while True:
            await self.clock.sleep(TICK_S / 2)
            now = self.clock.now()
            pause, ticked_at = now - ticked_at, now
            is_away = not self._joined.is_set() or now - self._heard_at > self.lease_s * 0.7
            for member_id, seen in list(self._seen.items()):
                if is_away or pause > MAX_PAUSE_S:
                    seen.renewed_at = min(seen.renewed_at + pause, now)
                elif now - seen.renewed_at >= seen.lease.lease_s - TICK_S:
                    self._unsee(member_id)
                    self._bury(seen.lease)

    def _see(self, lease: _Lease, renewed_at: float) -> None:
        self._dead.pop(lease.member.id, None)
        self._seen[lease.member.id] = _Seen(lease, renewed_at)
        self._show()

    def _bury(self, lease: _Lease) -> None:
        """Frees the id, although its key stays in the bucket for a while."""
        self._dead[lease.member.id] = lease.owner
        while len(self._dead) > MAX_DEAD:
            del self._dead[next(iter(self._dead))]

    def _unsee(self, member_id: str) -> None:
        self._seen.pop(member_id, None)
        self._show()

    def _show(self) -> None:
        self._view.replace({member_id: seen.lease.member for member_id, seen in self._seen.items()})

    async def _hear_member(self, message: Msg) -> None:
        """Takes a renewal as it is. A change is read from the bucket, as the message may be a write that the
        bucket has refused."""
        lease = self._read_lease(_key_of(message.subject), message.data) if message.data else None
        seen = self._seen.get(lease.member.id) if lease else None
        if seen and seen.lease == lease:
            seen.renewed_at = self.clock.now()
        else:
            self._hint(message.subject)

    async def _read_member(self, member_id: str) -> None:
        key = _member_key(member_id)
        try:
            entry = await self._bucket.get(key)
        except KeyNotFoundError:
            self._unsee(member_id)
            return
        lease = self._read_lease(key, entry.value)
        if lease and lease.member.id == member_id:
            self._see(lease, self.clock.now())

    async def _read_all_members(self) -> None:
        """Members that were known get two leases to join and renew in. The age of the others is read off the
        server's clock: a key that this process writes now has the server's time.

        Each key is fetched, as a watcher of the bucket can miss keys that are older than it (nats-server 2.9,
        while other processes write)."""
        now = self.clock.now()
        for seen in self._seen.values():
            seen.renewed_at = now + self.lease_s
        marker = f"now.{self.name}"
        written = await self._js.get_msg(STREAM_OF_MEMBERS, seq=await self._bucket.put(marker, b""))
        await self._bucket.purge(marker)
        info = await self._js.stream_info(STREAM_OF_MEMBERS, subjects_filter=f"$KV.{MEMBERS}.member.>")
        for subject in info.state.subjects or ():
            try:
                message = await self._js.get_last_msg(STREAM_OF_MEMBERS, subject)
            except NotFoundError:  # its time to live has just ended
                continue
            lease = self._read_lease(_key_of(subject), message.data) if message.data else None
            if lease is None or lease.member.id in self._seen:
                continue
            assert written.time and message.time
            age = (written.time - message.time).total_seconds()
            if age < lease.lease_s:
                self._see(lease, now - age)
            else:
                self._bury(lease)

    # Broadcast

    async def send(self, subject: str, payload: bytes) -> None:
        if not self._is_closed:
            await self._was_joined.wait()
        if self._joined.is_set():
            self._check_size(payload)
            try:
                await self._client.publish(f"{PREFIX}.subject.{subject}", self._seal(subject, payload))
            except nats.errors.Error as error:
                self._log_once("messages cannot be sent", error)
        await asyncio.sleep(0)  # a loop that publishes leaves time to tasks that read

    async def listen(self, subject: str, take: Callable[[bytes], None]) -> Callable[[], None]:
        async def hear(message: Msg) -> None:
            take(self._unseal(subject, message.data))

        return await self._subscribe(f"{PREFIX}.subject.{subject}", hear)

    # Requests

    async def _ask(self, member_id: str, payload: bytes) -> Answer | None:
        await self._joined.wait()
        if self._is_closed:
            raise has_left()
        self._check_size(payload)
        subject = f"{PREFIX}.request.{member_id}"
        data = self._seal(subject, payload)
        asking = asyncio.create_task(self._client.request(subject, data, timeout=None))  # type: ignore[arg-type]
        self._asking.add(asking)
        try:
            await asyncio.wait([asking])
            if asking.cancelled():
                raise has_left() if self._is_closed else was_away()
            message = asking.result()
        except nats.errors.NoRespondersError:
            return None
        except nats.errors.Error as error:
            raise UnavailableError(f"the NATS server has not passed on a request: {error}") from None
        finally:
            self._asking.discard(asking)
            await stop([asking])
        answer = self.reader.read("answer", self._unseal(message.subject, message.data), Answer)
        if answer is None:
            raise UnavailableError(
                f"the answer of member {member_id!r} cannot be read; is its version another?"
            )
        return answer

    async def _take_requests(
        self, member_id: str, take: Callable[[bytes, SendAnswer], None]
    ) -> Callable[[], None]:
        subject = f"{PREFIX}.request.{member_id}"

        async def hear(message: Msg) -> None:
            payload = self._unseal(subject, message.data)
            if payload:
                take(payload, partial(self._send_answer, message.reply))

        return await self._subscribe(subject, hear)

    async def _send_answer(self, inbox: str, answer: Answer) -> None:
        """Repeats the answer until the server has it, as the requester waits for it. A second copy is
        ignored."""
        self._check_size(data := self._seal(inbox, encode(answer)))

        async def publish() -> None:
            await self._client.publish(inbox, data)
            await self._round_trip()

        await self._insist(publish)

    async def _subscribe(self, subject: str, hear: Callable[[Msg], Awaitable[None]]) -> Callable[[], None]:
        """Returns when the server has the subscription; the result ends it."""

        async def subscribe() -> Any:
            subscription = await self._client.subscribe(subject, cb=hear)
            try:
                await self._round_trip()
            except nats.errors.Error:  # the next attempt must not make a second one
                self._background(subscription.unsubscribe())
                raise
            return subscription

        subscription = await self._insist(subscribe)
        return lambda: self._background(subscription.unsubscribe())

    # Payloads

    def _seal(self, where: str, payload: bytes) -> bytes:
        """`where`: the subject or the key; the seal is valid there alone."""
        return payload if self._key is None else self._key.seal(where, payload)

    def _unseal(self, where: str, data: bytes) -> bytes:
        """Returns the payload; an empty one, which no message has, if it lacks a valid seal."""
        if self._key is None or not data:
            return data
        payload = self._key.unseal(where, data)
        if payload is None:
            self._log_once(
                "a message without a seal of this fleet's key is ignored", ConfigError(f"at {where!r}")
            )
        return payload or b""

    def _read_lease(self, key: str, value: bytes | None) -> _Lease | None:
        return self.reader.read("member", self._unseal(key, value or b""), _Lease)

    def _check_size(self, payload: bytes) -> None:
        limit = self._client.max_payload - ROOM_FOR_HEAD
        check_size(len(payload), limit, "raise max_payload in the NATS server's configuration")

    # The connection

    async def _connect(self, url: str, credentials_file: str | None) -> None:
        async def connected() -> None:
            self._connected.set()
            logger.info("the NATS server is there again")
            self._logged = {kind for kind in self._logged if not kind.startswith(UNUSABLE)}

        async def lost() -> None:
            self._joined.clear()
            for asking in self._asking:
                asking.cancel()

        async def failed(error: Exception) -> None:
            self._log_once(UNUSABLE, error)

        await self._client.connect(
            url.split(","),
            user_credentials=credentials_file,
            name=f"shoal {self.name}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=AGAIN_S,  # type: ignore[arg-type]
            ping_interval=max(1, round(self.lease_s / 3)),
            reconnected_cb=connected,
            disconnected_cb=lost,
            error_cb=failed,
        )
        self._connected.set()

    async def _keep_joined(self) -> None:
        """Joins after each connect: the server may be another one, or have lost everything."""
        listening = False
        while True:
            await self._connected.wait()
            self._connected.clear()
            try:
                self._revisions.clear()
                await self._add_bucket()
                if not listening:
                    await self._client.subscribe(f"$KV.{MEMBERS}.member.>", cb=self._hear_member)
                    listening = True
                await self._round_trip()
                await self._read_all_members()
                self._heard_at = self.clock.now()
                await self._claim_again()
            except nats.errors.Error as error:
                self._log_once("joining the NATS server failed (it needs JetStream: nats-server -js)", error)
                await self.clock.sleep(AGAIN_S)
                self._connected.set()
            else:
                self._joined.set()
                self._was_joined.set()

    async def _round_trip(self, timeout_s: float = ROUND_TRIP_S) -> None:
        """Returns when the server has processed everything sent before. Raises an error of nats.errors.

        nats-py writes a ping ahead of buffered messages, so that only a second ping follows them. And it
        stops reading at a pong whose ping was abandoned, so no ping is abandoned before its connection."""

        async def ping_twice() -> None:
            await self._client.flush(PONG_S)
            await self._client.flush(PONG_S)

        if not self._client.is_connected:  # flush would return without an error
            raise nats.errors.ConnectionReconnectingError
        pings = asyncio.create_task(ping_twice())
        self._pings.add(pings)
        pings.add_done_callback(self._ended)
        done, _ = await asyncio.wait([pings], timeout=timeout_s)
        if not done:
            raise nats.errors.TimeoutError
        pings.result()

    def _ended(self, pings: asyncio.Task[None]) -> None:
        self._pings.discard(pings)
        if not pings.cancelled():
            pings.exception()  # retrieved, as asyncio logs it otherwise

    async def _add_bucket(self) -> None:
        """Creates the bucket. An existing one stays as it is: its operator may have given it replicas."""
        try:
            await self._js.create_key_value(
                bucket=MEMBERS, ttl=MEMBERS_TTL_S, history=1, storage=api.StorageType.MEMORY
            )
        except APIError as error:
            if error.err_code != STREAM_EXISTS:
                raise
        self._members_bucket = await self._js.key_value(MEMBERS)

    def _hint(self, subject: str) -> None:
        self._hints[subject] = None
        self._has_hints.set()

    async def _follow_hints(self) -> None:
        while True:
            while not self._hints:
                self._has_hints.clear()
                await self._has_hints.wait()
            subject = next(iter(self._hints))
            del self._hints[subject]
            key = _key_of(subject)
            try:
                await self._read_member(key.removeprefix("member."))
            except nats.errors.Error as error:  # joining again reads every key
                self._log_once("a change cannot be read", error)
                self._connected.set()

    async def _insist(self, act: Callable[[], Awaitable[T]]) -> T:
        """Acts, again and again until the server answers. Its refusals are raised."""
        while True:
            await self._joined.wait()
            if self._is_closed:
                raise has_left()
            try:
                return await act()
            except APIError as error:
                if error.code not in MAY_PASS or isinstance(error, KeyValueError):
                    raise
                failure: Exception = error
            except nats.errors.MaxPayloadError:
                raise
            except nats.errors.Error as error:
                failure = error
            self._log_once("the NATS server does not answer; still trying", failure)
            self._connected.set()  # joins again: it may have lost its streams
            await self.clock.sleep(AGAIN_S)

    def _background(self, action: Coroutine[Any, Any, None]) -> None:
        async def act() -> None:
            with suppress(nats.errors.Error):
                await action

        task = asyncio.create_task(act())
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    def _log_once(self, what: str, error: Exception) -> None:
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("%s: %s", what, error or type(error).__name__)

    async def _leave(self) -> None:
        await stop([*self._tasks, *self._background_tasks, *self._asking])
        for member_id in self._registered if self._joined.is_set() else ():
            with suppress(nats.errors.Error):
                await self._bucket.delete(_member_key(member_id))
        with suppress(nats.errors.Error):
            await self._client.close()
        await stop(list(self._pings))
        self._joined.set()  # calls that wait for it raise an error now


def _check_credentials(path: str) -> None:
    if not os.access(path, os.R_OK):
        raise ConfigError(
            f"credentials_file must be a file that can be read, got {path!r}; check its path and mode"
        )
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError("a credentials_file needs the package nkeys: pip install 'nats-py[nkeys]'")


def _key_of(subject: str) -> str:
    """Returns the key in the subject of a bucket's message, $KV.BUCKET.KEY."""
    return subject.split(".", 2)[2]


def _member_key(member_id: str) -> str:
    return f"member.{member_id}"
