"""The books of the embedded plane: members, subscribers, queues. No sockets and no clock.

`Hub.take` is given a process's message, `Hub.tick` the time; what is to be sent lies in `Hub.out`. A process
says Hello, then whatever it had registered, subscribed, pushed or begun, and Beat at intervals. To one that
the hub does not know it says WhoAreYou, so that after a restart of either side both agree again.

An answer of a work item goes to who asked, and only when that process has it is it confirmed to the worker.
So whatever dies in between, the answer is given once: what is not confirmed is sent again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

import msgspec

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.plane import (
    MAX_ATTEMPTS,
    MAX_QUEUED,
    TICK_S,
    Member,
    Outcome,
    QueueLength,
    WorkItem,
    gave_up,
)
from shoal.fleet.plane_inbox import Reader
from shoal.wire import Failure

MAX_RESULTS = 10_000  # of items that are done, so that a worker who comes too late learns it

MAX_PAUSE_S = 0.5  # between two ticks; a longer one was no life of the hub


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


# To the hub


class Hello(_Message, frozen=True):
    """Says what of earlier times still stands. The rest follows: subscriptions, pushes, pulls."""

    lease_s: float
    member_ids: list[str]
    held: list[str]  # ids of work items


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


class Push(_Message, frozen=True):
    """`is_again`: a hub before this one had it, so that somebody may be at it."""

    call_id: int
    queue: str
    item: WorkItem
    is_again: bool


class Pull(_Message, frozen=True):
    queue: str
    pull_id: int


class Unpull(_Message, frozen=True):
    queue: str
    pull_id: int


class Hold(_Message, frozen=True):
    """A process that comes back is still at this item."""

    queue: str
    item: WorkItem
    attempt: int


class Done(_Message, frozen=True):
    item_id: str
    outcome: Outcome


class GiveBack(_Message, frozen=True):
    item_id: str


class Taken(_Message, frozen=True):
    """Who asked has the outcome."""

    item_id: str


class ReadLength(_Message, frozen=True):
    call_id: int
    queue: str


ToHub = (
    Hello
    | Beat
    | Bye
    | Register
    | Unregister
    | Subscribe
    | Unsubscribe
    | Publish
    | Push
    | Pull
    | Unpull
    | Hold
    | Done
    | GiveBack
    | Taken
    | ReadLength
)


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
    length: QueueLength | None = None


class Delivery(_Message, frozen=True):
    subject: str
    payload: bytes


class Given(_Message, frozen=True):
    pull_id: int
    queue: str
    item: WorkItem
    attempt: int


class Confirmed(_Message, frozen=True):
    """`counts`: this worker's answer is the one that was given."""

    item_id: str
    counts: bool


class Finished(_Message, frozen=True):
    item_id: str
    outcome: Outcome


FromHub = Welcome | WhoAreYou | Pulse | Members | Reply | Delivery | Given | Confirmed | Finished


class _Peer:
    def __init__(self, lease_s: float, now: float) -> None:
        self.lease_s, self.heard_at = lease_s, now
        self.subjects: set[str] = set()
        self.pulls: set[tuple[str, int]] = set()


class _Item:
    def __init__(self, queue: str, item: WorkItem) -> None:
        self.queue, self.item = queue, item
        self.attempt = 0
        self.holder: str | None = None
        self.until = 0.0  # the deadline of the attempt, or when it may first be given


class _Result:
    def __init__(self, outcome: Outcome, worker: str | None) -> None:
        self.outcome, self.worker = outcome, worker
        self.is_taken = False


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
        self._items: dict[str, _Item] = {}
        self._waiting: dict[str, deque[str]] = {}  # by queue
        self._pulls: dict[str, OrderedDict[tuple[str, int], None]] = {}  # by queue
        self._num_items: Counter[str] = Counter()  # by queue
        self._results: OrderedDict[str, _Result] = OrderedDict()
        self._untaken: set[str] = set()  # results that who asked has not confirmed

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
        """Ends leases and deadlines. Time in which the hub itself stood still does not count: what others
        said in it is not read yet."""
        pause = now - self._ticked_at
        if pause > MAX_PAUSE_S:
            for peer in self._peers.values():
                peer.heard_at = min(peer.heard_at + pause, now)
            for entry in self._items.values():
                entry.until += pause
        was_whole = self._is_whole
        self._now = self._ticked_at = now
        for name, peer in list(self._peers.items()):
            if now - peer.heard_at >= peer.lease_s - TICK_S:
                self._lose(name)
        for entry in list(self._items.values()):
            if entry.holder and now >= entry.until:
                self._give_up_or_back(entry)
        if self._is_whole and not was_whole:
            self._tell_members()
            for item_id in list(self._untaken):
                self._deliver_result(item_id)
        for queue in list(self._waiting):
            self._match(queue)

    def undelivered(self, name: str, message: _Message) -> None:
        """A message could not be sent: its receiver is gone, or takes nothing. What matters comes again."""
        if isinstance(message, Given):
            entry = self._items.get(message.item.id)
            if entry and entry.holder == name:
                entry.attempt -= 1
                self._back(entry)

    # Processes

    def _hello(self, name: str, message: Hello) -> None:
        known = self._peers.get(name)
        self._peers[name] = _Peer(message.lease_s, self._now)
        if known:
            self._forget_wishes(name, known)
            self._drop_members(name, keep=message.member_ids)
            for entry in self._held_by(name):
                if entry.item.id not in message.held:
                    self._give_up_or_back(entry)
        self._send(name, Welcome())
        self._send(name, self._members_message())

    def _take_beat(self, name: str, peer: _Peer, message: Beat) -> None:
        self._send(name, Pulse())
        if message.version != self._version:
            self._send(name, self._members_message())
        for item_id in self._untaken:
            if item_id.startswith(name + "."):
                self._send(name, Finished(item_id, self._results[item_id].outcome))

    def _take_bye(self, name: str, peer: _Peer, message: Bye) -> None:
        self._lose(name)

    def _lose(self, name: str) -> None:
        """A process left, or died."""
        self._forget_wishes(name, self._peers.pop(name))
        for entry in self._held_by(name):
            self._give_up_or_back(entry)
        for item_id in list(self._untaken):
            if item_id.startswith(name + "."):
                self._deliver_result(item_id)  # nobody is left to take it
        self._drop_members(name, keep=[])

    def _forget_wishes(self, name: str, peer: _Peer) -> None:
        for subject in peer.subjects:
            self._unsubscribe(name, subject)
        for queue, pull_id in peer.pulls:
            self._pulls[queue].pop((name, pull_id), None)

    def _held_by(self, name: str) -> list[_Item]:
        return [entry for entry in self._items.values() if entry.holder == name]

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

    # Queue

    def _take_push(self, name: str, peer: _Peer, message: Push) -> None:
        item_id = message.item.id
        if item_id in self._results:
            self._deliver_result(item_id)
        elif item_id not in self._items:
            if self._num_items[message.queue] >= MAX_QUEUED and not message.is_again:
                full = f"queue {message.queue} is full: {MAX_QUEUED} items; push again later"
                self._reply(name, message.call_id, UnavailableError(full))
                return
            entry = self._add(message.queue, message.item)
            entry.until = self._whole_at if message.is_again else 0.0
            self._waiting.setdefault(message.queue, deque()).append(item_id)
        self._reply(name, message.call_id)
        self._match(message.queue)

    def _take_pull(self, name: str, peer: _Peer, message: Pull) -> None:
        peer.pulls.add((message.queue, message.pull_id))
        self._pulls.setdefault(message.queue, OrderedDict())[name, message.pull_id] = None
        self._match(message.queue)

    def _take_unpull(self, name: str, peer: _Peer, message: Unpull) -> None:
        peer.pulls.discard((message.queue, message.pull_id))
        self._pulls.get(message.queue, OrderedDict()).pop((name, message.pull_id), None)

    def _take_hold(self, name: str, peer: _Peer, message: Hold) -> None:
        item_id = message.item.id
        if item_id in self._results:
            return
        entry = self._items.get(item_id) or self._add(message.queue, message.item)
        if entry.holder is None:
            self._assign(entry, name, message.attempt)

    def _take_done(self, name: str, peer: _Peer, message: Done) -> None:
        result = self._results.get(message.item_id)
        if result is None:
            self._finish(message.item_id, message.outcome, name)
        elif result.worker != name or result.is_taken:
            self._send(name, Confirmed(message.item_id, result.worker == name))

    def _take_giveback(self, name: str, peer: _Peer, message: GiveBack) -> None:
        entry = self._items.get(message.item_id)
        if entry and entry.holder == name:
            self._give_up_or_back(entry)

    def _take_taken(self, name: str, peer: _Peer, message: Taken) -> None:
        result = self._results.get(message.item_id)
        if result and not result.is_taken:
            self._confirm(message.item_id, result)

    def _take_readlength(self, name: str, peer: _Peer, message: ReadLength) -> None:
        entries = [entry for entry in self._items.values() if entry.queue == message.queue]
        running = sum(entry.holder is not None for entry in entries)
        length = QueueLength(waiting=len(entries) - running, running=running)
        self._send(name, Reply(message.call_id, length=length))

    def _add(self, queue: str, item: WorkItem) -> _Item:
        entry = self._items[item.id] = _Item(queue, item)
        self._num_items[queue] += 1
        return entry

    def _match(self, queue: str) -> None:
        """Gives what waits to those who wait for it."""
        waiting, pulls = self._waiting.get(queue), self._pulls.get(queue)
        while waiting and pulls:
            entry = self._items.get(waiting[0])
            if entry is None or entry.holder is not None:  # done, or claimed by who was at it
                waiting.popleft()
                continue
            if self._now < entry.until:
                return
            waiting.popleft()
            (name, pull_id), _ = pulls.popitem(last=False)
            self._peers[name].pulls.discard((queue, pull_id))
            self._assign(entry, name, entry.attempt + 1)
            self._send(name, Given(pull_id, queue, entry.item, entry.attempt))

    def _assign(self, entry: _Item, name: str, attempt: int) -> None:
        entry.holder, entry.attempt = name, attempt
        entry.until = self._now + entry.item.deadline_s

    def _give_up_or_back(self, entry: _Item) -> None:
        if entry.attempt >= MAX_ATTEMPTS:
            self._finish(entry.item.id, gave_up(entry.item), None)
        else:
            self._back(entry)

    def _back(self, entry: _Item) -> None:
        entry.holder, entry.until = None, 0.0
        self._waiting.setdefault(entry.queue, deque()).appendleft(entry.item.id)
        self._match(entry.queue)

    def _finish(self, item_id: str, outcome: Outcome, worker: str | None) -> None:
        entry = self._items.pop(item_id, None)
        if entry:
            self._num_items[entry.queue] -= 1
        self._results[item_id] = _Result(outcome, worker)
        self._untaken.add(item_id)
        while len(self._results) > MAX_RESULTS:
            self._untaken.discard(self._results.popitem(last=False)[0])
        self._deliver_result(item_id)

    def _deliver_result(self, item_id: str) -> None:
        result = self._results[item_id]
        asker = item_id.partition(".")[0]
        if asker in self._peers:
            self._send(asker, Finished(item_id, result.outcome))
        elif self._is_whole and not result.is_taken:  # who asked is dead
            self._confirm(item_id, result)

    def _confirm(self, item_id: str, result: _Result) -> None:
        result.is_taken = True
        self._untaken.discard(item_id)
        if result.worker in self._peers:
            self._send(result.worker, Confirmed(item_id, True))

    # Out

    def _reply(self, name: str, call_id: int, error: ShoalError | None = None) -> None:
        self._send(name, Reply(call_id, Failure.of(error) if error else None))

    def _send(self, name: str, message: _Message) -> None:
        self.out.append((name, message))

    def sends(self) -> Iterator[tuple[str, _Message]]:
        """What is to be sent, which is taken out."""
        while self.out:
            yield self.out.popleft()
