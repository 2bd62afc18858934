"""Routers side by side tell each other what they have sent where, so that each knows of all load.

Best effort: what is told comes at most once. A router's requests leave the books of others when it says so,
when it has left the plane or died, and at the latest when it next names all that it has. A router that comes
is told what there is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import msgspec

from shoal.fleet.books import AnyChange, Begun, Ended
from shoal.fleet.model_fleet import ModelFleet
from shoal.fleet.plane import Member, Plane
from shoal.fleet.plane_inbox import start, stop

logger = logging.getLogger(__name__)

SUBJECT = "books"
ROUTER = "router"  # the role of a router on the plane
FLUSH_S = 0.005  # changes that come within it go as one message
MOST_CHANGES = 256  # of one message
ROLL_CALL_S = 30.0  # between two messages that name all requests


class News(msgspec.Struct, array_like=True, frozen=True):
    """Changes of one router's books, in their order. `present`: all of its requests of this model after
    them; None where that is not told."""

    router: str
    model: str
    changes: list[AnyChange]
    present: list[str] | None = None


class SharedBooks:
    def __init__(self, plane: Plane, models: Callable[[], Iterable[ModelFleet]]) -> None:
        """`models`: those of this router now."""
        self.num_told = self.num_heard = 0  # changes
        self._plane, self._models = plane, models
        self._changes: dict[str, list[AnyChange]] = {}  # by model, not told yet
        self._has_changes = asyncio.Event()
        # What others have, by router and model: the ids under which it is in the books here.
        self._others: dict[str, dict[str, set[str]]] = {}
        self._routers: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        loops = (self._register, self._hear, self._tell, self._call_the_roll, self._watch)
        self._tasks = [start(loop()) for loop in loops]

    async def close(self) -> None:
        await stop(self._tasks)

    def follow(self, model: ModelFleet) -> None:
        """What changes in this model's books is told from now on."""
        model.router.books.on_change = lambda change: self._changed(model.name, change)

    @property
    def num_routers(self) -> int:
        """Beside this one."""
        return len(self._routers)

    # Telling

    def _changed(self, model: str, change: AnyChange) -> None:
        if self._routers:
            self._changes.setdefault(model, []).append(change)
            self._has_changes.set()

    async def _register(self) -> None:
        name = self._plane.name
        await self._plane.register(Member(id=f"router-{name}", role=ROUTER, address=""))

    async def _tell(self) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            changes, self._changes = self._changes, {}
            for model, of_model in changes.items():
                for first in range(0, len(of_model), MOST_CHANGES):
                    await self._publish(model, of_model[first : first + MOST_CHANGES])
            await self._plane.clock.sleep(FLUSH_S)

    async def _call_the_roll(self) -> None:
        while True:
            await self._plane.clock.sleep(ROLL_CALL_S)
            if self._routers:
                for model in self._models():
                    await self._publish(model.name, [], model.router.books.own_requests())

    async def _publish(self, model: str, changes: list[AnyChange], present: list[str] | None = None) -> None:
        self.num_told += len(changes)
        await self._plane.publish(SUBJECT, News(self._plane.name, model, changes, present))

    async def _tell_all(self) -> None:
        """For a router that has just come."""
        for model in self._models():
            books = model.router.books
            for request_id in books.own_requests():
                for change in books.story_of(request_id):
                    self._changed(model.name, change)

    # Hearing

    async def _hear(self) -> None:
        async for news in await self._plane.subscribe(SUBJECT, News):
            if news.router != self._plane.name:
                self._take(news)

    def _take(self, news: News) -> None:
        model = next((one for one in self._models() if one.name == news.model), None)
        if model is None:
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
        model.changed()

    async def _watch(self) -> None:
        async for members in self._plane.watch():
            routers = {
                member.id.removeprefix("router-")
                for member in members.values()
                if member.role == ROUTER and member.id != f"router-{self._plane.name}"
            }
            came, went = routers - self._routers, self._routers - routers
            self._routers = routers
            for router in went:
                self._forget(router)
            if came:
                logger.info("%d other routers share their books with this one", len(routers))
                await self._tell_all()

    def _forget(self, router: str) -> None:
        by_name = {model.name: model for model in self._models()}
        for name, known in self._others.pop(router, {}).items():
            if name in by_name:
                for own_id in known:
                    by_name[name].router.take(Ended(own_id), own_id)
                by_name[name].changed()
