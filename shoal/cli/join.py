"""How a server joins a fleet as a worker (`shoal serve --plane`). Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.config import EngineConfig, KVEventsConfig, ServerConfig
from shoal.errors import ConfigError
from shoal.fleet.clock import LoopClock
from shoal.fleet.fleet_key import FleetKey
from shoal.fleet.plane import Plane, check_name
from shoal.fleet.plane_inbox import start
from shoal.fleet.plane_workers import member_of
from shoal.fleet.planes import check_plane, open_plane
from shoal.fleet.worker_port import EventEndpoints, WorkerPort, check_host
from shoal.model_card import ModelCard
from shoal.server.model import ServedModel
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Planned:
    """A model to be served, before its engine exists."""

    names: list[str]
    config: EngineConfig
    files: CheckpointFiles


def check_fleet(config: ServerConfig) -> None:
    """Finds mistakes before an engine is started. Raises ConfigError."""
    key = FleetKey.read(config.fleet_key_file)
    check_plane(config.plane or "", key)
    check_host(config.fleet_host, key)
    if config.worker_id is not None:
        check_name(config.worker_id)


@contextlib.contextmanager
def event_endpoints(config: EngineConfig) -> Iterator[EventEndpoints | None]:
    """Where the engine tells this process of its KV blocks: sockets in a private folder. None if it caches no
    prefixes. Raises ConfigError where the engine is to publish elsewhere."""
    if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
        raise ConfigError(
            "kv_events_config enables events, and a worker of a fleet (--plane) sends its own to the "
            "routers; leave it out"
        )
    if not config.enable_prefix_caching:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="shoal-events-")  # 0700
    try:
        yield EventEndpoints(f"ipc://{folder}/events", f"ipc://{folder}/replay")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_events(planned: Planned, events: EventEndpoints) -> Planned:
    """The same model, whose engine publishes there."""
    told = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=events.publisher, replay_endpoint=events.replay
    )
    return Planned(planned.names, dataclasses.replace(planned.config, kv_events_config=told), planned.files)


@contextlib.asynccontextmanager
async def joined(
    model: ServedModel, events: EventEndpoints | None, url: str, config: ServerConfig
) -> AsyncIterator[None]:
    """Inside of the block this process is a worker of the fleet. If it becomes another model, it says so, and
    routers see it leave and join. url: of its HTTP server. Raises ConfigError for a port that cannot be
    had."""
    assert config.plane is not None
    key, clock = FleetKey.read(config.fleet_key_file), LoopClock()
    worker_id = config.worker_id or re.sub(r"[^A-Za-z0-9_-]", "-", f"{socket.gethostname()}-{os.getpid()}")
    port = WorkerPort.open(
        worker_id,
        model.engine,
        model.admission,
        model.metrics,
        clock,
        host=config.fleet_host,
        port=config.fleet_port,
        key=key,
        events=events,
    )
    try:
        plane = open_plane(config.plane, key=key, clock=clock)
        address = port.address_seen_from(urlsplit(config.plane.partition(",")[0]).hostname)

        async def register(is_draining: bool = False) -> None:
            assert model.card is not None
            await _register(plane, worker_id, config.role, url, address, model.card, is_draining=is_draining)

        async def stay() -> None:
            await register()
            logger.info(
                "worker %s of the fleet at %s; its tokens are at %s", worker_id, config.plane, address
            )
            while True:
                await model.changed.wait()
                model.changed.clear()
                await register()

        async def leave() -> None:
            await model.admission.wait_draining()
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)
            await register(is_draining=True)

        staying, leaving = start(stay()), start(leave())
        try:
            yield
        finally:
            for task in (staying, leaving):
                task.cancel()
            await asyncio.gather(staying, leaving, return_exceptions=True)
            await plane.close()
    finally:
        await port.close()


async def _register(
    plane: Plane, worker_id: str, role: str, url: str, address: str, card: ModelCard, *, is_draining: bool
) -> None:
    """Waits for a plane that is not there yet, and for the end of another process that has this id."""
    member = member_of(worker_id, role, url, address, card, is_draining=is_draining)
    while True:
        try:
            await plane.register(member)
            return
        except ConfigError as error:
            logger.error("this worker is not in its fleet: %s; give it another --worker-id. Trying on", error)
            await plane.clock.sleep(plane.lease_s)
