"""`shoal route`: one endpoint for many workers. Torch-free."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from shoal.apps.model_catalog import ModelCatalogSync, read_tokenizer
from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.fleet.clock import LoopClock
from shoal.fleet.config import FleetConfig
from shoal.fleet.external.link import ExternalLink, new_session
from shoal.fleet.key import FleetKey
from shoal.fleet.native.membership import watch_workers
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.registry.open import check_plane, open_registry
from shoal.fleet.worker import Worker
from shoal.server.app import Server
from shoal.server.http.keys import check_admin_port
from shoal.server.operator.external_routes import with_external_models
from shoal.server.operator.fleet_admin import fleet_admin_routes
from shoal.server.operator.fleet_routes import FleetRoutes
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.run import check_tls, heeding_signals, open_ports, serve_until, url_of, warn_of_open_port
from shoal.server.served.catalog import Catalog
from shoal.server.served.monitoring import Monitor
from shoal.tasks import start, stop
from shoal.telemetry.tracing import check_tracing, opened_tracing

logger = logging.getLogger(__name__)

# The garbage collector visits every token of all running prompts, each time that this number of objects was
# added.
YOUNG_OBJECTS = 10_000


def route(config: FleetConfig, server: ServerConfig) -> int:
    """Routes until a signal; returns the exit code. Raises ShoalError for a router that cannot start."""
    if config.plane is None and not config.workers and server.admin_port is None:
        raise ConfigError(
            "a router needs a source of workers; name one (--worker http://127.0.0.1:9001), the plane that "
            "native workers join (--plane tcp://127.0.0.1:5600), or an --admin-port on which workers are "
            "added"
        )
    check_router(config, server)
    return asyncio.run(_route(config, server))


def check_router(config: FleetConfig, server: ServerConfig) -> None:
    """Checks the options before anything is started. Raises ConfigError."""
    check_admin_port(server)
    check_tls(server)
    check_tracing(server.otlp_traces_endpoint)
    key = FleetKey.read(config.fleet_key_file)
    if config.plane is not None:
        check_plane(config.plane, key)
    if config.tokenizer is not None:
        read_tokenizer(config.tokenizer)


async def _route(config: FleetConfig, server: ServerConfig) -> int:
    drain, force = asyncio.Event(), asyncio.Event()
    with heeding_signals(drain, force):
        await run_router(config, server, open_ports(server), drain, force)
    return 1 if force.is_set() else 0


async def run_router(
    config: FleetConfig,
    server: ServerConfig,
    ports: Sequence[socket.socket],
    drain: asyncio.Event,
    force: asyncio.Event,
    meanwhile: Callable[[Fleet], Coroutine[Any, Any, None]] | None = None,
    at_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Routes until `drain` is set and running requests have ended, or until `force` is set. `ports`: from
    open_ports; closed at the end. `meanwhile` runs as long, and is cancelled at the end; then `at_end` runs,
    while the plane is still open for workers that leave it. Raises ShoalError as serve_until does."""
    started = time.monotonic()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    async with AsyncExitStack() as stack:
        for port in ports:
            stack.enter_context(port)
        clock, key, registry = LoopClock(), FleetKey.read(config.fleet_key_file), None
        if config.plane is not None:
            registry = open_registry(config.plane, may_host=True, lease_s=config.lease, key=key, clock=clock)
            stack.push_async_callback(registry.close)
        tracing = await stack.enter_async_context(opened_tracing(server.otlp_traces_endpoint, "router"))
        session = await stack.enter_async_context(new_session())
        fleet = Fleet(config, clock, registry, connect=lambda spec: ExternalLink(spec, session))
        stack.push_async_callback(fleet.close)
        catalog, routes = Catalog([]), FleetRoutes(fleet)
        public = [route for route in PUBLIC_ROUTES if route.path != routes.metrics.path]
        monitor = Monitor(catalog, fleet)
        app = Server(
            catalog,
            server,
            described([*with_external_models(public), routes.metrics, *routes.public()]),
            monitor=monitor,
            tracing=tracing,
        )
        admin = None
        if server.admin_port is not None:
            operating = [*routes.admin(), *fleet_admin_routes(fleet)]
            admin = Server(catalog, server, operating, monitor=monitor, is_admin=True)

        def ready(port: int, admin_port: int | None) -> None:
            gc.freeze()  # the objects so far stay alive
            gc.set_threshold(YOUNG_OBJECTS)
            operated = f", admin port {admin_port} on {server.admin_host}" if admin_port is not None else ""
            logger.info(
                "routing at %s%s, policy %s, ready after %.1f s",
                url_of(server, port),
                operated,
                config.policy,
                time.monotonic() - started,
            )
            url = url_of(server, port, reachable=True)
            logger.info("chat page %s/  dashboard %s/dashboard  API %s/v1", url, url, url)
            warn_of_open_port(server, port)

        await fleet.start()
        if at_end is not None:
            stack.push_async_callback(at_end)
        tasks = [start(ModelCatalogSync(fleet, catalog, config, server).run())]
        if registry is not None:
            joined = partial(_join, fleet)
            watching = watch_workers(registry, key, joined, fleet.leave, fleet.set_role, fleet.published)
            tasks.append(start(watching))
        if meanwhile is not None:
            tasks.append(start(meanwhile(fleet)))
        stack.push_async_callback(stop, tasks)
        await serve_until(drain, force, app, admin, server, ports, ready=ready)


def _join(fleet: Fleet, worker: Worker[RemoteEngine]) -> None:
    """Adds a worker that has joined the plane."""
    try:
        fleet.join(worker, [worker.link.follow_events])
    except ConfigError as error:
        logger.error("a worker on the plane is excluded: %s", error)
