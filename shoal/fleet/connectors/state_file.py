"""`StateFile`: a fleet's state on this host as readable JSON: components, and workers' numbers, GPUs, ports
and processes. local.py decides when a place is taken and freed; a Supervisor runs the processes.

    with StateFile(folder).changing() as state:       # written when the block is left
        placement = state.place(component)

Only the process that runs the fleet writes it (`holding`), each time as a whole, so that the next one finds a
complete state after a crash.
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

from shoal.errors import ConfigError
from shoal.files.user_dirs import state_folder
from shoal.fleet.connectors.connector import Component

logger = logging.getLogger(__name__)

PORTS = ("port", "events_port", "replay_port")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_SOCKET_PATH = 107  # bytes, of Linux
START_TICKS = 19  # field of /proc/PID/stat, counted after the command's name


class ProcessId(msgspec.Struct, frozen=True):
    """Identifies a process. The pid alone is not enough, as the kernel gives it to a later process.
    `started`: clock ticks from the machine's start to the process's."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Returns None if the process does not exist or is a zombie."""
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
    """One worker's place: its number within its component, its GPUs and its ports."""

    component: Component
    number: int
    devices: tuple[str, ...]
    ports: dict[str, int]

    @property
    def id(self) -> str:
        return f"{self.component.name}-{self.number}"

    @property
    def command(self) -> list[str]:
        return [filled(word, self._values) for word in self.component.command]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the worker gets in addition to its parent's."""
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)} if self.devices else {}
        return {**self.component.environment, **devices}

    @property
    def spec(self) -> str | None:
        """Address of an external worker for the router, in the form of --worker; None for a native worker."""
        worker = self.component.worker
        return None if worker is None else f"{filled(worker, self._values)},id={self.id}"

    @property
    def _values(self) -> dict[str, object]:
        return {"id": self.id, **self.ports}


def filled(text: str, values: Mapping[str, object]) -> str:
    """Returns the text with each `{name}` of `values` replaced by its value. Other braces stay."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


class WorkerEntry(msgspec.Struct, omit_defaults=True):
    """`process`: the present one, or the last; None before its first start. `is_parked`: the worker sleeps,
    as the planner does not need it."""

    since: str  # for people
    process: ProcessId | None = None
    devices: list[str] = []
    ports: dict[str, int] = {}
    is_parked: bool = False


class ComponentEntry(msgspec.Struct):
    """A component stays when it has no workers, so that the planner can add one again. `digest`: hash of the
    settings that define its workers."""

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
    """`supervisor`: the process that runs the fleet; it is still set after a crash. `boot`: id of the
    machine's start in which the state was written; processes and ports of an earlier one mean nothing."""

    boot: str = ""
    supervisor: ProcessId | None = None
    components: dict[str, ComponentEntry] = {}

    def begin(self, components: Sequence[Component]) -> tuple[list[Placement], list[Placement]]:
        """Makes this process the supervisor. Returns the workers that a crash has left and that are still
        wanted, and new ones. A component whose command or count a person has changed in the fleet's file
        starts with new workers. Raises ConfigError as `place` does."""
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
        """Takes the lowest free number and the lowest free GPUs. `taken`: ids of running workers, which may
        be missing here. Raises ConfigError if too few GPUs are free."""
        entry = self.components.setdefault(component.name, ComponentEntry.of(component))
        number = 1
        while number in entry.workers or f"{component.name}-{number}" in (taken or {}):
            number += 1
        placement = Placement(component, number, self._free_devices(component), _free_ports(component))
        self.adopt(placement)
        return placement

    def adopt(self, placement: Placement) -> None:
        """Records a place as taken. A recorded place stays as it is."""
        component = placement.component
        entry = self.components.setdefault(component.name, ComponentEntry.of(component))
        if placement.number not in entry.workers:
            entry.workers[placement.number] = WorkerEntry(
                since=time.strftime("%Y-%m-%d %H:%M:%S"),
                devices=list(placement.devices),
                ports=placement.ports,
            )

    def free(self, placement: Placement) -> None:
        """Releases the place: its number and GPUs may be taken again."""
        entry = self.components.get(placement.component.name)
        if entry is not None:
            entry.workers.pop(placement.number, None)

    def park(self, placement: Placement, is_parked: bool) -> None:
        self.components[placement.component.name].workers[placement.number].is_parked = is_parked

    def is_parked(self, placement: Placement) -> bool:
        return self.components[placement.component.name].workers[placement.number].is_parked

    def placements(self, component: Component) -> list[Placement]:
        """Returns the places of the component's workers, by number."""
        entry = self.components.get(component.name)
        if entry is None:
            return []
        return [
            Placement(component, number, tuple(worker.devices), worker.ports)
            for number, worker in sorted(entry.workers.items())
        ]

    def see(self, pids: Mapping[str, int | None]) -> None:
        """Records the processes of all running workers, by id, and frees the places of workers that a person
        has removed: they had a process and are missing in `pids`. A worker without a process is starting."""
        for name, entry in self.components.items():
            for number, worker in list(entry.workers.items()):
                worker_id = f"{name}-{number}"
                pid = pids.get(worker_id)
                if pid is not None:
                    worker.process = ProcessId.of(pid) or worker.process
                if worker_id not in pids and worker.process is not None:
                    del entry.workers[number]

    @property
    def processes(self) -> list[ProcessId]:
        """The workers' present or last processes."""
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
                f"{len(component.devices)} are free; raise devices or lower count"
            )
        return tuple(free[:wanted])


class StateFile:
    """The file in `folder`, which belongs to one fleet. Disk errors are raised as OSError."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"

    @contextlib.contextmanager
    def changing(self) -> Iterator[State]:
        """Yields the state and writes it when the block is left without an exception. The block must not
        await: a second one would start from the same state."""
        state = self.read()
        yield state
        text = msgspec.json.format(msgspec.json.encode(state), indent=2)
        if self._text() != text:
            new = self.path.with_suffix(".new")
            new.write_bytes(text)
            new.replace(self.path)  # atomic, so that a crash leaves a whole file

    def read(self) -> State:
        """Returns the state as it was last written, or an empty one."""
        boot = BOOT_ID.read_text().strip()
        text = self._text()
        if text is None:
            return State(boot)
        try:
            state = msgspec.json.decode(text, type=State)
        except msgspec.MsgspecError as error:
            logger.error("%s cannot be read (%s) and is rewritten from the running workers", self.path, error)
            return State(boot)
        return state if state.boot == boot else State(boot)

    def _text(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.path.read_bytes()
        return None


def fleet_folder(file: str | Path, state_dir: str | None) -> Path:
    """Makes and returns the folder of a fleet's state, which only its owner can read. `state_dir`: the parent
    folder of all fleets; None: the XDG state directory. Raises ConfigError if it cannot be made."""
    base = state_folder() if state_dir is None else Path(state_dir).absolute()
    name = f"{Path(file).resolve().stem}-{digest_of(file)}"
    try:
        (base / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--state-dir must be a folder that can be written, got {base} ({error}); give another one"
        ) from None
    return base / name


def digest_of(file: str | Path) -> str:
    """Returns a short hash of the absolute path of a fleet's file."""
    return hashlib.blake2b(bytes(Path(file).resolve()), digest_size=4).hexdigest()


def socket_in(folder: Path, name: str) -> Path:
    """Returns the path of a socket in the folder. Raises ConfigError if it is too long for a Unix socket."""
    path = folder / name
    if len(bytes(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"{path} is too long for a socket ({len(bytes(path))} bytes, at most {MAX_SOCKET_PATH}); give a "
            "shorter --state-dir"
        )
    return path


@contextlib.contextmanager
def holding(folder: Path, what: str) -> Iterator[None]:
    """Makes this process the fleet's only `what` until the block is left. Raises ConfigError if another
    process is."""
    with open(folder / f"{what}.pid", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"process {file.read().strip()} is the {what} of this fleet already, with its state in "
                f"{folder}; end that process, or give this one another --state-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _free_ports(component: Component) -> dict[str, int]:
    """Returns a free port for each port name in the command."""
    ports = {}
    with contextlib.ExitStack() as stack:
        for name in PORTS:
            if any("{" + name + "}" in word for word in component.command):
                found = stack.enter_context(socket.socket())
                found.bind(("127.0.0.1", 0))
                ports[name] = found.getsockname()[1]
    return ports
