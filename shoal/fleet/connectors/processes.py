"""Workers as processes of this host: started, started again when they die, and ended.

    processes = Processes(log)
    await processes.start(placement)
    await processes.stop(placement.id, grace_s)      # it ends what it has
    await processes.close(grace_s)                   # all of them

A worker has a process group of its own. So a Ctrl-C at the terminal reaches the supervisor alone, and what a
worker started itself ends with it. If the supervisor is killed, the kernel ends its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.fleet.connectors.connector import LOOK_S, ConnectorContext
from shoal.fleet.connectors.local import LocalConnector, Running, WorkersById
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet.connectors.restarts import Restarts
from shoal.fleet.connectors.state_file import Placement, ProcessId

logger = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
NOT_STARTED = 126  # exit code of a shell for a program that cannot be run


def process_connector(context: ConnectorContext) -> LocalConnector:
    return LocalConnector(context, Processes(context.log))


class WorkerProcess:
    """One worker: its process, and the one after that."""

    def __init__(self, placement: Placement, log: ProcessLog) -> None:
        self.id = placement.id
        self.is_crash_looping = False
        self._placement, self._log = placement, log
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._keep_alive())

    @property
    def pid(self) -> int | None:
        """None between two lives, and after the last."""
        return None if self._process is None else self._process.pid

    async def stop(self, grace_s: float) -> None:
        """Returns when it has ended: by itself within `grace_s` seconds, or killed."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self.task], timeout=grace_s)
        if not done:
            logger.warning("%s has not ended within %g s and is killed", self.id, grace_s)
            self.kill()
            await self.task

    def kill(self) -> None:
        """Ends it, and what it has started, at once."""
        self._stopping.set()
        if self._process is not None:
            kill_group(self._process.pid)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        restarts = Restarts(self.id)
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._live()
            if self._stopping.is_set():
                return
            delay_s = restarts.delay_after(loop.time() - began, ended_in_words(code))
            if delay_s is None:
                self.is_crash_looping = True
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live(self) -> int:
        """Runs the process; returns its exit code."""
        try:
            self._process = await self._spawn()
        except OSError as error:
            logger.error("%s cannot be started: %s", self.id, error)
            return NOT_STARTED
        logger.info("%s starts as process %d", self.id, self._process.pid)
        if self._stopping.is_set():  # it was to end while it was made
            self._signal(signal.SIGTERM)
        try:
            return await self._process.wait()
        finally:
            kill_group(self._process.pid)
            self._process = None

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._log.pipe(self.id) as output:
            return await asyncio.create_subprocess_exec(
                *dying_with(os.getpid(), self._placement.command, self._placement.component.death_signal),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._placement.environment},
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Processes(WorkersById[WorkerProcess]):
    """All workers that this process has started: a Supervisor."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__()
        self._log = log

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Ends what a supervisor before this one has left: workers may have had no time to die with it, and
        other engines may not have heeded their signal."""
        for life in leftovers:
            if not life.is_over:
                logger.warning("process %d is left of a fleet that was killed, and is ended", life.pid)
                kill_group(life.pid)
            while not life.is_over:
                await asyncio.sleep(LOOK_S)

    async def running(self) -> dict[str, Running]:
        return {name: Running(worker.pid, worker.is_crash_looping) for name, worker in self._workers.items()}

    async def start(self, placement: Placement) -> None:
        self._workers[placement.id] = WorkerProcess(placement, self._log)


def dying_with(parent: int, words: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command line of a program that gets this signal when its parent's thread that starts it ends."""
    return [sys.executable, "-I", "-S", str(LAUNCH), str(parent), str(int(death_signal)), *words]


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def ended_in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
