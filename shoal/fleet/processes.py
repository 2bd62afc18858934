"""Workers as processes of this host: started, started again when they die, and ended.

    processes = Processes(log)
    worker = processes.add(component)      # one more worker of this component
    await processes.remove(worker.id)      # it ends what it has
    await processes.close()                # all of them

A worker has a process group of its own. So a Ctrl-C at the terminal reaches the supervisor alone, and what a
worker started itself ends with it. If the supervisor is killed, the kernel ends its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError, UnknownWorkerError
from shoal.fleet.process_log import ProcessLog

logger = logging.getLogger(__name__)

LAUNCH = Path(__file__).with_name("launch.py")
MAX_DEATHS = 5  # in succession, after which a worker is not started again
LONG_LIFE_S = 60.0  # a worker that lived so long starts anew with these counts
FIRST_DELAY_S = 1.0  # before the second start; each further delay is twice as long
GRACE_S = 60.0  # for a worker to end what it has, after SIGTERM
NOT_STARTED = 126  # the exit code of a shell for what cannot be run
PORTS = ("port", "events_port", "replay_port")


@dataclass(frozen=True, slots=True)
class Component:
    """A kind of worker, of which there may be any number.

    command: the words of the command line. In each of them `{id}` stands for the worker's id and `{port}`,
    `{events_port}` and `{replay_port}` for free ports, which a worker keeps when it starts again. devices:
    the GPUs of all its workers, of which each gets `devices_per_worker`; without them workers see what this
    process sees. shares_devices: the GPUs are those of other components too, and one worker has each at a
    time. death_signal: what a worker gets when this process is killed."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    devices_per_worker: int = 1
    shares_devices: bool = False
    death_signal: signal.Signals = signal.SIGKILL


class WorkerProcess:
    """One worker: its process, and the one after that."""

    def __init__(
        self,
        number: int,
        component: Component,
        devices: tuple[str, ...],
        ports: Mapping[str, int],
        log: ProcessLog,
    ) -> None:
        self.id, self.number = f"{component.name}-{number}", number
        self.component, self.devices, self.ports = component, devices, ports
        self.has_given_up = False
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._keep_alive())

    @property
    def pid(self) -> int | None:
        """None between two lives, and after the last."""
        return None if self._process is None else self._process.pid

    def fill(self, text: str) -> str:
        """The text with the worker's id and ports in it."""
        for name, value in {"id": self.id, **self.ports}.items():
            text = text.replace("{" + name + "}", str(value))
        return text

    async def stop(self, grace_s: float = GRACE_S) -> None:
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
            _kill_group(self._process.pid)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        num_deaths = 0
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._live()
            if self._stopping.is_set():
                return
            lived_s = loop.time() - began
            num_deaths = 1 if lived_s >= LONG_LIFE_S else num_deaths + 1
            if num_deaths == MAX_DEATHS:
                self.has_given_up = True
                logger.error(
                    "%s has ended %d times in succession (%s) and is not started again; its lines above say "
                    "why",
                    self.id,
                    num_deaths,
                    _ended(code),
                )
                return
            delay_s = FIRST_DELAY_S * 2 ** (num_deaths - 1)
            logger.error(
                "%s ended after %.1f s (%s); it is started again in %g s (%d of %d)",
                self.id,
                lived_s,
                _ended(code),
                delay_s,
                num_deaths,
                MAX_DEATHS - 1,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live(self) -> int:
        """Runs the process; returns its exit code."""
        environment = {**os.environ, **self.component.environment}
        if self.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        death = str(int(self.component.death_signal))
        words = [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), death]
        try:
            self._process = await self._spawn(words, environment)
        except OSError as error:
            logger.error("%s cannot be started: %s", self.id, error)
            return NOT_STARTED
        logger.info("%s starts as process %d", self.id, self._process.pid)
        if self._stopping.is_set():  # it was to end while it was made
            self._signal(signal.SIGTERM)
        try:
            return await self._process.wait()
        finally:
            _kill_group(self._process.pid)
            self._process = None

    async def _spawn(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        with self._log.pipe(self.id) as output:
            return await asyncio.create_subprocess_exec(
                *words,
                *map(self.fill, self.component.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


class Processes:
    """All workers that this process has started."""

    def __init__(self, log: ProcessLog) -> None:
        self._log = log
        self._workers: dict[str, WorkerProcess] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(list(self._workers.values()))

    def add(self, component: Component) -> WorkerProcess:
        """Starts one more worker and does not wait for it. Raises ConfigError if the component's devices are
        all in use."""
        devices = self._free_devices(component)
        number = 1
        while f"{component.name}-{number}" in self._workers:
            number += 1
        worker = WorkerProcess(number, component, devices, _free_ports(component), self._log)
        worker.task.add_done_callback(lambda _: self._changed.set())
        self._workers[worker.id] = worker
        return worker

    async def remove(self, worker_id: str, grace_s: float = GRACE_S) -> None:
        """Returns when the worker has ended. Raises UnknownWorkerError."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise UnknownWorkerError(f"there is no worker {worker_id!r} here; there are {self._names()}")
        await worker.stop(grace_s)
        self._workers.pop(worker_id, None)

    async def close(self, grace_s: float = GRACE_S) -> None:
        """Ends all workers at the same time."""
        await asyncio.gather(*(self.remove(worker_id, grace_s) for worker_id in list(self._workers)))

    def kill(self) -> None:
        """Ends all at once."""
        for worker in self._workers.values():
            worker.kill()

    async def until_hopeless(self) -> None:
        """Returns when there were workers, and none of them is started again."""
        while not self._workers or not all(worker.has_given_up for worker in self._workers.values()):
            self._changed.clear()
            await self._changed.wait()

    def _free_devices(self, component: Component) -> tuple[str, ...]:
        free = list(component.devices)
        for worker in self._workers.values():
            shares = component.shares_devices and worker.component.shares_devices
            if worker.component == component or shares:
                for device in worker.devices:
                    free.remove(device)
        wanted = component.devices_per_worker if component.devices else 0
        if len(free) < wanted:
            raise ConfigError(
                f"a worker of {component.name} needs {wanted} devices, and {len(free)} of "
                f"{len(component.devices)} are free; give devices more, or count less"
            )
        return tuple(free[:wanted])

    def _names(self) -> str:
        return ", ".join(self._workers) or "none"


def _free_ports(component: Component) -> dict[str, int]:
    """A port for each that the command mentions."""
    ports = {}
    with contextlib.ExitStack() as stack:
        for name in PORTS:
            if any("{" + name + "}" in word for word in component.command):
                found = stack.enter_context(socket.socket())
                found.bind(("127.0.0.1", 0))
                ports[name] = found.getsockname()[1]
    return ports


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
