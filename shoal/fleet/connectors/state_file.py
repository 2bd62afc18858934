"""What runs of a fleet on this host, in a file that people can read: components, and the numbers, GPUs, ports
and processes of their workers.

    with StateFile(folder).changing() as state:       # under a lock, written when the block is left
        placement = state.place(component)

Whoever starts or ends workers takes and gives back their places here, so that several may: a fleet, and a
planner in a process of its own. The file is replaced as a whole. What somebody who died has left in it is put
right when the next one looks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.errors import ConfigError, UnavailableError
from shoal.files.user_dirs import state_folder
from shoal.fleet.connectors.connector import Component

logger = logging.getLogger(__name__)

PORTS = ("port", "events_port", "replay_port")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_SOCKET_PATH = 107  # bytes, of Linux
START_TICKS = 19  # the field of /proc/PID/stat, counted behind the command's name


class ProcessId(msgspec.Struct, frozen=True):
    """A process. Its number alone may be another's by now. `started`: in clock ticks since the machine's."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """None if there is no such process, or nothing is left of it but its exit code."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[START_TICKS]))

    @property
    def is_over(self) -> bool:
        return ProcessId.of(self.pid) != self


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's place: its number among those of its component, its GPUs and ports."""

    component: Component
    number: int
    devices: tuple[str, ...]
    ports: dict[str, int]

    @property
    def id(self) -> str:
        return f"{self.component.name}-{self.number}"

    @property
    def command(self) -> list[str]:
        return [self._fill(word) for word in self.component.command]

    @property
    def environment(self) -> dict[str, str]:
        """What it has beside that of whoever starts it."""
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}
        return {**self.component.environment, **devices}

    @property
    def spec(self) -> str | None:
        """How the router reaches a worker that speaks HTTP, in the form of --worker."""
        worker = self.component.worker
        return None if worker is None else f"{self._fill(worker)},id={self.id}"

    def _fill(self, text: str) -> str:
        for name, value in {"id": self.id, **self.ports}.items():
            text = text.replace("{" + name + "}", str(value))
        return text


class WorkerEntry(msgspec.Struct, omit_defaults=True):
    """`placed_by`: who is to start it. `process`: its present life, or the last one. `is_parked`: the planner
    does not need it, and it sleeps."""

    since: str  # for people
    placed_by: ProcessId | None
    process: ProcessId | None = None
    devices: list[str] = []
    ports: dict[str, int] = {}
    is_parked: bool = False


class ComponentEntry(msgspec.Struct):
    """It stays when it has no workers, so that a role can come back. `digest`: of all that makes its workers
    what they are."""

    model: str
    role: str
    command: list[str]
    digest: str
    count: int
    shares_devices: bool
    workers: dict[int, WorkerEntry] = {}  # by number

    @classmethod
    def of(cls, component: Component) -> ComponentEntry:
        made_of = (
            component.command,
            sorted(component.environment.items()),
            component.devices,
            component.devices_per_worker,
            component.shares_devices,
        )
        return cls(
            component.model,
            component.role,
            list(component.command),
            hashlib.blake2b(repr(made_of).encode(), digest_size=8).hexdigest(),
            component.count,
            component.shares_devices,
        )


class State(msgspec.Struct, omit_defaults=True):
    """`supervisor`: who runs the fleet; by one that has died a crash is known. `boot`: which start of the
    machine all this is of."""

    boot: str = ""
    supervisor: ProcessId | None = None
    components: dict[str, ComponentEntry] = {}

    def begin(self, components: Sequence[Component]) -> tuple[list[Placement], list[Placement]]:
        """This process runs the fleet from now on. Returns the workers that a crash has left, as far as they
        are still wanted, and new ones. Another command or count in the fleet's file is a person's word, so
        that component begins anew. Raises ConfigError as `place` does."""
        old = self.components if self.supervisor is not None else {}
        self.supervisor = ProcessId.of(os.getpid())
        self.components = {component.name: ComponentEntry.of(component) for component in components}
        kept: list[Placement] = []
        anew: list[Component] = []
        for component in components:
            entry, before = self.components[component.name], old.get(component.name)
            if before is not None and (before.digest, before.count) == (entry.digest, entry.count):
                entry.workers = before.workers
                kept += self.placements(component)
            else:
                anew += [component] * component.count
        return kept, [self.place(component) for component in anew]

    def place(self, component: Component, taken: Mapping[str, object] | None = None) -> Placement:
        """Takes the lowest number that is free, and the lowest GPUs. `taken`: ids that run, whatever is known
        of them here. Raises ConfigError if too few GPUs are free."""
        entry = self.components.setdefault(component.name, ComponentEntry.of(component))
        number = 1
        while number in entry.workers or f"{component.name}-{number}" in (taken or {}):
            number += 1
        placement = Placement(component, number, self._free_devices(component), _free_ports(component))
        self.adopt(placement)
        return placement

    def adopt(self, placement: Placement) -> None:
        """Notes a place as taken. One that is noted stays as it is."""
        component = placement.component
        entry = self.components.setdefault(component.name, ComponentEntry.of(component))
        if placement.number not in entry.workers:
            entry.workers[placement.number] = WorkerEntry(
                since=time.strftime("%Y-%m-%d %H:%M:%S"),
                placed_by=ProcessId.of(os.getpid()),
                devices=list(placement.devices),
                ports=placement.ports,
            )

    def free(self, placement: Placement) -> None:
        """Its number and GPUs may be taken again."""
        entry = self.components.get(placement.component.name)
        if entry is not None:
            entry.workers.pop(placement.number, None)

    def park(self, placement: Placement, is_parked: bool) -> None:
        self.components[placement.component.name].workers[placement.number].is_parked = is_parked

    def is_parked(self, placement: Placement) -> bool:
        return self.components[placement.component.name].workers[placement.number].is_parked

    def placements(self, component: Component) -> list[Placement]:
        """The component's workers, by number."""
        entry = self.components.get(component.name)
        if entry is None:
            return []
        return [
            Placement(component, number, tuple(worker.devices), worker.ports)
            for number, worker in sorted(entry.workers.items())
        ]

    def see(self, pids: Mapping[str, int | None]) -> None:
        """Notes the processes of all workers there are, by id, and frees the places of those that are gone:
        a person has removed them, or who was to start them has died."""
        for name, entry in self.components.items():
            for number, worker in list(entry.workers.items()):
                worker_id = f"{name}-{number}"
                pid = pids.get(worker_id)
                if pid is not None:
                    worker.process = ProcessId.of(pid) or worker.process
                is_coming = (
                    worker.process is None and worker.placed_by is not None and not worker.placed_by.is_over
                )
                if worker_id not in pids and not is_coming:
                    del entry.workers[number]

    @property
    def lives(self) -> list[ProcessId]:
        """The workers' processes."""
        workers = [worker for entry in self.components.values() for worker in entry.workers.values()]
        return [worker.process for worker in workers if worker.process is not None]

    def _free_devices(self, component: Component) -> tuple[str, ...]:
        free = sorted(
            component.devices, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0)
        )
        for name, entry in self.components.items():
            if name == component.name or (component.shares_devices and entry.shares_devices):
                for device in [device for worker in entry.workers.values() for device in worker.devices]:
                    if device in free:
                        free.remove(device)
        wanted = component.devices_per_worker if component.devices else 0
        if len(free) < wanted:
            raise ConfigError(
                f"a worker of {component.name} needs {wanted} devices, and {len(free)} of "
                f"{len(component.devices)} are free; give devices more, or count less"
            )
        return tuple(free[:wanted])


class StateFile:
    """`folder` is the fleet's own. Errors of the disk are OSErrors."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"

    @contextlib.contextmanager
    def changing(self) -> Iterator[State]:
        """The state, held by this process alone until the block is left; then it is written, unless the block
        was left by an exception. Raises UnavailableError where another process holds it: who runs an event
        loop must not wait here."""
        path = self.path.with_name("state.lock")
        with open(path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnavailableError(
                    f"{path} is locked by another process; fuser {path} says by which one"
                ) from None
            state = self.read()
            yield state
            text = msgspec.json.format(msgspec.json.encode(state), indent=2)
            if self._text() != text:
                new = self.path.with_suffix(".new")
                new.write_bytes(text)
                new.replace(self.path)

    def read(self) -> State:
        """The state as it was last written; an empty one if there is none."""
        boot = BOOT_ID.read_text().strip()
        text = self._text()
        if text is None:
            return State(boot)
        try:
            state = msgspec.json.decode(text, type=State)
        except msgspec.MsgspecError as error:
            logger.error("%s cannot be read (%s), and is written anew from what runs", self.path, error)
            return State(boot)
        return state if state.boot == boot else State(boot)

    def _text(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.path.read_bytes()
        return None


def fleet_folder(file: str | Path, state_dir: str | None) -> Path:
    """Where the state of a fleet lies: a folder for each fleet's file, for its owner alone. `state_dir`: the
    folder of all fleets; None: as the XDG base directories have it. Raises ConfigError where it cannot be."""
    base = state_folder() if state_dir is None else Path(state_dir).absolute()
    name = f"{Path(file).resolve().stem}-{digest_of(file)}"
    try:
        (base / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the state of a fleet cannot be kept in {base} ({error}); give another --state-dir"
        ) from None
    return base / name


def digest_of(file: str | Path) -> str:
    """A short name for the path of a fleet's file."""
    return hashlib.blake2b(bytes(Path(file).resolve()), digest_size=4).hexdigest()


def socket_in(folder: Path, name: str) -> Path:
    """Where a socket of this fleet lies. Raises ConfigError for a path that is too long for one."""
    path = folder / name
    if len(bytes(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket ({len(bytes(path))} bytes, at most {MAX_SOCKET_PATH}); give a "
            "shorter --state-dir"
        )
    return path


@contextlib.contextmanager
def holding(folder: Path, what: str) -> Iterator[None]:
    """Inside of the block this process alone is the fleet's `what`. Raises ConfigError if another one is."""
    with open(folder / f"{what}.pid", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"process {file.read().strip()} is the {what} of this fleet already, and has its state in "
                f"{folder}; end that one, or give this one another --state-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


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
