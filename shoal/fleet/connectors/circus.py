"""`CircusProcesses`: a Supervisor of workers under Circus (https://circus.readthedocs.io), whose arbiter, a
separate process, is their parent. Their numbers, GPUs and ports are assigned in local.py.

Workers outlive a killed `shoal fleet up`, and its next start takes them over. They die with the arbiter. Each
worker is a Circus watcher with the worker's id; `circusctl --endpoint ipc://FOLDER/circus` shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from circus.client import CircusClient, make_message
from circus.exc import CallError

from shoal.errors import UnavailableError
from shoal.fleet.connectors.connector import LOOK_S, Component, ConnectorContext
from shoal.fleet.connectors.local import LocalConnector, Running
from shoal.fleet.connectors.processes import dying_with, kill_group
from shoal.fleet.connectors.restarts import Restarts
from shoal.fleet.connectors.state_file import Placement, ProcessId, StateFile, socket_in
from shoal.tasks import start, stop

logger = logging.getLogger(__name__)

CALL_S = 5.0  # limit for the arbiter to answer
START_S = 120.0  # limit for the arbiter to start; one that ends is noticed at once
TICK_S = 0.5  # between two polls for dead workers, here and in the arbiter
SETTINGS = """[circus]
endpoint = ipc://{calls}
pubsub_endpoint = ipc://{events}
pidfile = {pid_file}
multicast_endpoint =
check_delay = {tick_s}
"""


def circus_connector(context: ConnectorContext) -> LocalConnector:
    return LocalConnector(context, CircusProcesses(context.folder, context.components))


class CircusProcesses:
    """A Supervisor. `open` starts the arbiter; from then on the arbiter and workers are restarted when they
    die."""

    def __init__(self, folder: Path, components: Sequence[Component]) -> None:
        self._folder, self._components, self._file = folder, components, StateFile(folder)
        self._settings, self._pid_file = folder / "circus.ini", folder / "circus.pid"
        self._client: CircusClient | None = None
        # The client belongs to one thread, which finishes an abandoned call before the next one.
        self._calls = ThreadPoolExecutor(1, "circus")
        self._begun: dict[str, float] = {}  # start of a worker's present process, by the loop's clock
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float | None] = {}  # when a dead worker is restarted; None: it crash-loops
        self._stopping: set[str] = set()
        self._lost: list[Placement] = []  # workers of a dead arbiter that are not restarted yet
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, leftovers: Sequence[ProcessId]) -> None:
        if self._arbiter() is None:
            for process in leftovers:  # the kernel has sent their death signal; some engines ignore it
                while not process.is_over:
                    kill_group(process.pid)
                    await asyncio.sleep(LOOK_S)
            await self._start_arbiter()
        self._tasks.append(start(self._keep_alive()))

    async def running(self) -> Mapping[str, Running]:
        if self._lost:  # they must not count as removed
            raise UnavailableError("the Circus arbiter has died, and its workers are being restarted")
        statuses = (await self._call("status"))["statuses"]
        found = {}
        for worker_id, status in statuses.items():
            self._begun.setdefault(
                worker_id, asyncio.get_running_loop().time()
            )  # a worker that was taken over
            pids: list[int] = []
            if status != "stopped":
                with contextlib.suppress(UnavailableError):  # removed since `status`
                    pids = (await self._call("list", name=worker_id))["pids"]
            is_crash_looping = worker_id in self._due and self._due[worker_id] is None
            found[worker_id] = Running(pids[0] if pids else None, is_crash_looping)
        return found

    async def start(self, placement: Placement) -> None:
        arbiter = self._arbiter()
        if arbiter is None:
            raise UnavailableError("this fleet has no running Circus arbiter; start it with shoal fleet up")
        words = dying_with(arbiter.pid, placement.command, placement.component.death_signal)
        log = {"class": "WatchedFileStream", "filename": str(self._folder / f"{placement.id}.log")}
        self._begun[placement.id] = asyncio.get_running_loop().time()
        self._due.pop(placement.id, None)  # set under a previous arbiter
        await self._call(
            "add",
            name=placement.id,
            cmd=shlex.quote(words[0]),
            args=words[1:],
            start=True,
            waiting=True,
            options={
                "env": {**os.environ, **placement.environment},
                "respawn": False,  # done here, after a growing delay
                "singleton": True,
                "stdout_stream": log,
                "stderr_stream": log,
            },
        )

    async def stop(self, worker_id: str, grace_s: float) -> None:
        self._stopping.add(worker_id)
        try:
            running = (await self.running()).get(worker_id)
            if running is None:
                return
            if running.pid is not None:
                await self._end(worker_id, running.pid, grace_s)
            with contextlib.suppress(UnavailableError):  # a concurrent close removed it
                await self._call("rm", name=worker_id, waiting=True)
        finally:
            self._stopping.discard(worker_id)
            for known in (self._begun, self._restarts, self._due):
                known.pop(worker_id, None)

    async def close(self, grace_s: float) -> None:
        await stop(self._tasks)
        arbiter = self._arbiter()
        if arbiter is None:
            return
        await asyncio.gather(*(self.stop(worker_id, grace_s) for worker_id in await self.running()))
        with contextlib.suppress(ProcessLookupError):  # a concurrent close ended it
            os.kill(arbiter.pid, signal.SIGTERM)
        while not arbiter.is_over:
            await asyncio.sleep(LOOK_S)

    async def _end(self, worker_id: str, pid: int, grace_s: float) -> None:
        process = ProcessId.of(pid)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + grace_s
        while not process.is_over:
            if asyncio.get_running_loop().time() >= deadline:
                logger.warning("%s has not ended within %g s and is killed", worker_id, grace_s)
                break
            await asyncio.sleep(LOOK_S)
        kill_group(pid)
        while not process.is_over:
            await asyncio.sleep(LOOK_S)

    async def _keep_alive(self) -> None:
        """Restarts a dead arbiter at once, with all workers, and a dead worker after a delay."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._arbiter() is None:
                    await self._revive()
                statuses = (await self._call("status"))["statuses"]
                while self._lost:
                    await self._recover(self._lost[0], is_there=self._lost[0].id in statuses)
                    del self._lost[0]
                for worker_id in [name for name, status in statuses.items() if status == "stopped"]:
                    await self._restart(worker_id)
            except (UnavailableError, OSError) as error:  # a disk may be full for a while
                logger.error("%s", error)

    async def _revive(self) -> None:
        """Replaces a dead arbiter."""
        logger.error("the Circus arbiter has died; it is restarted with all workers")
        state = self._file.read()
        self._lost = [one for component in self._components for one in state.placements(component)]
        await self._start_arbiter()

    async def _recover(self, placement: Placement, is_there: bool) -> None:
        """Starts a dead arbiter's worker under the new one."""
        if not is_there:  # else an earlier call started it, and the answer was late
            await self.start(placement)
        with self._file.changing() as state:
            state.adopt(placement)

    def _arbiter(self) -> ProcessId | None:
        """Returns the arbiter's process; None if it is not running."""
        try:
            pid = int(self._pid_file.read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return ProcessId.of(pid) if bytes(self._settings) in words else None

    async def _restart(self, worker_id: str) -> None:
        now = asyncio.get_running_loop().time()
        if worker_id in self._stopping:
            return
        if worker_id not in self._due:
            restarts = self._restarts.setdefault(worker_id, Restarts(worker_id))
            delay_s = restarts.delay_after(now - self._begun.get(worker_id, now), "see its log")
            self._due[worker_id] = None if delay_s is None else now + delay_s
        due = self._due[worker_id]
        if due is not None and now >= due:
            del self._due[worker_id]
            self._begun[worker_id] = now
            await self._call("start", name=worker_id, waiting=True)

    async def _start_arbiter(self) -> None:
        settings = SETTINGS.format(
            calls=socket_in(self._folder, "circus"),
            events=socket_in(self._folder, "events"),
            pid_file=self._pid_file,
            tick_s=TICK_S,
        )
        self._settings.write_text(settings)
        self._pid_file.unlink(missing_ok=True)
        log = self._folder / "circus.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "circus.circusd", str(self._settings)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        logger.info("the Circus arbiter is process %d; logs are in %s", process.pid, self._folder)
        deadline = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                await self._call("numwatchers")
                return
            except UnavailableError as error:
                if process.returncode is not None or asyncio.get_running_loop().time() >= deadline:
                    raise UnavailableError(
                        f"the Circus arbiter does not start ({error}); {log} says why"
                    ) from None

    async def _call(self, command: str, **properties: Any) -> dict[str, Any]:
        """Sends a command to the arbiter. Raises UnavailableError if it does not answer, or refuses."""
        loop = asyncio.get_running_loop()
        while True:
            message = make_message(command, **properties)
            try:
                answer = await loop.run_in_executor(self._calls, self._ask, message)
            except CallError as error:
                raise UnavailableError(f"Circus does not answer to {command!r}: {error}") from None
            if answer.get("status") != "error" or "reason" not in answer:
                return answer
            if not answer["reason"].startswith("arbiter is already running"):
                raise UnavailableError(f"Circus refuses {command!r}: {answer['reason']}")
            await asyncio.sleep(LOOK_S)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Runs in the client's thread."""
        if self._client is None:
            self._client = CircusClient(endpoint=f"ipc://{self._folder}/circus", timeout=CALL_S)
        try:
            return self._client.call(message)
        except CallError:
            self._client.stop()
            self._client = None
            raise
