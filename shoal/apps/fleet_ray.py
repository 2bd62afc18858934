"""`shoal fleet up --on ray`: the router and the planner in one actor, each worker in an actor of its own.

This process starts the router's actor, shows the log of all actors, and forwards signals. All actors of the
fleet end with it, as Ray ends a driver's actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.apps.fleet import (
    ROUTER,
    FleetSupervisor,
    check_workers,
    fleet_name,
    open_record,
    place_of,
    prefix_of,
    read_fleet,
    run_fleet,
)
from shoal.apps.route import check_router
from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet.connectors.ray import ray_connector
from shoal.fleet.connectors.ray_worker import place_of_this_process
from shoal.fleet.connectors.restarts import Restarts
from shoal.fleet.file.fleet_file import FleetFile
from shoal.fleet.file.ray_components import Node, check_reach, hosts_of, ray_components
from shoal.fleet.key import read_secret
from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.registry.open import NATS
from shoal.server.http.keys import key_environment, read_keys
from shoal.server.run import heeding_signals
from shoal.telemetry import logs

KEY_BYTES = 32  # length of a generated fleet key
NOT_FOUND = (ConnectionError, RayError, ValueError, RuntimeError, ImportError)  # the exceptions of ray.init
CONNECT_S = 60.0  # for the answer of a cluster
FORCED_S = 10.0  # for the actors to end at once


def fleet_up_on_ray(path: str, address: str | None = None, verbose: bool = False) -> int:
    """Serves as fleet_up does, on the Ray cluster at this address; None: the one of RAY_ADDRESS, or the one
    on this machine. Raises ShoalError as fleet_up does, and for a cluster that cannot be reached."""
    file = read_fleet(path)
    logs.set_up(logging.DEBUG if verbose else logging.INFO, file.server.log_format, sys.stderr)
    if file.planner.connector not in ("process", "ray"):
        raise ConfigError(
            f"{path}: [planner] connector {file.planner.connector!r} does not go with --on ray, which starts "
            "workers as actors; leave it out"
        )
    key_file = file.router.fleet_key_file
    key = secrets.token_hex(KEY_BYTES).encode() if key_file is None else read_secret(key_file)
    # Paths differ on another node, so the actor gets the contents of files.
    server = dataclasses.replace(file.server, api_key=read_keys(file.server) or None, api_key_file=None)
    record = file.planner.record and os.path.abspath(file.planner.record)
    planner = dataclasses.replace(file.planner, record=record)
    file = dataclasses.replace(file, server=server, planner=planner)
    profiles = file.read_profiles() if planner.enabled else {}
    with _connected(address):
        try:
            nodes = _nodes()
            check_reach(file.router.plane, hosts_of(nodes))
            ray_components(file.workers, nodes, "")  # here too, so that errors are reported before the start
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        return asyncio.run(_up(partial(_start, file, path, place_of(path), key, verbose, profiles)))


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Connects to the cluster inside the block. Raises ConfigError if there is no such cluster."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # deduplication would hide equal lines of several workers
    try:
        _connect(address or "auto")
    except (TimeoutError, *NOT_FOUND) as error:
        where = "here, and RAY_ADDRESS names none" if address is None else f"at {address!r}"
        raise ConfigError(
            f"no Ray cluster is found {where}: {error}; start one with `ray start --head`, or name one with "
            "--address HOST:PORT"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    """Connects in a thread that may be abandoned, as Ray retries for minutes if the address does not answer.
    A new local cluster answers at once, and is started in this thread, since it would end with its thread.
    Raises TimeoutError, and the exceptions of Ray."""
    if address == "local":
        _init(address)
        return
    connected: Future[None] = Future()

    def connect() -> None:
        try:
            _init(address)
        except NOT_FOUND as error:
            connected.set_exception(error)
        else:
            connected.set_result(None)

    threading.Thread(target=connect, name="ray.init", daemon=True).start()
    try:
        connected.result(CONNECT_S)
    except TimeoutError:
        raise TimeoutError(f"it has not answered within {CONNECT_S:g} s") from None


def _init(address: str) -> None:
    ray.init(address, log_to_driver=True, logging_level=logging.WARNING)


def _nodes() -> list[Node]:
    return [node for node in ray.nodes() if node["Alive"]]


def _start(
    file: FleetFile, path: str, place: str, key: bytes, verbose: bool, profiles: dict[str, EngineProfile]
) -> Any:
    """Starts an actor with the router, if possible on the node of this process, whose port users will try."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(RouterActor).options(num_cpus=0, scheduling_strategy=here)
    return actor.remote(file, path, place, key, verbose, profiles)


async def _up(start: partial[Any]) -> int:
    """Waits for the end of the router's actor; one that dies is started again, with its workers."""
    drain, force = asyncio.Event(), asyncio.Event()
    loop, restarts = asyncio.get_running_loop(), Restarts(ROUTER)
    with heeding_signals(drain, force):
        while True:
            began, actor = loop.time(), start()
            try:
                return await _follow(actor, drain, force)
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, ShoalError) else error from None
            except RayError as error:
                delay_s = restarts.delay_after(loop.time() - began, f"its actor died: {error}")
            if delay_s is None or drain.is_set():
                raise UnavailableError("the router's actor has died; its lines above say why")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drain.wait(), delay_s)


async def _follow(actor: Any, drain: asyncio.Event, force: asyncio.Event) -> int:
    running = asyncio.wrap_future(actor.run.remote().future())
    draining, forced = asyncio.create_task(drain.wait()), asyncio.create_task(force.wait())
    try:
        await asyncio.wait([running, draining], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            actor.drain.remote()
            await asyncio.wait([running, forced], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            actor.force.remote()
            await asyncio.wait([running], timeout=FORCED_S)
        return running.result() if running.done() else 1
    finally:
        draining.cancel()
        forced.cancel()
        ray.kill(actor)  # an actor that could not be reached may still run


class RouterActor:
    """The actor with the router and the planner, as `shoal fleet up` runs them on one host."""

    def __init__(
        self,
        file: FleetFile,
        path: str,
        place: str,
        key: bytes,
        verbose: bool,
        profiles: dict[str, EngineProfile],
    ) -> None:
        self._file, self._path, self._place, self._key, self._verbose = file, path, place, key, verbose
        self._profiles = profiles
        self._drain, self._force = asyncio.Event(), asyncio.Event()

    def __repr__(self) -> str:
        return ROUTER  # Ray's name for it in the logs

    async def drain(self) -> None:
        self._drain.set()

    async def force(self) -> None:
        self._drain.set()
        self._force.set()

    async def run(self) -> int:
        """Returns and raises as fleet_up_on_ray does."""
        logs.set_up(
            logging.DEBUG if self._verbose else logging.INFO, self._file.server.log_format, sys.stderr
        )
        with tempfile.TemporaryDirectory(prefix="shoal-fleet-") as folder:  # 0700
            Path(folder, "fleet.key").write_bytes(self._key)
            config = dataclasses.replace(
                self._file.router,
                plane=self._file.router.plane or f"ipc://{folder}/plane",
                fleet_key_file=f"{folder}/fleet.key",
            )
            check_router(config, self._file.server)
            await asyncio.to_thread(check_workers, self._file, self._path)
            planner = self._file.planner
            with open_record(planner if planner.enabled else None) as record:
                workers = self._workers(config.plane or "", Path(folder), record)
                return await run_fleet(self._file.server, config, workers, self._drain, self._force)

    def _workers(self, plane_url: str, folder: Path, record: IO[bytes] | None) -> FleetSupervisor:
        server = self._file.server
        words = [f"--log-format={server.log_format}", *(["--verbose"] if self._verbose else [])]
        is_for_many = plane_url.startswith(NATS)
        components = ray_components(
            self._file.workers,
            _nodes(),
            plane_url,
            more_words=words,
            environment=key_environment(server),
            prefix=prefix_of(self._file, self._place),
        )
        only_host = "" if is_for_many else place_of_this_process().host
        make = partial(ray_connector, fleet_key=self._key, only_host=only_host)
        log = ProcessLog(sys.stderr, server.log_format)  # Ray has the workers' lines
        name = fleet_name(self._place)
        return FleetSupervisor(
            self._file.planner, components, make, log, folder, name, record, self._profiles
        )
