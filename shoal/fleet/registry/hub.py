"""`Hub`: the state of the embedded registry, members and subscribers, as a state machine without sockets and
clock. `Host` (embedded.py) passes it messages (`take`) and the time (`tick`), and sends what it puts into
`out`.

A process announces itself, repeats what it had registered and subscribed, and renews its lease at intervals.
The hub answers WhoAreYou to a process that it does not know, so that both agree again after a restart of
either side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from shoal.errors import ShoalError
from shoal.fleet.registry.registry import TICK_S, Answer, Member, is_taken
from shoal.fleet.registry.subscription import Reader
from shoal.wire import Failure

MAX_PAUSE_S = 0.5  # between two ticks; the hub was suspended in a longer pause, which does not count


class HubMessage(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of the messages below."""


# To the hub


class Announce(HubMessage, frozen=True):
    """Announces a process, and which members it still has. Its subscriptions follow."""

    lease_s: float
    member_ids: list[str]


class Renew(HubMessage, frozen=True):
    """Renews the lease of the process."""

    version: int  # the process has this version of the list of members


class Bye(HubMessage, frozen=True):
    pass


class Register(HubMessage, frozen=True):
    call_id: int
    member: Member


class Subscribe(HubMessage, frozen=True):
    call_id: int
    subject: str


class Unsubscribe(HubMessage, frozen=True):
    subject: str


class Publish(HubMessage, frozen=True):
    subject: str
    payload: bytes


class Ask(HubMessage, frozen=True):
    """A request to the process of a member."""

    call_id: int
    member_id: str
    payload: bytes


class Respond(HubMessage, frozen=True):
    """The answer to Asked. None: the process takes no requests to this member."""

    asker: str
    call_id: int
    answer: Answer | None


ToHub = Announce | Renew | Bye | Register | Subscribe | Unsubscribe | Publish | Ask | Respond


# From the hub


class Welcome(HubMessage, frozen=True):
    pass


class WhoAreYou(HubMessage, frozen=True):
    pass


class Renewed(HubMessage, frozen=True):
    pass


class Members(HubMessage, frozen=True):
    """`is_whole`: the list is complete. A hub that has just started cannot know this for the time of a
    lease."""

    version: int
    is_whole: bool
    members: dict[str, Member]


class Reply(HubMessage, frozen=True):
    """The outcome of Register or Subscribe."""

    call_id: int
    failure: Failure | None = None


class Delivery(HubMessage, frozen=True):
    subject: str
    payload: bytes


class Asked(HubMessage, frozen=True):
    """Ask, on its way to the process of the member."""

    asker: str
    call_id: int
    member_id: str
    payload: bytes


class Answered(HubMessage, frozen=True):
    """The outcome of Ask. None: no process takes requests to this member."""

    call_id: int
    answer: Answer | None


FromHub = Welcome | WhoAreYou | Renewed | Members | Reply | Delivery | Asked | Answered


class _Peer:
    """A process that the hub knows."""

    def __init__(self, name: str, lease_s: float, now: float) -> None:
        self.name, self.lease_s, self.heard_at = name, lease_s, now
        self.subjects: set[str] = set()


class Hub:
    """The members and subscribers of all announced processes. `take` and `tick` are its inputs, and `out` has
    the messages to send, each with the name of its process."""

    def __init__(self, now: float, lease_s: float) -> None:
        self.out: deque[tuple[str, HubMessage]] = deque()
        self.reader = Reader()
        self._now = self._ticked_at = now
        self._whole_at = now + lease_s
        self._version = 1
        self._peers: dict[str, _Peer] = {}  # by name
        self._members: dict[str, tuple[str, Member]] = {}  # by id; with the name of the peer
        self._subscribers: dict[str, dict[str, None]] = {}  # by subject, in order of arrival

    def take(self, name: str, payload: bytes, now: float) -> None:
        """Handles a message of the process `name`."""
        self._now = now
        message: HubMessage | None = self.reader.read("a process", payload, ToHub)  # type: ignore[arg-type]
        if isinstance(message, Announce):
            self._admit(name, message)
        elif message is not None:
            peer = self._peers.get(name)
            if peer is None:
                self._send(name, WhoAreYou())
            else:
                peer.heard_at = now
                self._handle(peer, message)

    def tick(self, now: float) -> None:
        """Ends leases. Time in which the hub itself was suspended does not count: the messages of that time
        are not read yet."""
        pause = now - self._ticked_at
        if pause > MAX_PAUSE_S:
            for peer in self._peers.values():
                peer.heard_at = min(peer.heard_at + pause, now)
        was_whole = self._is_whole
        self._now = self._ticked_at = now
        for peer in list(self._peers.values()):
            if now - peer.heard_at >= peer.lease_s - TICK_S:
                self._lose(peer)
        if self._is_whole and not was_whole:
            self._announce_members()

    def sends(self) -> Iterator[tuple[str, HubMessage]]:
        """Takes out and yields the outgoing messages."""
        while self.out:
            yield self.out.popleft()

    def _handle(self, peer: _Peer, message: HubMessage) -> None:
        match message:
            case Renew():
                self._renew(peer, message)
            case Bye():
                self._lose(peer)
            case Register():
                self._register(peer, message)
            case Subscribe():
                self._subscribe(peer, message)
            case Unsubscribe():
                peer.subjects.discard(message.subject)
                self._unsubscribe(peer.name, message.subject)
            case Publish():
                for subscriber in self._subscribers.get(message.subject, ()):
                    self._send(subscriber, Delivery(message.subject, message.payload))
            case Ask():
                self._ask(peer, message)
            case Respond():
                if message.asker in self._peers:
                    self._send(message.asker, Answered(message.call_id, message.answer))

    # Processes

    def _admit(self, name: str, message: Announce) -> None:
        known = self._peers.get(name)
        self._peers[name] = _Peer(name, message.lease_s, self._now)
        if known:
            self._forget_subscriptions(known)
            self._drop_members(name, lambda member_id: member_id not in message.member_ids)
        self._send(name, Welcome())
        self._send(name, self._members_message())

    def _renew(self, peer: _Peer, message: Renew) -> None:
        self._send(peer.name, Renewed())
        if message.version != self._version:
            self._send(peer.name, self._members_message())

    def _lose(self, peer: _Peer) -> None:
        """Removes a process that left or died."""
        del self._peers[peer.name]
        self._forget_subscriptions(peer)
        self._drop_members(peer.name, lambda member_id: True)

    # Members

    @property
    def _is_whole(self) -> bool:
        return self._now >= self._whole_at

    def _members_message(self) -> Members:
        members = {member_id: member for member_id, (_, member) in self._members.items()}
        return Members(self._version, self._is_whole, members)

    def _announce_members(self) -> None:
        self._version += 1
        message = self._members_message()
        for name in self._peers:
            self._send(name, message)

    def _register(self, peer: _Peer, message: Register) -> None:
        member = message.member
        owner, known = self._members.get(member.id, (peer.name, None))
        if owner != peer.name:
            self._reply(peer, message.call_id, is_taken(member.id))
            return
        if member != known:
            self._members[member.id] = (peer.name, member)
            self._announce_members()
        self._reply(peer, message.call_id)

    def _drop_members(self, owner: str, is_dropped: Callable[[str], bool]) -> None:
        dropped = [
            member_id
            for member_id, (name, _) in self._members.items()
            if name == owner and is_dropped(member_id)
        ]
        for member_id in dropped:
            del self._members[member_id]
        if dropped:
            self._announce_members()

    # Broadcast

    def _subscribe(self, peer: _Peer, message: Subscribe) -> None:
        peer.subjects.add(message.subject)
        self._subscribers.setdefault(message.subject, {})[peer.name] = None
        self._reply(peer, message.call_id)

    def _unsubscribe(self, name: str, subject: str) -> None:
        subscribers = self._subscribers.get(subject, {})
        subscribers.pop(name, None)
        if not subscribers:
            self._subscribers.pop(subject, None)

    def _forget_subscriptions(self, peer: _Peer) -> None:
        for subject in peer.subjects:
            self._unsubscribe(peer.name, subject)

    # Requests

    def _ask(self, peer: _Peer, message: Ask) -> None:
        owner, _ = self._members.get(message.member_id, (None, None))
        if owner is None:
            self._send(peer.name, Answered(message.call_id, None))
        else:
            self._send(owner, Asked(peer.name, message.call_id, message.member_id, message.payload))

    # Out

    def _reply(self, peer: _Peer, call_id: int, error: ShoalError | None = None) -> None:
        self._send(peer.name, Reply(call_id, Failure.of(error) if error else None))

    def _send(self, name: str, message: HubMessage) -> None:
        self.out.append((name, message))
