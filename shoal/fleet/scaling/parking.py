"""`Parking`: a Connector that puts workers to sleep instead of ending them; a worker wakes within a second or
two, while a start takes a minute. It wraps LocalConnector (connectors/local.py), which starts and ends them.

A sleeping worker keeps its process and its GPUs, so it counts in the budget; it ends when a worker of another
kind needs its GPUs.

A worker is recorded as parked before it sleeps, until after it woke, for the next fleet if this one is
killed. A sleeping worker without a record would hold GPUs that no fleet uses or frees.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from shoal.control import Command, Sleep, UpdateWeights, WakeUp, name_of
from shoal.errors import ShoalError, UnavailableError
from shoal.fleet.connectors.connector import GRACE_S, Component, Connector, component_of
from shoal.fleet.connectors.local import LocalConnector
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.pool.fleet import Fleet

logger = logging.getLogger(__name__)


class Parking(Connector):
    """A Connector around another one."""

    def __init__(
        self, inner: LocalConnector, fleet: Fleet, config: PlannerConfig, components: Sequence[Component]
    ) -> None:
        assert config.park_level is not None
        self._inner, self._fleet, self._config, self._components = inner, fleet, config, components
        self._level = config.park_level
        self._parked: dict[str, tuple[str, str]] = {}  # model and role, by worker
        self._placing = asyncio.Lock()
        fleet.parked_ids = self._asleep

    async def start(self) -> None:
        """Starts, and restores the parked workers of a killed fleet."""
        await self._inner.start()
        self._parked = {worker_id: (model, role) for worker_id, model, role in self._inner.parked()}

    def pending(self, model: str) -> int:
        return self._inner.pending(model)

    async def add(self, model: str, role: str) -> str:
        """Wakes the worker that was parked last; starts one if no parked worker wakes."""
        while parked := self._parked_of(model, role):
            worker_id = parked[-1]
            del self._parked[worker_id]  # first, so that a concurrent call takes another worker
            try:
                await self._wake(worker_id, component_of(self._components, model, role))
            except ShoalError as error:
                logger.warning("worker %s does not wake and is ended: %s", worker_id, error)
                await self._inner.end(worker_id)
            else:
                self._inner.record_parked(worker_id, False)
                return worker_id
        async with self._placing:  # so that a concurrent call counts this place
            await self._make_room(role)
            placement = await self._inner.place(model, role)
        return await self._inner.begin(placement)

    async def remove(self, model: str, role: str) -> str:
        """Parks the worker that would be removed. An external worker ends, as it cannot sleep."""
        awake = [name for name in self._inner.placed(model, role) if name not in self._asleep()]
        if not awake:
            raise UnavailableError(f"this fleet has no {role} worker of {model} that is awake")
        worker = self._fleet.workers.get(awake[-1])
        if worker is None or worker.info.is_external:
            await self._inner.end(awake[-1])
            return awake[-1]
        self._inner.record_parked(worker.id, True)
        try:
            await self._command(Sleep(self._level), worker.id, GRACE_S)
        except ShoalError:
            if not worker.is_asleep:  # it may be asleep although the command failed
                self._inner.record_parked(worker.id, False)
                raise
        self._parked[worker.id] = (model, role)
        logger.info("worker %s sleeps until it is needed", worker.id)
        return worker.id

    async def wait_until_all_failed(self) -> None:
        await self._inner.wait_until_all_failed()

    async def close(self, grace_s: float) -> None:
        await self._inner.close(grace_s)

    def _asleep(self) -> dict[str, tuple[str, str]]:
        """Returns the parked workers, without workers that a person or a request has woken, or that have
        restarted."""
        for worker_id in list(self._parked):
            worker = self._fleet.workers.get(worker_id)
            if worker is not None and worker.is_reached and not worker.is_asleep:
                del self._parked[worker_id]
                self._inner.record_parked(worker_id, False)
        return self._parked

    def _parked_of(self, model: str, role: str) -> list[str]:
        return [worker_id for worker_id, kind in self._asleep().items() if kind == (model, role)]

    async def _wake(self, worker_id: str, component: Component) -> None:
        timeout_s = self._config.start_timeout
        await self._command(WakeUp(), worker_id, timeout_s)
        if self._level == 2:
            await self._command(UpdateWeights(component.source), worker_id, timeout_s)

    async def _command(self, command: Command[Any], worker_id: str, timeout_s: float) -> None:
        """Sends a command to the worker. Raises the worker's error; UnavailableError if it has left, or has
        not finished its requests and the command in time."""
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            raise UnavailableError(f"worker {worker_id} has left")
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._fleet.command(command, [worker_id], model=None, rolling=True)
        except TimeoutError:
            raise UnavailableError(
                f"worker {worker_id} did not finish {name_of(command)} within {timeout_s:g} s"
            ) from None
        for error in found.errors.values():
            raise error

    async def _make_room(self, role: str) -> None:
        """Ends parked workers, the longest parked first, until one more worker fits into the budget."""
        while self._parked and self._gpus() + self._config.gpus_of(role) > self._config.max_gpu_budget:
            worker_id = next(iter(self._parked))
            del self._parked[worker_id]
            await self._inner.end(worker_id)

    def _gpus(self) -> int:
        return sum(self._config.gpus_of(role) for role in self._inner.roles())
