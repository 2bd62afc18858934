"""`ReplicaSync`: replicas of the router share their active requests, so that each knows the load of all.
ActiveRequests (routing/active_requests.py) has the requests, and the registry broadcasts their changes.

Best effort: a change arrives at most once. A router's requests are dropped by the others when it reports
their end, when it leaves the registry or dies, and at the latest when its next full list lacks them. A router
that joins gets the active requests of all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

import msgspec

from shoal.errors import ShoalError
from shoal.fleet.pool.model_pool import ModelPool
from shoal.fleet.registry.registry import Member, Registry
from shoal.fleet.routing.active_requests import AnyChange, Begun, Ended
from shoal.tasks import start, stop

logger = logging.getLogger(__name__)

SUBJECT = "books"  # its name on the wire since the first version
ROUTER = "router"  # the role of a router's member
FLUSH_S = 0.005  # changes within this time go as one message
MOST_CHANGES = 256  # per message
MOST_BLOCKS = 50_000  # per message: NATS takes a megabyte
MAX_UNSENT = 100_000  # changes per model; the next full list makes up for further ones
MOST_PRESENT = 10_000  # requests in a full list
FULL_LIST_S = 30.0  # between two full lists


class SharedChanges(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one router's active requests of a model, in order. `present`: the full list of its requests
    after them; None in a message without one."""

    router: str
    model: str
    changes: list[AnyChange]
    present: list[str] | None = None


class ReplicaSync:
    """Sends the changes of this router's active requests to the other routers, and applies theirs."""

    def __init__(self, registry: Registry, models: Callable[[], Iterable[ModelPool]]) -> None:
        """`models` returns the models of this router now."""
        self.num_sent = self.num_received = 0  # changes
        self._registry, self._models = registry, models
        self._changes: dict[str, list[AnyChange]] = {}  # by model, not sent yet
        self._is_list_due = False
        self._has_changes = asyncio.Event()  # or the full list is due
        # Requests of other routers, by router and model: their ids among the active requests here.
        self._others: dict[str, dict[str, set[str]]] = {}
        self._routers: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        loops = (self._receive, self._send, self._make_list_due, self._watch)
        self._tasks = [start(loop()) for loop in loops]

    async def close(self) -> None:
        await stop(self._tasks)

    def follow(self, model: ModelPool) -> None:
        """Sends the changes of this model's active requests from now on."""
        model.router.active_requests.on_change = lambda change: self._changed(model.name, change)

    @property
    def num_routers(self) -> int:
        """Other routers in the registry."""
        return len(self._routers)

    # Sending

    def _changed(self, model: str, change: AnyChange) -> None:
        if self._routers:
            unsent = self._changes.setdefault(model, [])
            if len(unsent) < MAX_UNSENT:
                unsent.append(change)
            self._has_changes.set()

    async def _send(self) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            changes, self._changes = self._changes, {}
            for model, model_changes in changes.items():
                for part in _parts(model_changes):
                    await self._publish(model, part)
            if self._is_list_due:  # sent from here, so that it follows the changes before it
                self._is_list_due = False
                for each in self._models():
                    present = each.router.active_requests.own_requests()
                    if len(present) <= MOST_PRESENT:
                        await self._publish(each.name, [], present)
            await self._registry.clock.sleep(FLUSH_S)

    async def _make_list_due(self) -> None:
        while True:
            await self._registry.clock.sleep(FULL_LIST_S)
            if self._routers:
                self._is_list_due = True
                self._has_changes.set()

    async def _publish(self, model: str, changes: list[AnyChange], present: list[str] | None = None) -> None:
        self.num_sent += len(changes)
        try:
            await self._registry.publish(SUBJECT, SharedChanges(self._registry.name, model, changes, present))
        except ShoalError as error:
            logger.warning(
                "%d changes of active requests are not sent to other routers: %s", len(changes), error
            )

    async def _send_all(self) -> None:
        """Sends all active requests, for a router that has just joined."""
        for model in self._models():
            active_requests = model.router.active_requests
            for request_id in active_requests.own_requests():
                for change in active_requests.changes_of(request_id):
                    self._changed(model.name, change)

    # Receiving

    async def _receive(self) -> None:
        subscription = await self._registry.subscribe(SUBJECT, SharedChanges)
        # Routers that see this member send it everything, so the subscription comes first.
        await self._registry.register(Member(id=f"router-{self._registry.name}", role=ROUTER, address=""))
        async for message in subscription:
            self._take(message)

    def _take(self, message: SharedChanges) -> None:
        model = next((one for one in self._models() if one.name == message.model), None)
        if model is None or message.router not in self._routers:  # a router that died, or this one
            return
        known = self._others.setdefault(message.router, {}).setdefault(message.model, set())
        for change in message.changes:
            self.num_received += 1
            own_id = f"{message.router}/{change.request_id}"
            if isinstance(change, Begun):
                known.add(own_id)
            elif isinstance(change, Ended):
                known.discard(own_id)
            model.router.take(change, own_id)
        if message.present is not None:
            present = {f"{message.router}/{request_id}" for request_id in message.present}
            for own_id in known - present:
                known.discard(own_id)
                model.router.take(Ended(own_id), own_id)
            for own_id in known:  # they run on, for any time
                model.router.active_requests.touch(own_id)
        model.changed()

    async def _watch(self) -> None:
        async for members in self._registry.watch():
            routers = {
                member.id.removeprefix("router-")
                for member in members.values()
                if member.role == ROUTER and member.id != f"router-{self._registry.name}"
            }
            joined, left = routers - self._routers, self._routers - routers
            self._routers = routers
            for router in left:
                self._forget(router)
            if joined:
                logger.info("sharing state with %d other router%s", len(routers), "s" * (len(routers) != 1))
                await self._send_all()

    def _forget(self, router: str) -> None:
        by_name = {model.name: model for model in self._models()}
        for name, known in self._others.pop(router, {}).items():
            if name in by_name:
                for own_id in known:
                    by_name[name].router.take(Ended(own_id), own_id)
                by_name[name].changed()


def _parts(changes: Iterable[AnyChange]) -> Iterator[list[AnyChange]]:
    """Yields the changes in parts of bounded size. A longer chain is cut off there."""
    part: list[AnyChange] = []
    num_blocks = 0
    for change in changes:
        if isinstance(change, Begun) and len(change.chain) > MOST_BLOCKS:
            change = msgspec.structs.replace(change, chain=change.chain[:MOST_BLOCKS])
        size = len(change.chain) if isinstance(change, Begun) else 0
        if len(part) >= MOST_CHANGES or num_blocks + size > MOST_BLOCKS:
            yield part
            part, num_blocks = [], 0
        part.append(change)
        num_blocks += size
    if part:
        yield part
