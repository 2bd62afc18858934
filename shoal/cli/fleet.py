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
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from shoal import logs
from shoal.cli.route import check_router, run_router
from shoal.cli.serve import plan
from shoal.config import ServerConfig
from shoal.errors import ConfigError, UserError
from shoal.fleet.components import components_of
from shoal.fleet.connector_process import ProcessConnector
from shoal.fleet.fleet import Fleet
from shoal.fleet.fleet_config import FleetConfig
from shoal.fleet.fleet_file import FleetFile, ForeignWorkers, OwnWorkers, read_fleet_file
from shoal.fleet.planes import NATS
from shoal.fleet.planner_loop import PlannerLoop
from shoal.fleet.process_log import ProcessLog
from shoal.fleet.processes import Component, Processes
from shoal.fleet.toml_file import keys_of
from shoal.server.keys import read_keys
from shoal.server.run import heeding_signals, open_ports

logger = logging.getLogger(__name__)

ROUTER = "router"  # the name of this process in the log


def fleet_up(path: str, verbose: bool = False) -> int:
    """Serves until a signal; returns the exit code: 0 after a drain, 1 after a second signal or if every
    worker is given up. Raises ShoalError for what cannot be served."""
    file = read_fleet_file(path)
    if not file.workers and not file.router.workers and file.router.plane is None:
        raise ConfigError(f"{path}: there is no worker; write [[workers]]")
    with tempfile.TemporaryDirectory(prefix="shoal-fleet-") as folder:
        plane_url = file.router.plane or f"ipc://{folder}/plane"
        components = components_of(
            file.workers,
            plane_url,
            more_words=_common_words(file, verbose),
            environment=_environment(file.server),
            prefix=_prefix(plane_url, file.server),
            may_grow=file.planner.enabled,
        )
        log = ProcessLog(sys.stderr, file.server.log_format, width=_width(components, file.workers))
        level = logging.DEBUG if verbose else logging.INFO
        logs.set_up(level, file.server.log_format, log.stream_of(ROUTER))
        config = dataclasses.replace(file.router, plane=plane_url)
        check_router(config, file.server)
        _check_workers(file, path)
        try:
            return asyncio.run(_up(file, config, components, log))
        finally:
            log.close()


def _check_workers(file: FleetFile, path: str) -> None:
    """Finds what is wrong with models, options and programs, and downloads what is missing once for all
    workers."""
    for number, group in enumerate(file.workers, 1):
        try:
            if isinstance(group, ForeignWorkers):
                _check_program(group.words[0])
            else:
                _check_model(group)
        except UserError as error:
            raise ConfigError(f"{path}: [[workers]] {number}: {error}") from None


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigError(f"{name!r} is no program here; install it, or give its whole path")


def _check_model(group: OwnWorkers) -> None:
    server = {name: value for name, value in group.options.items() if name in keys_of(ServerConfig)}
    engine = {name: value for name, value in group.options.items() if name not in server}
    plan(group.model, [], engine, ServerConfig(**server))


async def _up(file: FleetFile, config: FleetConfig, components: Sequence[Component], log: ProcessLog) -> int:
    is_hopeless = False
    drain, force = asyncio.Event(), asyncio.Event()
    with heeding_signals(drain, force), ExitStack() as stack:
        ports = [stack.enter_context(port) for port in open_ports(file.server)]
        processes = Processes(log)
        try:
            specs = _start(file, components, processes)
            config = dataclasses.replace(config, worker=[*(config.worker or ()), *specs])
            plans = partial(_plan, file, components, processes, drain) if file.planner.enabled else None
            router = asyncio.create_task(run_router(config, file.server, ports, drain, force, plans))
            hopeless = asyncio.create_task(processes.until_hopeless())
            await asyncio.wait([router, hopeless], return_when=asyncio.FIRST_COMPLETED)
            is_hopeless = not router.done()
            if is_hopeless:
                logger.error("no worker is left, and none is started again: the fleet ends")
                drain.set()
            hopeless.cancel()
            await router
        finally:
            await _end(processes, force)
    return 1 if is_hopeless or force.is_set() else 0


async def _plan(
    file: FleetFile, components: Sequence[Component], processes: Processes, drain: asyncio.Event, fleet: Fleet
) -> None:
    """The planner, until the fleet drains."""
    by_model: dict[str, dict[str, Component]] = {}
    for component, group in zip(components, file.workers, strict=True):
        assert isinstance(group, OwnWorkers)
        by_model.setdefault(group.served_name, {})[group.role] = component
    roles = {name: "decode" if "decode" in found else "both" for name, found in by_model.items()}
    connector = ProcessConnector(processes, by_model, fleet, fleet.clock, file.planner.start_timeout)
    with ExitStack() as stack:
        record = None
        if file.planner.record is not None:
            record = stack.enter_context(open(file.planner.record, "ab"))
        loop = PlannerLoop(
            file.planner,
            lambda: {name: fleet.observe(name, role) for name, role in roles.items()},
            connector,
            fleet.clock,
            record,
        )
        fleet.planner_view = loop.view
        running = asyncio.create_task(loop.run())
        draining = asyncio.create_task(drain.wait())
        try:
            await asyncio.wait([running, draining], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            running.cancel()
            draining.cancel()
            await asyncio.gather(running, draining, return_exceptions=True)


def _start(file: FleetFile, components: Sequence[Component], processes: Processes) -> list[str]:
    """Starts all workers. Returns those that speak HTTP, in the form of --worker."""
    specs = []
    for component, group in zip(components, file.workers, strict=True):
        for _ in range(group.count):
            worker = processes.add(component)
            if isinstance(group, ForeignWorkers):
                specs.append(f"{worker.fill(group.worker)},id={worker.id}")
    return specs


async def _end(processes: Processes, force: asyncio.Event) -> None:
    closing = asyncio.create_task(processes.close())
    forced = asyncio.create_task(force.wait())
    await asyncio.wait([closing, forced], return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not closing.done():
        processes.kill()
    await closing


def _common_words(file: FleetFile, verbose: bool) -> list[str]:
    words = [f"--log-format={file.server.log_format}"]
    if file.router.fleet_key_file is not None:
        words.append(f"--fleet-key-file={file.router.fleet_key_file}")
    return [*words, "--verbose"] if verbose else words


def _environment(config: ServerConfig) -> dict[str, str]:
    """Each worker has an HTTP port of its own; what guards the router's guards these, too."""
    keys = read_keys(config)
    return {"SHOAL_API_KEY": ",".join(keys)} if keys else {}


def _prefix(plane_url: str, config: ServerConfig) -> str:
    """Ids are unique on a plane. NATS is one for many hosts, and for many fleets of a host."""
    if not plane_url.startswith(NATS):
        return ""
    return f"{socket.gethostname().partition('.')[0]}-{config.port or os.getpid()}-"


def _width(components: Sequence[Component], groups: Sequence[OwnWorkers | ForeignWorkers]) -> int:
    """Of the longest name in the log."""
    names = [f"{one.name}-{group.count}" for one, group in zip(components, groups)]
    return max(map(len, [ROUTER, *names]))
