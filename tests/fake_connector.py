"""A connector that only counts, on any clock: workers are ready `start_s` seconds after they are added."""

from __future__ import annotations

import asyncio

from shoal.errors import UnavailableError
from shoal.fleet.connectors.connector import Component, component_of
from shoal.fleet_views import WorkerState


class FakeConnector:
    """`states` is all there is of its workers, by id. `fails` are the models whose workers never get ready."""

    def __init__(self, components, start_s=0.0, start_timeout_s=60.0):
        self.components, self.start_s, self.start_timeout_s = components, start_s, start_timeout_s
        self.states: dict[str, WorkerState] = {}
        self.fails: set[str] = set()
        self.changes: list[tuple[float, str, int]] = []  # time, model, count
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self):
        for component in self.components:
            for _ in range(component.count):
                self._begin(component)

    def pending(self, model):
        names = [
            name for component in self.components if component.model == model for name in self.of(component)
        ]
        return sum(self.states[name] != WorkerState.READY for name in names)

    async def add(self, model, role):
        component = component_of(self.components, model, role)
        worker_id = self._begin(component)
        waiting = self.start_timeout_s if model in self.fails else self.start_s
        await asyncio.sleep(waiting)
        if model in self.fails:
            self.states.pop(worker_id, None)
            raise UnavailableError(
                f"worker {worker_id} was not ready within {waiting:g} s, and is taken back"
            )
        self.states[worker_id] = WorkerState.READY
        self._note(model, 1)
        return worker_id

    async def remove(self, model, role):
        ours = self.of(component_of(self.components, model, role))
        if not ours:
            raise UnavailableError(f"this fleet has no {role} worker of {model} to remove")
        del self.states[ours[-1]]
        self._note(model, -1)
        return ours[-1]

    async def wait_until_all_failed(self):
        await asyncio.Event().wait()

    async def close(self, grace_s):
        for task in self._tasks:
            task.cancel()
        self.states.clear()

    def kill(self, worker_id):
        """Replaces a worker, which is ready again after the time of a start."""
        self.states[worker_id] = WorkerState.BROKEN
        [component] = [one for one in self.components if worker_id in self.of(one)]
        self._later(self._get_ready(worker_id, component.model))

    def of(self, component: Component) -> list[str]:
        """Ids, by number."""
        found = [name for name in self.states if name.rpartition("-")[0] == component.name]
        return sorted(found, key=lambda name: int(name.rpartition("-")[2]))

    def count(self, model) -> int:
        """The number of the model's workers that are ready."""
        ours = [
            name for component in self.components if component.model == model for name in self.of(component)
        ]
        return sum(self.states[name] == WorkerState.READY for name in ours)

    def _begin(self, component):
        number = 1
        while f"{component.name}-{number}" in self.states:
            number += 1
        worker_id = f"{component.name}-{number}"
        self.states[worker_id] = WorkerState.BROKEN
        self._later(self._get_ready(worker_id, component.model))
        return worker_id

    def _later(self, coroutine):
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get_ready(self, worker_id, model):
        if model in self.fails:
            await asyncio.sleep(self.start_timeout_s)
            self.states.pop(worker_id, None)
        await asyncio.sleep(self.start_s)
        if worker_id in self.states:
            self.states[worker_id] = WorkerState.READY

    def _note(self, model, count):
        self.changes.append((asyncio.get_running_loop().time(), model, count))
