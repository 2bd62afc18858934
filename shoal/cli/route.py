"""`shoal route`: one endpoint for many workers. Torch-free."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from shoal.config import ServerConfig
from shoal.errors import CheckpointError, ConfigError, ShoalError
from shoal.fleet.clock import LoopClock
from shoal.fleet.fleet import Fleet
from shoal.fleet.fleet_config import FleetConfig
from shoal.fleet.fleet_engine import FleetEngine
from shoal.fleet.fleet_key import FleetKey
from shoal.fleet.foreign_forwarder import ForeignForwarder
from shoal.fleet.foreign_link import ForeignLink, new_session
from shoal.fleet.model_fleet import ModelFleet
from shoal.fleet.plane_inbox import start, stop
from shoal.fleet.plane_workers import watch_plane
from shoal.fleet.planes import check_plane, open_plane
from shoal.fleet.prompt_tokens import PromptTokens
from shoal.fleet.remote_engine import RemoteEngine
from shoal.fleet.worker import Worker
from shoal.model_card import ModelCard
from shoal.server.app import Server
from shoal.server.catalog import Catalog
from shoal.server.fleet_routes import FleetRoutes
from shoal.server.foreign_model import UNBOUNDED, ForeignModel
from shoal.server.foreign_routes import with_foreign_models
from shoal.server.keys import check_admin_port
from shoal.server.model import ServedModel, served_model
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.run import check_tls, heeding_signals, open_ports, serve_until, url_of, warn_of_open_port
from shoal.tokenizer import Tokenizer, load_tokenizer
from shoal.weights.source import resolve

logger = logging.getLogger(__name__)

RETRY_S = 10.0  # until a model that could not be offered is tried again


def route(config: FleetConfig, server: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises ShoalError for what cannot be served."""
    if config.plane is None and not config.workers and server.admin_port is None:
        raise ConfigError(
            "no worker could ever come; name one (--worker http://127.0.0.1:9001), the plane on which ours "
            "join (--plane tcp://127.0.0.1:5600), or an --admin-port on which workers are added"
        )
    check_router(config, server)
    return asyncio.run(_route(config, server))


def check_router(config: FleetConfig, server: ServerConfig) -> None:
    """Finds mistakes before anything is started. Raises ConfigError."""
    check_admin_port(server)
    check_tls(server)
    key = FleetKey.read(config.fleet_key_file)
    if config.plane is not None:
        check_plane(config.plane, key)
    if config.tokenizer is not None:
        _read_tokenizer(config.tokenizer)


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
) -> None:
    """Routes until `drain` is set and what runs has ended, or until `force` is set. `ports` are those of
    open_ports; they are closed at the end. Raises ShoalError as serve_until does."""
    started = time.monotonic()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    async with AsyncExitStack() as stack:
        for port in ports:
            stack.enter_context(port)
        clock, key, plane = LoopClock(), FleetKey.read(config.fleet_key_file), None
        if config.plane is not None:
            plane = open_plane(config.plane, may_host=True, lease_s=config.lease, key=key, clock=clock)
            stack.push_async_callback(plane.close)
        session = await stack.enter_async_context(new_session())
        fleet = Fleet(config, clock, plane, connect=lambda spec: ForeignLink(spec, session))
        stack.push_async_callback(fleet.close)
        catalog, routes = Catalog([]), FleetRoutes(fleet)
        public = [route for route in PUBLIC_ROUTES if route.path != routes.metrics.path]
        app = Server(
            catalog, server, described([*with_foreign_models(public), routes.metrics, *routes.public()])
        )
        admin = None
        if server.admin_port is not None:
            admin = Server(catalog, server, routes.admin(), is_admin=True)

        def ready(port: int, admin_port: int | None) -> None:
            gc.freeze()  # what exists now stays
            operated = f", admin port {admin_port} on {server.admin_host}" if admin_port is not None else ""
            logger.info(
                "routing at %s%s, policy %s, ready after %.1f s",
                url_of(server, port),
                operated,
                config.policy,
                time.monotonic() - started,
            )
            url = url_of(server, port, reachable=True)
            logger.info("chat page %s/  API %s/v1  the workers %s/fleet", url, url, url)
            warn_of_open_port(server, port)

        await fleet.start()
        tasks = [start(Offer(fleet, catalog, config, server).follow())]
        if plane is not None:
            tasks.append(start(watch_plane(plane, key, partial(_join, fleet), fleet.leave, fleet.published)))
        stack.push_async_callback(stop, tasks)
        await serve_until(drain, force, app, admin, server, ports, ready=ready)


# Our own workers


def _join(fleet: Fleet, worker: Worker[RemoteEngine]) -> None:
    """A worker has come on the plane."""
    try:
        fleet.join(worker, [worker.link.follow_events])
    except ConfigError as error:
        logger.error("a worker on the plane is set aside: %s", error)


# What clients are offered


class Offer:
    """Keeps the catalog as the fleet is: a model comes with its first worker."""

    def __init__(self, fleet: Fleet, catalog: Catalog, config: FleetConfig, server: ServerConfig) -> None:
        self._fleet, self._catalog, self._config = fleet, catalog, config
        # The dispatchers' queues bound what waits, whatever the number of workers.
        self._server = dataclasses.replace(server, max_queued_requests=UNBOUNDED)
        self._tokenizer = None if config.tokenizer is None else _read_tokenizer(config.tokenizer)
        self._offered: dict[ModelFleet, ServedModel | ForeignModel] = {}

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._fleet.changed.clear()
            is_complete = await self._update()
            try:
                await asyncio.wait_for(self._fleet.changed.wait(), None if is_complete else RETRY_S)
            except TimeoutError:
                pass

    async def _update(self) -> bool:
        """False: a model cannot be offered now."""
        current = dict.fromkeys(self._fleet.models.values())
        for model in [model for model in self._offered if model not in current]:
            await self._withdraw(model)
        new = [model for model in current if model not in self._offered]
        self._catalog.awaited = self._fleet.unknown + _workers_of(new)
        failed = []
        for model in new:
            try:
                self._offered[model] = self._foreign(model) if model.is_foreign else await self._own(model)
            except ShoalError as error:
                logger.error("the model %s cannot be offered: %s", model.name, error)
                failed.append(model)
            else:
                self._catalog.add(self._offered[model])
                logger.info("the model %s is offered", model.name)
        for model, offered in self._offered.items():
            offered.names[:] = model.names
            if isinstance(offered, ForeignModel):
                offered.max_model_len = _shortest(model)
        self._catalog.awaited = self._fleet.unknown + _workers_of(failed)
        return not failed

    async def _withdraw(self, model: ModelFleet) -> None:
        offered = self._offered.pop(model)
        self._catalog.remove(offered)
        if isinstance(offered, ServedModel):
            offered.close()
        logger.info("the model %s is offered no longer: its last worker has gone", model.name)

    def _foreign(self, model: ModelFleet) -> ForeignModel:
        tokens = model.tokens = PromptTokens(model.dispatcher, self._tokenizer)
        forwarder = ForeignForwarder(model.dispatcher, tokens, migration_limit=self._config.migration_limit)
        return ForeignModel(model.names, forwarder, request_timeout=self._server.request_timeout)

    async def _own(self, model: ModelFleet) -> ServedModel:
        """Raises ShoalError where the model's files cannot be read here."""
        card: ModelCard = next(iter(model.dispatcher.workers.values())).link.card
        tokenizer = await asyncio.to_thread(_tokenizer_of, card)
        engine = FleetEngine(model.dispatcher, migration_limit=self._config.migration_limit)
        return served_model(card, engine, tokenizer, self._server)


def _workers_of(models: Sequence[ModelFleet]) -> list[str]:
    return [worker_id for model in models for worker_id in model.dispatcher.workers]


def _tokenizer_of(card: ModelCard) -> Tokenizer | None:
    if card.skip_tokenizer_init:
        return None
    files = resolve(card.model, card.revision, card.download_dir)
    return load_tokenizer(files, card.tokenizer, card.chat_template)


def _shortest(model: ModelFleet) -> int | None:
    """The context that all workers of a foreign model have."""
    lengths = [worker.link.max_model_len(model.name) for worker in model.dispatcher.workers.values()]
    return min((length for length in lengths if length is not None), default=None)


def _read_tokenizer(path: str) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return Tokenizer.from_folder(Path(path).parent if Path(path).is_file() else Path(path))
    except CheckpointError as error:
        raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from None
