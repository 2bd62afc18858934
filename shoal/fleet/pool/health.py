"""`HealthChecks`: probes each worker for whether it answers (a check) and computes (a canary). The results go
to `Worker` (fleet/worker.py), which holds the worker's state and circuit breaker.

Each worker is checked at an interval. A worker that has delivered no token for a while gets a probe of one
token (a canary), so that a worker that answers and computes nothing is found within `hang_timeout` seconds of
its last token. A worker that has failed the same request as another one gets a canary at once: either the
request or the workers are at fault. A recent token proves a worker healthy, whatever a probe says, since a
health check may time out under load. A broken worker is probed more often, until it is healthy again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shoal.errors import BusyError, ShoalError, WorkerFailedError
from shoal.fleet.clock import Clock
from shoal.fleet.worker import Worker, WorkerInfo, WorkerLoad
from shoal.tasks import first_of, start, stop

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_TIMEOUT_S = 5.0
LATELY_S = 5.0  # a token younger than this proves that the worker works
QUIET_SHARE = 0.4  # share of hang_timeout until a silent worker gets a canary; the rest is for its answer
FIRST_RETRY_S = 0.25  # after a failure; each further pause is 1.5 times as long, up to the interval
TICKS = 4  # checks of a worker's silence during that share
SUSPECT_S = 1.0  # a token younger than this clears a suspect; also the time between two canaries


class HealthChecks:
    """The health checks of one router's workers. `checked` gets a worker's WorkerInfo before the worker
    counts as reached; `loaded` gets its load."""

    def __init__(
        self,
        clock: Clock,
        *,
        interval_s: float,
        hang_timeout_s: float,
        checked: Callable[[Worker[Any], WorkerInfo], None],
        loaded: Callable[[Worker[Any], list[WorkerLoad]], None],
    ) -> None:
        self.num_canaries = 0
        self._clock, self._interval_s, self._hang_timeout_s = clock, interval_s, hang_timeout_s
        self._checked, self._loaded = checked, loaded
        self._tasks: dict[Worker[Any], list[asyncio.Task[None]]] = {}

    def watch(self, worker: Worker[Any]) -> None:
        """Probes the worker from now on."""
        tasks = [start(self._keep_checking(worker))]
        if self._hang_timeout_s:
            tasks.append(start(self._watch_silence(worker)))
        self._tasks[worker] = tasks

    async def forget(self, worker: Worker[Any]) -> None:
        await stop(self._tasks.pop(worker, []))

    async def close(self) -> None:
        await stop([task for tasks in self._tasks.values() for task in tasks])
        self._tasks.clear()

    async def _keep_checking(self, worker: Worker[Any]) -> None:
        retry, was_well, why = FIRST_RETRY_S, False, ""
        is_new = True
        while True:
            await self._probe(worker)
            if is_new and not worker.is_reached:
                # Otherwise the log would say nothing of a wrong URL.
                logger.warning(
                    "worker %s at %s is not reached yet: %s; start it, or correct its URL; probes continue",
                    *(worker.id, worker.info.url, worker.why),
                )
            is_new = False
            # A break is logged after its probe: a worker that leaves breaks its connection, too.
            if was_well and (why or not worker.is_reached):
                logger.warning("worker %s at %s is broken: %s", worker.id, worker.info.url, why or worker.why)
                was_well = False
            if worker.is_reached:
                if not was_well:
                    logger.info("worker %s at %s is well", worker.id, worker.info.url)
                retry, was_well = FIRST_RETRY_S, True
                await first_of(self._clock.sleep(self._interval_s), worker.broke.wait())
                why = "" if worker.is_reached else worker.why
            else:
                await self._clock.sleep(retry)
                retry, why = min(1.5 * retry, self._interval_s), ""

    async def _probe(self, worker: Worker[Any]) -> None:
        try:
            info = await self._within(CHECK_TIMEOUT_S, worker.link.check(), "a health check")
            if worker.needs_canary and self._hang_timeout_s and not worker.is_asleep:
                await self._canary(worker)
            self._checked(worker, info)
            worker.reached()
            self._loaded(worker, await self._within(CHECK_TIMEOUT_S, worker.link.loads(), "its load"))
        except WorkerFailedError as error:
            if self._clock.now() - worker.last_token_at >= LATELY_S and not worker.num_commands:
                worker.failed(error)
                if not worker.is_reached:
                    worker.interrupt()
        except ShoalError as error:  # it answers, and cannot serve here
            worker.why = str(error)

    async def _watch_silence(self, worker: Worker[Any]) -> None:
        """Sends a canary to a worker that has delivered nothing for a while, or is suspected of failing
        requests."""
        quiet_s = QUIET_SHARE * self._hang_timeout_s
        since = self._clock.now()  # nothing speaks against it yet
        while True:
            await first_of(self._clock.sleep(quiet_s / TICKS), worker.suspected.wait())
            is_suspected = worker.suspected.is_set()
            worker.suspected.clear()
            # A canary takes the only slot of a small server, with the slot's cache. A server that publishes
            # its cache has more slots.
            needs_none = not (worker.active or worker.has_events or is_suspected)
            if not worker.is_reached or worker.is_asleep or worker.num_commands or needs_none:
                since = self._clock.now()
                continue
            since = max(since, worker.last_token_at)
            now = self._clock.now()
            if now - since < quiet_s and not (is_suspected and now - worker.last_token_at >= SUSPECT_S):
                continue
            try:
                await self._canary(worker)
            except WorkerFailedError as error:
                if worker.is_reached and worker.last_token_at <= since and not worker.num_commands:
                    worker.hung(error)
            except ShoalError as error:
                logger.warning("a probe of worker %s cannot be sent: %s", worker.id, error)
            since = self._clock.now()
            await self._clock.sleep(SUSPECT_S)

    async def _canary(self, worker: Worker[Any]) -> None:
        self.num_canaries += 1
        seconds = (1 - QUIET_SHARE - QUIET_SHARE / TICKS) * self._hang_timeout_s
        try:
            await self._within(seconds, worker.link.canary(), "a probe of one token")
        except BusyError:
            pass  # it is full, so it works

    async def _within(self, seconds: float, probe: Coroutine[Any, Any, T], what: str) -> T:
        """Raises WorkerFailedError after `seconds`."""
        asked = asyncio.create_task(probe)
        try:
            await first_of(asked, self._clock.sleep(seconds))
            if not asked.done():
                raise WorkerFailedError(f"{what} was not answered within {seconds:g} s")
            return asked.result()
        finally:
            asked.cancel()
