"""The books of the embedded plane: members and subscribers. No sockets and no clock.

`Hub.take` is given a process's message, `Hub.tick` the time; what is to be sent lies in `Hub.out`. A process
says Hello, then what it had registered and subscribed, and Beat at intervals. To one that
the hub does not know it says WhoAreYou, so that after a restart of either side both agree again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from shoal.errors import ConfigError, ShoalError
from shoal.fleet.registry.registry import TICK_S, Member
from shoal.fleet.registry.subscription import Reader
from shoal.wire import Failure

MAX_PAUSE_S = 0.5  # between two ticks; a longer one was no life of the hub


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# To the hub


class Hello(_Message, frozen=True):
    """Says what of earlier times still stands. Its subscriptions follow."""

    lease_s: float
    member_ids: list[str]


class Beat(_Message, frozen=True):
    """A sign of life."""

    version: int  # of the list of members that the process has


class Bye(_Message, frozen=True):
    pass


class Register(_Message, frozen=True):
    call_id: int
    member: Member


class Unregister(_Message, frozen=True):
    member_id: str


class Subscribe(_Message, frozen=True):
    call_id: int
    subject: str


class Unsubscribe(_Message, frozen=True):
    subject: str


class Publish(_Message, frozen=True):
    subject: str
    payload: bytes


ToHub = Hello | Beat | Bye | Register | Unregister | Subscribe | Unsubscribe | Publish


# From the hub


class Welcome(_Message, frozen=True):
    pass


class WhoAreYou(_Message, frozen=True):
    pass


class Pulse(_Message, frozen=True):
    """The answer to a Beat."""


class Members(_Message, frozen=True):
    """`is_whole`: nobody else lives. A hub that has just started cannot know that for the time of a lease."""

    version: int
    is_whole: bool
    members: dict[str, Member]


class Reply(_Message, frozen=True):
    call_id: int
    failure: Failure | None = None


class Delivery(_Message, frozen=True):
    subject: str
    payload: bytes


FromHub = Welcome | WhoAreYou | Pulse | Members | Reply | Delivery


class _Peer:
    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s, self.heard_at = lease_s, now
        self.subjects: set[str] = set()


class Hub:
    def __init__(self, now: float, lease_s: float) -> None:
        self.out: deque[tuple[str, _Message]] = deque()
        self.reader = Reader()
        self._now = self._ticked_at = now
        self._whole_at = now + lease_s
        self._version = 1
        self._peers: dict[str, _Peer] = {}
        self._members: dict[str, tuple[str, Member]] = {}  # the id, and whose it is
        self._subscribers: dict[str, dict[str, None]] = {}  # by subject, in order of arrival

    def take(self, name: str, payload: bytes, now: float) -> None:
        """A message of the process of that name."""
        self._now = now
        message = self.reader.read("a process", payload, ToHub)  # type: ignore[arg-type, var-annotated]
        if isinstance(message, Hello):
            self._hello(name, message)
        elif message is not None:
            peer = self._peers.get(name)
            if peer is None:
                self._send(name, WhoAreYou())
                return
            peer.heard_at = now
            getattr(self, f"_take_{type(message).__name__.lower()}")(name, peer, message)

    def tick(self, now: float) -> None:
        """Ends leases. Time in which the hub itself stood still does not count: what others
        said in it is not read yet."""
        pause = now - self._ticked_at
        if pause > MAX_PAUSE_S:
            for peer in self._peers.values():
                peer.heard_at = min(peer.heard_at + pause, now)
        was_whole = self._is_whole
        self._now = self._ticked_at = now
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at >= peer.lease_s - TICK_S:
                self._lose(name)
        if self._is_whole and not was_whole:
            self._tell_members()

    # Processes

    def _hello(self, name: str, message: Hello) -> None:
        known = self._peers.get(name)
        self._peers[name] = _Peer(message.lease_s, self._now)
        if known:
            self._forget_wishes(name, known)
            self._drop_members(name, keep=message.member_ids)
        self._send(name, Welcome())
        self._send(name, self._members_message())

    def _take_beat(self, name: str, peer: _Peer, message: Beat) -> None:
        self._send(name, Pulse())
        if message.version != self._version:
            self._send(name, self._members_message())

    def _take_bye(self, name: str, peer: _Peer, message: Bye) -> None:
        self._lose(name)

    def _lose(self, name: str) -> None:
        """A process left, or died."""
        self._forget_wishes(name, self._peers.pop(name))
        self._drop_members(name, keep=[])

    def _forget_wishes(self, name: str, peer: _Peer) -> None:
        for subject in peer.subjects:
            self._unsubscribe(name, subject)

    def _drop_members(self, name: str, keep: list[str]) -> None:
        owned = [member_id for member_id, (owner, _) in self._members.items() if owner == name]
        gone = [member_id for member_id in owned if member_id not in keep]
        for member_id in gone:
            del self._members[member_id]
        if gone:
            self._tell_members()

    # Members

    @property
    def _is_whole(self) -> bool:
        return self._now >= self._whole_at

    def _members_message(self) -> Members:
        members = {member_id: member for member_id, (_, member) in self._members.items()}
        return Members(self._version, self._is_whole, members)

    def _tell_members(self) -> None:
        self._version += 1
        message = self._members_message()
        for name in self._peers:
            self._send(name, message)

    def _take_register(self, name: str, peer: _Peer, message: Register) -> None:
        member = message.member
        owner, known = self._members.get(member.id, (name, None))
        if owner != name:
            self._reply(name, message.call_id, ConfigError(f"member {member.id!r} is there already"))
            return
        if member != known:
            self._members[member.id] = (name, member)
            self._tell_members()
        self._reply(name, message.call_id)

    def _take_unregister(self, name: str, peer: _Peer, message: Unregister) -> None:
        owned = [member_id for member_id, (owner, _) in self._members.items() if owner == name]
        self._drop_members(name, keep=[member_id for member_id in owned if member_id != message.member_id])

    # Messages

    def _take_subscribe(self, name: str, peer: _Peer, message: Subscribe) -> None:
        peer.subjects.add(message.subject)
        self._subscribers.setdefault(message.subject, {})[name] = None
        self._reply(name, message.call_id)

    def _take_unsubscribe(self, name: str, peer: _Peer, message: Unsubscribe) -> None:
        peer.subjects.discard(message.subject)
        self._unsubscribe(name, message.subject)

    def _unsubscribe(self, name: str, subject: str) -> None:
        subscribers = self._subscribers.get(subject, {})
        subscribers.pop(name, None)
        if not subscribers:
            self._subscribers.pop(subject, None)

    def _take_publish(self, name: str, peer: _Peer, message: Publish) -> None:
        for subscriber in self._subscribers.get(message.subject, ()):
            self._send(subscriber, Delivery(message.subject, message.payload))

    # Out

    def _reply(self, name: str, call_id: int, error: ShoalError | None = None) -> None:
        self._send(name, Reply(call_id, Failure.of(error) if error else None))

    def _send(self, name: str, message: _Message) -> None:
        self.out.append((name, message))

    def sends(self) -> Iterator[tuple[str, _Message]]:
        """What is to be sent, which is taken out."""
        while self.out:
            yield self.out.popleft()
