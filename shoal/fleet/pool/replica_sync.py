"""Routers side by side tell each other what they have sent where, so that each knows of all load.

Best effort: what is told comes at most once. A router's requests leave the books of others when it says so,
when it has left the plane or died, and at the latest when it next names all that it has. A router that comes
is told what there is.
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
from shoal.fleet.tasks import start, stop

logger = logging.getLogger(__name__)

SUBJECT = "books"
ROUTER = "router"  # the role of a router on the plane
FLUSH_S = 0.005  # changes that come within it go as one message
MOST_CHANGES = 256  # of one message
MOST_BLOCKS = 50_000  # of one message: NATS takes a megabyte
MAX_UNTOLD = 100_000  # changes of a model; the next roll call makes up for those beyond
MOST_PRESENT = 10_000  # requests that one message names
ROLL_CALL_S = 30.0  # between two messages that name all requests


class News(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one router's books, in their order. `present`: all of its requests of this model after
    them; None where that is not told."""

    router: str
    model: str
    changes: list[AnyChange]
    present: list[str] | None = None


class ReplicaSync:
    def __init__(self, registry: Registry, models: Callable[[], Iterable[ModelPool]]) -> None:
        """`models`: those of this router now."""
        self.num_told = self.num_heard = 0  # changes
        self._registry, self._models = registry, models
        self._changes: dict[str, list[AnyChange]] = {}  # by model, not told yet
        self._is_roll_due = False
        self._has_changes = asyncio.Event()  # or the roll is due
        # What others have, by router and model: the ids under which it is in the books here.
        self._others: dict[str, dict[str, set[str]]] = {}
        self._routers: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        loops = (self._hear, self._tell, self._call_the_roll, self._watch)
        self._tasks = [start(loop()) for loop in loops]

    async def close(self) -> None:
        await stop(self._tasks)

    def follow(self, model: ModelPool) -> None:
        """What changes in this model's books is told from now on."""
        model.router.active_requests.on_change = lambda change: self._changed(model.name, change)

    @property
    def num_routers(self) -> int:
        """Beside this one."""
        return len(self._routers)

    # Telling

    def _changed(self, model: str, change: AnyChange) -> None:
        if self._routers:
            untold = self._changes.setdefault(model, [])
            if len(untold) < MAX_UNTOLD:
                untold.append(change)
            self._has_changes.set()

    async def _tell(self) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            changes, self._changes = self._changes, {}
            for model, of_model in changes.items():
                for part in _parts(of_model):
                    await self._publish(model, part)
            if self._is_roll_due:  # sent from here too, so that it comes behind what has been told
                self._is_roll_due = False
                for each in self._models():
                    present = each.router.active_requests.own_requests()
                    if len(present) <= MOST_PRESENT:
                        await self._publish(each.name, [], present)
            await self._registry.clock.sleep(FLUSH_S)

    async def _call_the_roll(self) -> None:
        while True:
            await self._registry.clock.sleep(ROLL_CALL_S)
            if self._routers:
                self._is_roll_due = True
                self._has_changes.set()

    async def _publish(self, model: str, changes: list[AnyChange], present: list[str] | None = None) -> None:
        self.num_told += len(changes)
        try:
            await self._registry.publish(SUBJECT, News(self._registry.name, model, changes, present))
        except ShoalError as error:
            logger.warning("%d changes of books are not told: %s", len(changes), error)

    async def _tell_all(self) -> None:
        """For a router that has just come."""
        for model in self._models():
            active_requests = model.router.active_requests
            for request_id in active_requests.own_requests():
                for change in active_requests.changes_of(request_id):
                    self._changed(model.name, change)

    # Hearing

    async def _hear(self) -> None:
        subscription = await self._registry.subscribe(SUBJECT, News)
        # Whoever sees this router tells it all, so it must listen before.
        await self._registry.register(Member(id=f"router-{self._registry.name}", role=ROUTER, address=""))
        async for news in subscription:
            self._take(news)

    def _take(self, news: News) -> None:
        model = next((one for one in self._models() if one.name == news.model), None)
        if model is None or news.router not in self._routers:  # one that has died, or is this one
            return
        known = self._others.setdefault(news.router, {}).setdefault(news.model, set())
        for change in news.changes:
            self.num_heard += 1
            own_id = f"{news.router}/{change.request_id}"
            if isinstance(change, Begun):
                known.add(own_id)
            elif isinstance(change, Ended):
                known.discard(own_id)
            model.router.take(change, own_id)
        if news.present is not None:
            present = {f"{news.router}/{request_id}" for request_id in news.present}
            for own_id in known - present:
                known.discard(own_id)
                model.router.take(Ended(own_id), own_id)
            for own_id in known:  # however long they run
                model.router.active_requests.touch(own_id)
        model.changed()

    async def _watch(self) -> None:
        async for members in self._registry.watch():
            routers = {
                member.id.removeprefix("router-")
                for member in members.values()
                if member.role == ROUTER and member.id != f"router-{self._registry.name}"
            }
            came, went = routers - self._routers, self._routers - routers
            self._routers = routers
            for router in went:
                self._forget(router)
            if came:
                logger.info("sharing state with %d other router%s", len(routers), "s" * (len(routers) != 1))
                await self._tell_all()

    def _forget(self, router: str) -> None:
        by_name = {model.name: model for model in self._models()}
        for name, known in self._others.pop(router, {}).items():
            if name in by_name:
                for own_id in known:
                    by_name[name].router.take(Ended(own_id), own_id)
                by_name[name].changed()


def _parts(changes: Iterable[AnyChange]) -> Iterator[list[AnyChange]]:
    """The changes in messages of bounded size. What is beyond it of one chain is left out."""
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
