"""`shoal fleet up`: a router in this process and workers in processes of their own. Torch-free.

The first signal drains: running answers end, then the workers do. A second one ends all at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from shoal.apps.route import check_router, run_router
from shoal.apps.serve import plan
from shoal.config import WORKER_ONLY_OPTIONS, ServerConfig
from shoal.errors import ConfigError, ShoalError, UnavailableError, UserError
from shoal.files.toml_file import keys_of
from shoal.fleet.config import FleetConfig
from shoal.fleet.connectors.by_name import connector_named
from shoal.fleet.connectors.connector import GRACE_S, Component, Connector, ConnectorContext
from shoal.fleet.connectors.local import LocalConnector
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet.connectors.state_file import digest_of, fleet_folder, holding, socket_in
from shoal.fleet.file.components import check_gpus, components_of, components_of_pods
from shoal.fleet.file.fleet_file import ExternalWorkers, FleetFile, NativeWorkers, read_fleet_file
from shoal.fleet.planner.config import ON_THIS_HOST, PlannerConfig
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.registry.open import NATS
from shoal.fleet.registry.registry import Registry
from shoal.fleet.scaling.loop import PlannerLoop
from shoal.fleet.scaling.parking import Parking
from shoal.fleet.scaling.scaled_fleet import OwnFleet, PlannerPort, become_planner
from shoal.server.http.keys import key_environment
from shoal.server.run import heeding_signals, open_ports
from shoal.tasks import stop
from shoal.telemetry import logs

logger = logging.getLogger(__name__)

ROUTER = "router"  # name of this process in the log


def fleet_up(path: str, state_dir: str | None = None, verbose: bool = False) -> int:
    """Serves until a signal; returns the exit code: 0 after a drain, 1 after a second signal or if every
    worker has failed. `state_dir`: as in fleet_folder. Raises ShoalError for a fleet that cannot be
    served."""
    file = read_fleet(path)
    make = connector_named(file.planner.connector)
    is_local = file.planner.connector in ON_THIS_HOST
    folder = fleet_folder(path, state_dir)
    with holding(folder, "supervisor"):
        # The socket has the same path at each start, as workers of other connectors may outlive this process.
        plane_url, prefix = plane_of(file, folder), prefix_of(file, place_of(path))
        if file.planner.connector != "kubernetes":
            components = components_of(
                file.workers,
                plane_url,
                more_words=_common_words(file, verbose),
                environment=key_environment(file.server),
                prefix=prefix,
                may_grow=file.may_grow or not is_local,
            )
        else:
            components = components_of_pods(file.workers, file.router.plane)
        log = ProcessLog(sys.stderr, file.server.log_format, width=_width(components))
        level = logging.DEBUG if verbose else logging.INFO
        logs.set_up(level, file.server.log_format, log.stream_of(ROUTER))
        config = dataclasses.replace(file.router, plane=plane_url)
        check_router(config, file.server)
        if is_local:
            check_gpus(file.workers, components)
            check_workers(file, path)
        try:
            with open_record(file.planner if file.planner.enabled else None) as record:
                name = fleet_name(place_of(path))
                workers = FleetSupervisor(file.planner, components, make, log, folder, name, record)
                return asyncio.run(_up(file, config, workers))
        finally:
            log.close()


def read_fleet(path: str) -> FleetFile:
    """Raises ConfigError as read_fleet_file does, and for a file without workers."""
    file = read_fleet_file(path)
    if not file.workers and not file.router.workers and file.router.plane is None:
        raise ConfigError(f"{path} must have at least one worker; write [[workers]]")
    return file


def check_workers(file: FleetFile, path: str) -> None:
    """Checks models, options and programs, and downloads missing models once for all workers. Raises
    ConfigError."""
    for number, group in enumerate(file.workers, 1):
        try:
            if isinstance(group, ExternalWorkers):
                _check_program(group.words[0])
            else:
                _check_model(group)
        except UserError as error:
            raise ConfigError(f"{path}: [[workers]] {number}: {error}") from None


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(
            f"command must begin with a program, got {name!r}; install it, or give its full path"
        )


def _check_model(group: NativeWorkers) -> None:
    """Raises UserError."""
    server = {name: value for name, value in group.options.items() if name in keys_of(ServerConfig)}
    engine = {name: value for name, value in group.options.items() if name not in server}
    alone = {
        name: value for name, value in server.items() if name not in WORKER_ONLY_OPTIONS
    }  # checked when the file was read
    plan(group.model, [], engine, ServerConfig(**alone))


async def _up(file: FleetFile, config: FleetConfig, workers: FleetSupervisor) -> int:
    drain, force = asyncio.Event(), asyncio.Event()
    with heeding_signals(drain, force):
        return await run_fleet(file.server, config, workers, drain, force)


async def run_fleet(
    server: ServerConfig,
    config: FleetConfig,
    workers: FleetSupervisor,
    drain: asyncio.Event,
    force: asyncio.Event,
) -> int:
    """Runs the router and its workers until `drain` is set and all have ended, or until `force` is set.
    Returns and raises as fleet_up does."""
    with ExitStack() as stack:
        ports = [stack.enter_context(port) for port in open_ports(server)]
        run, end = partial(workers.run, drain), partial(workers.end, force)
        await run_router(config, server, ports, drain, force, run, end)
    if workers.error is not None:
        raise workers.error
    return 1 if workers.all_failed or force.is_set() else 0


class FleetSupervisor:
    """Starts and ends the workers of a fleet: a connector, and a planner if the file has one."""

    def __init__(
        self,
        planner: PlannerConfig,
        components: Sequence[Component],
        make: Callable[[ConnectorContext], Connector],
        log: ProcessLog,
        folder: Path,
        name: str,
        record: IO[bytes] | None,
        profiles: Mapping[str, EngineProfile] | None = None,
    ) -> None:
        """`name`: the fleet's name on its plane. `record`: from open_record. `profiles`: for the Planner."""
        self.error: ShoalError | None = None  # the reason why the workers could not be started
        self.all_failed = False
        self._planner, self._components, self._make = planner, components, make
        self._log, self._folder, self._name = log, folder, name
        self._record, self._profiles = record, profiles
        self._connector: Connector | None = None

    async def run(self, drain: asyncio.Event, fleet: Fleet) -> None:
        """Starts the workers and sizes the fleet until it drains. It drains if the workers cannot be started
        or planned, or if all have failed."""
        timeout_s = self._planner.start_timeout
        connector = self._make(
            ConnectorContext(self._components, fleet, fleet.clock, timeout_s, self._log, self._folder)
        )
        if self._planner.park_level is not None:
            assert isinstance(connector, LocalConnector), "the planner's options say so"
            connector = Parking(connector, fleet, self._planner, self._components)
        try:
            if self._planner.enabled:
                await become_planner(_registry_of(fleet), self._name)
            self._connector = connector  # closed by `end`
            await connector.start()
            await self._size(drain, fleet, connector)
        except ShoalError as error:
            self.error = error
            drain.set()
        except OSError as error:  # a full disk: no worker is started without a state file
            self.error = UnavailableError(
                f"the state of the fleet cannot be written to {self._folder}: {error}; make room there, or "
                "give another --state-dir"
            )
            drain.set()

    async def _size(self, drain: asyncio.Event, fleet: Fleet, connector: Connector) -> None:
        """Waits until the fleet drains."""
        all_failed = asyncio.create_task(connector.wait_until_all_failed())
        planned = OwnFleet(fleet, connector, self._components)
        if self._planner.enabled:
            sizing = PlannerLoop(self._planner, planned, fleet.clock, self._record, self._profiles).run()
        else:
            sizing = PlannerPort(planned, _registry_of(fleet), self._name).run()
        tasks = [asyncio.create_task(drain.wait()), all_failed, asyncio.create_task(sizing)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.all_failed = all_failed in done and not drain.is_set()
            if self.all_failed:
                logger.error("all workers have failed and none is started again: the fleet ends")
                drain.set()
            for task in done:
                task.result()
        finally:
            await stop(tasks)

    async def end(self, force: asyncio.Event) -> None:
        """Ends the workers after their requests; at once when `force` is set."""
        if self._connector is None:
            return
        closing = asyncio.create_task(self._connector.close(GRACE_S))
        forced = asyncio.create_task(force.wait())
        await asyncio.wait([closing, forced], return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not closing.done():
            await self._connector.close(0.0)
        await closing


def _registry_of(fleet: Fleet) -> Registry:
    assert fleet.registry is not None, "workers join on it"
    return fleet.registry


@contextmanager
def open_record(planner: PlannerConfig | None) -> Iterator[IO[bytes] | None]:
    """Opens the planner's record, if it has one, for appending. Starts a new line, as a killed planner may
    have left half a line. Raises ConfigError if the file cannot be written."""
    if planner is None or planner.record is None:
        yield None
        return
    try:
        record = open(planner.record, "ab")  # noqa: SIM115 - errors of close are handled below
        if record.seekable() and record.tell() and not _ends_with_a_line(planner.record):
            record.write(b"\n")
    except OSError as error:
        raise ConfigError(
            f"[planner] record {planner.record!r} cannot be written: {error.strerror}; choose another file"
        ) from None
    try:
        yield record
    finally:
        try:
            record.close()
        except (
            OSError
        ) as error:  # a full disk has been reported before and does not change how the fleet ends
            logger.error("the end of the planner's record is lost: %s", error)


def _ends_with_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _common_words(file: FleetFile, verbose: bool) -> list[str]:
    words = [f"--log-format={file.server.log_format}"]
    if file.router.fleet_key_file is not None:
        words.append(f"--fleet-key-file={file.router.fleet_key_file}")
    return [*words, "--verbose"] if verbose else words


def plane_of(file: FleetFile, folder: Path) -> str:
    """Returns the URL of the fleet's plane."""
    return file.router.plane or f"ipc://{socket_in(folder, 'plane')}"


def prefix_of(file: FleetFile, place: str) -> str:
    """Returns the prefix of the ids of a fleet's workers. Ids are unique on a plane, and many hosts and
    fleets share a plane of NATS."""
    if file.router.plane is None or not file.router.plane.startswith(NATS):
        return ""
    return f"{place}-"


def fleet_name(place: str) -> str:
    """Returns the name of a fleet on its plane, which other fleets may share."""
    return f"fleet-{place}"


def place_of(path: str) -> str:
    """Returns a short name for this host and the path of a fleet's file."""
    return f"{socket.gethostname().partition('.')[0]}-{digest_of(path)}"


def _width(components: Sequence[Component]) -> int:
    """Returns the length of the longest name in the log."""
    return max(map(len, [ROUTER, *(f"{one.name}-{one.count}" for one in components)]))
