"""The server as an ASGI application: it finds a request's route, reports errors to clients, and drains.

There is no framework: a table of routes and one function.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from shoal.config import ServerConfig
from shoal.server.apis.anthropic import ANTHROPIC, ANTHROPIC_VERSION
from shoal.server.errors import ApiError, to_api_error
from shoal.server.http.access import Access
from shoal.server.http.context import ServerContext
from shoal.server.http.cors import Cors
from shoal.server.http.exchange import OPENAI, ClientGone, Dialect, Exchange, Receive, Scope, Send
from shoal.server.http.middleware import Application, middleware
from shoal.server.http.request_log import log_request, status_of
from shoal.server.http.route import DOCS, DOCUMENT, Route, RouteTable
from shoal.server.operator.admin import ADMIN_ROUTES
from shoal.server.routes import PUBLIC_ROUTES, described
from shoal.server.served.catalog import Catalog
from shoal.server.served.monitoring import Monitor
from shoal.telemetry.tracing import Tracing

ADMIN_PATHS = frozenset(route.path for route in ADMIN_ROUTES)
OLLAMAS_STORE = frozenset(f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete"))


class Server:
    """The application of one port."""

    def __init__(
        self,
        models: Catalog,
        config: ServerConfig,
        routes: Sequence[Route],
        *,
        monitor: Monitor | None = None,
        is_admin: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        """monitor: the fleet's; None: this server gets one of its own. is_admin: stricter with pages and host
        names, see Access. tracing: see ServerContext. Raises ConfigError for unreadable keys and for
        middleware that cannot be loaded."""
        self.context = ServerContext(models, config, monitor or Monitor(models), tracing)
        self.exchanges: set[Exchange] = set()
        self._cors = Cors(config)
        self._access = Access(config, self.context.keys, self._cors, is_admin=is_admin)
        hidden = (DOCS, DOCUMENT) if config.disable_fastapi_docs else ()
        self._table = RouteTable([route for route in routes if route.path not in hidden])
        self._is_admin = is_admin
        self._root_path = "" if is_admin else config.root_path or ""
        self._application: Application = self._answer
        for name in reversed(() if is_admin else config.middleware or ()):
            self._application = middleware(name)(self._application)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange = Exchange(self.context, scope, receive, send, self._count)
        self.exchanges.add(exchange)
        try:
            route = self._route(exchange)
            if route is None:
                return await self._cors.answer_preflight(exchange)
            await exchange.read()
            await route.handler(exchange)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if exchange.is_gone:
                pass
            elif exchange.end_error is not None:
                await exchange.fail(exchange.end_error)
            else:
                raise
        except Exception as error:  # noqa: BLE001 - the client gets any error, without its stack
            await exchange.fail(to_api_error(error, exchange.names))
        finally:
            self.exchanges.discard(exchange)
            self.context.body_bytes -= exchange.size
            if not exchange.ended:  # its client has left
                self._count(exchange)

    def _route(self, exchange: Exchange) -> Route | None:
        """Returns the route of a request; None for a CORS preflight. Raises ApiError: 404, 405, 401, 403."""
        self._cors.add_headers(exchange)
        root = self._root_path
        if root and (exchange.path == root or exchange.path.startswith(f"{root}/")):
            exchange.path = exchange.path[len(root) :] or "/"
        found = self._table.find(exchange.path)
        if found is None:
            exchange.dialect = _dialect(exchange, self._table.dialect_beside(exchange.path))
            raise ApiError(404, f"there is nothing at {exchange.path!r:.100}; {self._way_out(exchange.path)}")
        exchange.path, methods = found
        any_method = next(iter(methods.values()))
        exchange.handler, exchange.dialect = any_method.path, _dialect(exchange, any_method.dialect)
        if self._cors.is_preflight(exchange):
            return None
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allowed = sorted({*methods, *(["HEAD"] if "GET" in methods else [])})
            raise ApiError(
                405,
                f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method:.20}",
                headers={"allow": ", ".join(allowed)},
            )
        exchange.dialect = _dialect(exchange, route.dialect)
        self._access.check(exchange, is_public=route.public)
        exchange.is_quiet = route.quiet  # set after the check, so that guessed keys are logged
        return route

    def _way_out(self, path: str) -> str:
        """Returns what a client may do that asks for a path without a route."""
        if path in ADMIN_PATHS and not self._is_admin:
            return "it is a path of the admin port, which the option --admin-port N opens"
        if path in OLLAMAS_STORE:
            return "a server has the models that it was started with; `shoal pull` downloads others"
        return self._table.overview()

    def _count(self, exchange: Exchange) -> None:
        """Logs and counts a request that ends. Called once for each."""
        if not exchange.is_quiet:
            seconds = time.perf_counter() - exchange.arrival
            self.context.metrics.observe(exchange.method, exchange.handler, status_of(exchange), seconds)
        exchange.end_line()
        log_request(exchange, self.context.config.log_requests)

    # The end

    async def drain(self, grace: float) -> None:
        """Refuses new requests, waits for the running ones, and ends requests that still run after `grace`
        seconds."""
        self.context.models.drain()
        try:
            async with asyncio.timeout(grace):
                for admission in self.context.models.admissions:
                    await admission.wait_idle()
        except TimeoutError:
            self.stop("the server is shutting down and its grace period is over")

    def stop(self, why: str) -> None:
        """Ends all running requests with an error that says why."""
        for exchange in list(self.exchanges):
            exchange.stop(ApiError(503, why))


def _dialect(exchange: Exchange, dialect: Dialect) -> Dialect:
    """Returns the API that the client reads: the route's own, but Anthropic's for a client that sends its
    header to a path that both companies' APIs have, such as /v1/models."""
    return ANTHROPIC if dialect is OPENAI and ANTHROPIC_VERSION in exchange.headers else dialect


def create_app(models: Catalog, config: ServerConfig, tracing: Tracing | None = None) -> Server:
    """Returns the application of the public port. tracing: see ServerContext."""
    return Server(models, config, described(PUBLIC_ROUTES), tracing=tracing)


def create_admin_app(models: Catalog, config: ServerConfig) -> Server:
    """Returns the application of the operator's port: sleep, weights, pause."""
    return Server(models, config, ADMIN_ROUTES, is_admin=True)
