"""`Processes`: a Supervisor of workers that are child processes: starts them, restarts dead ones, and ends
them. local.py assigns their GPUs and ports; restarts.py computes the delay before a restart.

    processes = Processes(log)
    await processes.start(placement)
    await processes.stop(placement.id, grace_s)      # after its requests
    await processes.close(grace_s)                   # all workers

A worker has its own process group, so that a Ctrl-C at the terminal reaches only the supervisor, and a
worker's children end with it. If the supervisor is killed, the kernel ends its workers.
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
    """One worker: its process and the following ones after restarts."""

    def __init__(self, placement: Placement, log: ProcessLog) -> None:
        self.id = placement.id
        self.is_crash_looping = False
        self._placement, self._log = placement, log
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._keep_alive())

    @property
    def pid(self) -> int | None:
        """None between two processes, and after the last one."""
        return None if self._process is None else self._process.pid

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, kills the worker after `grace_s` seconds, and returns when it has ended."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([self.task], timeout=grace_s)
        if not done:
            logger.warning("%s has not ended within %g s and is killed", self.id, grace_s)
            self.kill()
            await self.task

    def kill(self) -> None:
        """Kills the worker and its children."""
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
        if self._stopping.is_set():  # `stop` was called during the start
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
    """A Supervisor of workers that are children of this process."""

    def __init__(self, log: ProcessLog) -> None:
        super().__init__()
        self._log = log

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        """Ends the workers of a killed supervisor: they may have had no time to die with it, and external
        engines may ignore their death signal."""
        for process in leftovers:
            if not process.is_over:
                logger.warning("process %d is left over from a killed fleet and is ended", process.pid)
                kill_group(process.pid)
            while not process.is_over:
                await asyncio.sleep(LOOK_S)

    async def running(self) -> dict[str, Running]:
        return {name: Running(worker.pid, worker.is_crash_looping) for name, worker in self._workers.items()}

    async def start(self, placement: Placement) -> None:
        self._workers[placement.id] = WorkerProcess(placement, self._log)


def dying_with(parent: int, words: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Returns the command line of a program that gets this signal when the parent's starting thread ends."""
    return [sys.executable, "-I", "-S", str(LAUNCH), str(parent), str(int(death_signal)), *words]


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def ended_in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
