"""Joins a fleet as a worker (`shoal serve --plane`). Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal.api import Engine
from shoal.config import EngineConfig, KVEventsConfig, ServerConfig
from shoal.errors import ConfigError, ShoalError
from shoal.files.object_store import shown
from shoal.fleet.clock import LoopClock
from shoal.fleet.key import FleetKey
from shoal.fleet.native.membership import member_of
from shoal.fleet.native.weight_peers import borrowed_weights
from shoal.fleet.native.worker_server import EventEndpoints, WorkerServer, check_host
from shoal.fleet.registry.open import check_plane, open_registry
from shoal.fleet.registry.registry import ROLES, Member, Registry, check_name
from shoal.server.served.model import ServedModel
from shoal.tasks import start
from shoal.telemetry.tracing import Tracing
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.source import CheckpointFiles
from shoal.wire import ModelInfo

logger = logging.getLogger(__name__)

EVENTS_FOLDER = "shoal-events-"  # prefix of the folders with workers' sockets
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READERS_S = 10.0  # for which an ending worker waits for readers of its KV blocks
READERS_POLL_S = 0.02


@dataclass(slots=True)
class ModelToServe:
    """A model to serve, before its engine is started."""

    names: list[str]
    config: EngineConfig
    files: CheckpointFiles


def check_fleet(config: ServerConfig) -> None:
    """Checks the options of the fleet before an engine is started. Raises ConfigError."""
    key = FleetKey.read(config.fleet_key_file)
    check_plane(config.plane or "", key)
    check_host(config.fleet_host, key)
    if config.worker_id is not None:
        check_name(config.worker_id)


@contextlib.contextmanager
def event_endpoints(config: EngineConfig) -> Iterator[EventEndpoints | None]:
    """Yields addresses for the KV events from the engine to this process: sockets in a private folder. None
    if the engine caches no prefixes. Raises ConfigError if the options name other addresses."""
    if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
        raise ConfigError(
            "kv_events_config enables events, and a worker of a fleet (--plane) sends its own to the "
            "routers; leave it out"
        )
    if not config.enable_prefix_caching:
        yield None
        return
    _remove_dead_folders()
    folder, lock = _locked_folder()
    try:
        yield EventEndpoints(f"ipc://{folder}/events", f"ipc://{folder}/replay")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder() -> tuple[str, int]:
    """Returns a new private folder and the descriptor of a lock on it, which ends with this process."""
    while True:
        folder = tempfile.mkdtemp(prefix=EVENTS_FOLDER)  # 0700
        with contextlib.suppress(
            FileNotFoundError
        ):  # another process may remove the folder before the lock is taken
            lock = os.open(folder, DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)


def _remove_dead_folders() -> None:
    """Removes the folders of killed workers, whose locks are free. Folders of other users stay."""
    for folder in Path(tempfile.gettempdir()).glob(EVENTS_FOLDER + "*"):
        try:
            fd = os.open(folder, DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its worker lives
            pass
        finally:
            os.close(fd)


@contextlib.asynccontextmanager
async def weights_of_peers(
    planned: ModelToServe, config: ServerConfig, worker_id: str
) -> AsyncIterator[Awaitable[bytes | None] | None]:
    """Yields a function that reads the weights of another worker (engine/runner/rank_export.py); its export
    ends with the block. Yields None if weights are read from files."""
    if not config.weights_from_peers or planned.config.load_format == "dummy":
        yield None
        return
    assert config.plane is not None
    key, name = FleetKey.read(config.fleet_key_file), functools.partial(tensors_fingerprint, planned.files)
    registry = open_registry(config.plane, key=key, clock=LoopClock())
    try:
        async with borrowed_weights(registry, key, planned.names[0], name, worker_id) as asking:
            yield asking
    finally:
        await registry.close()


def with_events(planned: ModelToServe, events: EventEndpoints) -> ModelToServe:
    """Returns the model with an engine that publishes to these addresses."""
    kv_events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=events.publisher, replay_endpoint=events.replay
    )
    return ModelToServe(
        planned.names, dataclasses.replace(planned.config, kv_events_config=kv_events), planned.files
    )


def worker_id_of(config: ServerConfig) -> str:
    """Returns the name of this process in a fleet."""
    return config.worker_id or re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{os.getpid()}")


@contextlib.asynccontextmanager
async def joined(
    model: ServedModel,
    events: EventEndpoints | None,
    url: str,
    config: ServerConfig,
    worker_id: str,
    tracing: Tracing | None,
) -> AsyncIterator[None]:
    """Makes this process a worker of the fleet inside the block. If its model changes, routers see it leave
    and join. url: its HTTP server. Raises ConfigError for a port that is not available."""
    assert config.plane is not None
    key, clock = FleetKey.read(config.fleet_key_file), LoopClock()
    port = WorkerServer.open(
        worker_id,
        model.engine,
        model.admission,
        model.metrics,
        clock,
        host=config.fleet_host,
        port=config.fleet_port,
        key=key,
        events=events,
        tracing=tracing,
    )
    try:
        registry = open_registry(config.plane, key=key, clock=clock)
        address = port.address_seen_from(urlsplit(config.plane.partition(",")[0]).hostname)
        role, shown_plane = config.role, shown(config.plane)

        async def register() -> None:
            assert model.loaded.card is not None
            member = member_of(
                worker_id,
                role,
                url,
                address,
                model.loaded.card,
                tags=config.worker_tags or (),
                is_draining=model.admission.draining,
            )
            await _register(registry, member)

        async def change_role(new: str) -> None:
            nonlocal role
            assert model.loaded.card is not None
            _check_role(new, model.loaded.card.info)
            role = new
            await register()
            logger.info("worker %s has the role %s from now on", worker_id, role)

        async def stay() -> None:
            await register()
            logger.info("worker %s of the fleet at %s; its tokens are at %s", worker_id, shown_plane, address)
            while True:
                await model.changed.wait()
                model.changed.clear()
                await register()

        async def leave() -> None:
            await model.admission.wait_draining()
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            await register()

        port.on_role = change_role
        staying, leaving = start(stay()), start(leave())
        try:
            yield
            await _readers_end(model.engine)
        finally:
            for task in (staying, leaving):
                task.cancel()
            await asyncio.gather(staying, leaving, return_exceptions=True)
            await registry.close()
    finally:
        await port.close()


async def _readers_end(engine: Engine) -> None:
    """Waits a short time for readers of KV blocks; after that they compute the blocks."""
    with contextlib.suppress(TimeoutError, ShoalError):
        async with asyncio.timeout(READERS_S):
            while (loans := (await engine.stats()).kv_loans) is not None and loans.offers:
                await asyncio.sleep(READERS_POLL_S)


def _check_role(role: str, info: ModelInfo) -> None:
    if role not in ROLES:
        raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {role!r:.40}; choose one")
    if role == "prefill" and not info.lends_kv:
        raise ConfigError(
            "the role prefill needs a worker that lends its KV blocks, and this one does not; "
            """start it with --kv-transfer-config '{"kv_role": "kv_both"}'"""
        )


async def _register(registry: Registry, member: Member) -> None:
    """Registers the worker. Waits for a plane that does not answer yet, and for the end of another process
    with the same id."""
    while True:
        try:
            await registry.register(member)
            return
        except ConfigError as error:
            logger.error("this worker is not in its fleet: %s; give it another --worker-id. Trying on", error)
            await registry.clock.sleep(registry.lease_s)
