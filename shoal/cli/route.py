"""`shoal route`: one endpoint for many workers. Torch-free."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.config import ServerConfig
from shoal.errors import CheckpointError, ConfigError
from shoal.fleet.clock import LoopClock
from shoal.fleet.fleet import Fleet
from shoal.fleet.fleet_config import FleetConfig
from shoal.fleet.foreign_forwarder import ForeignForwarder
from shoal.fleet.foreign_link import ForeignLink, new_session
from shoal.fleet.model_fleet import ModelFleet
from shoal.fleet.plane_inbox import start, stop
from shoal.fleet.planes import open_plane
from shoal.fleet.prompt_tokens import PromptTokens
from shoal.server.app import Server
from shoal.server.catalog import Catalog
from shoal.server.fleet_routes import FleetRoutes
from shoal.server.foreign_model import ForeignModel
from shoal.server.foreign_routes import with_foreign_models
from shoal.server.keys import check_admin_port
from shoal.server.model import ServedModel
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.run import check_tls, open_ports, serve, url_of, warn_of_open_port
from shoal.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def route(config: FleetConfig, server: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises ShoalError for what cannot be served."""
    started = time.monotonic()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    check_admin_port(server)
    check_tls(server)
    if config.plane is None and not config.workers and server.admin_port is None:
        raise ConfigError(
            "no worker could ever come; name one (--worker http://127.0.0.1:9001), the plane on which ours "
            "join (--plane tcp://127.0.0.1:5600), or an --admin-port on which workers are added"
        )
    tokenizer = None if config.tokenizer is None else _read_tokenizer(config.tokenizer)
    return asyncio.run(_route(config, server, tokenizer, started))


async def _route(
    config: FleetConfig, server: ServerConfig, tokenizer: Tokenizer | None, started: float
) -> int:
    async with AsyncExitStack() as stack:
        ports = [stack.enter_context(port) for port in open_ports(server)]
        clock, plane = LoopClock(), None
        if config.plane is not None:
            plane = open_plane(config.plane, may_host=True, lease_s=config.lease, clock=clock)
            stack.push_async_callback(plane.close)
        session = await stack.enter_async_context(new_session())
        fleet = Fleet(config, clock, plane, connect=lambda spec: ForeignLink(spec, session))
        stack.push_async_callback(fleet.close)
        catalog, routes = Catalog([]), FleetRoutes(fleet)
        offer = Offer(fleet, catalog, config, server, tokenizer)
        public = [route for route in PUBLIC_ROUTES if route.path != routes.metrics.path]
        app = Server(
            catalog, server, described([*with_foreign_models(public), routes.metrics, *routes.public()])
        )
        admin = (
            Server(catalog, server, routes.admin(), is_admin=True) if server.admin_port is not None else None
        )

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
        task = start(offer.follow())
        try:
            drained = await serve(app, admin, server, ports, ready=ready)
        finally:
            await stop([task])
        return 0 if drained else 1


class Offer:
    """Keeps the catalog as the fleet is: a model comes with its first worker."""

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        config: FleetConfig,
        server: ServerConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        """`tokenizer`: for foreign models."""
        self._fleet, self._catalog, self._config, self._server = fleet, catalog, config, server
        self._tokenizer = tokenizer
        self._offered: dict[ModelFleet, ServedModel | ForeignModel] = {}

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._fleet.changed.clear()
            await self._update()
            await self._fleet.changed.wait()

    async def _update(self) -> None:
        current = dict.fromkeys(self._fleet.models.values())
        for model in [model for model in self._offered if model not in current]:
            self._catalog.remove(self._offered.pop(model))
            logger.info("the model %s is offered no longer: its last worker has gone", model.name)
        for model in current:
            if model not in self._offered:
                self._offered[model] = self._foreign(model)
                self._catalog.add(self._offered[model])
                logger.info("the model %s is offered", model.name)
            offered = self._offered[model]
            offered.names[:] = model.names
            if isinstance(offered, ForeignModel):
                offered.max_model_len = _shortest(model)
        self._catalog.awaited = self._fleet.unknown

    def _foreign(self, model: ModelFleet) -> ForeignModel:
        tokens = model.tokens = PromptTokens(model.dispatcher, self._tokenizer)
        forwarder = ForeignForwarder(model.dispatcher, tokens, migration_limit=self._config.migration_limit)
        return ForeignModel(model.names, forwarder, request_timeout=self._server.request_timeout)


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
