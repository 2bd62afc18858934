"""The planner's connector to processes of this host (fleet/processes.py): `shoal fleet up` sizes itself."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import Clock
from shoal.fleet.fleet import Fleet
from shoal.fleet.processes import Component, Processes, WorkerProcess
from shoal.fleet_api import WorkerState

LOOK_S = 0.1  # between two looks at a worker that comes or goes


class ProcessConnector:
    """`components`: by model, and by role."""

    def __init__(
        self,
        processes: Processes,
        components: Mapping[str, Mapping[str, Component]],
        fleet: Fleet,
        clock: Clock,
        start_timeout_s: float,
    ) -> None:
        self._processes, self._components = processes, components
        self._fleet, self._clock, self._start_timeout_s = fleet, clock, start_timeout_s

    def pending(self, model: str) -> int:
        components = self._components[model].values()
        ours = [worker for worker in self._processes if worker.component in components]
        return sum(not worker.has_given_up and not self._is_ready(worker) for worker in ours)

    async def add(self, model: str, role: str) -> str:
        worker = self._processes.add(self._component(model, role))
        deadline = self._clock.now() + self._start_timeout_s
        while not self._is_ready(worker):
            if worker.has_given_up or self._clock.now() >= deadline:
                await self._processes.remove(worker.id)
                raise UnavailableError(
                    f"worker {worker.id} was not ready within {self._start_timeout_s:g} s (start_timeout) "
                    "and is taken back; its lines in the log say why"
                )
            await self._clock.sleep(LOOK_S)
        return worker.id

    async def remove(self, model: str, role: str) -> str:
        component = self._component(model, role)
        ours = [worker for worker in self._processes if worker.component == component]
        if not ours:
            raise UnavailableError(f"there is no {role} worker of {model} here to be removed")
        worker = max(ours, key=lambda one: one.number)
        await self._processes.remove(worker.id)
        while worker.id in self._fleet.workers:
            await self._clock.sleep(LOOK_S)
        return worker.id

    def _component(self, model: str, role: str) -> Component:
        component = self._components[model].get(role)
        if component is None:
            raise ConfigError(f"no [[workers]] of {model} has the role {role!r}; write one, with count = 0")
        return component

    def _is_ready(self, worker: WorkerProcess) -> bool:
        known = self._fleet.workers.get(worker.id)
        return known is not None and known.state == WorkerState.READY
