"""The server as an ASGI application: routes, keys, CORS, and what becomes of errors. No framework: a table
and one function."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from shoal.config import ServerConfig
from shoal.metrics import HttpMetrics
from shoal.server.errors import ApiError, to_api_error
from shoal.server.http import OPENAI, ClientGone, Dialect, Exchange, Receive, Scope, Send
from shoal.server.keys import is_address, read_keys
from shoal.server.model import ServedModel
from shoal.server.notices import Notices
from shoal.server.request_log import log_request, status_of

Handler = Callable[[Exchange], Awaitable[None]]

LATEST = ":latest"


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may end in `/{id}`: one more segment or several, which the handler takes from the path."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type | None = None  # the Struct of the body, for the OpenAPI document
    response: type | None = None  # the Struct of a JSON answer, likewise ...
    content_type: str = "text/plain"  # ... or what the answer is instead
    public: bool = False  # asks for no key
    quiet: bool = False  # asked all day long by machines: not logged and not counted
    dialect: Dialect = OPENAI


class Server:
    """One port. Shared by its handlers as `exchange.server`."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServerConfig,
        routes: Sequence[Route],
        *,
        is_admin: bool = False,
    ) -> None:
        """is_admin: a page that some browser on this machine has open must not put models to sleep, so it is
        refused."""
        self.models, self.config, self.routes, self.is_admin = list(models), config, list(routes), is_admin
        self.http_metrics = HttpMetrics()
        self.by_name = {name: model for model in self.models for name in model.names}
        self.most_tokens = max((model.max_model_len for model in self.models), default=0)
        self.exchanges: set[Exchange] = set()
        self.body_bytes = 0  # of their bodies
        self.notices = Notices()
        self._keys = [hashlib.sha256(key.encode()).digest() for key in read_keys(config)]
        self._table: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            table = self._prefixes if route.path.endswith("{id}") else self._table
            table.setdefault(route.path.removesuffix("{id}"), {})[route.method] = route

    @property
    def asks_for_key(self) -> bool:
        return bool(self._keys)

    def find(self, name: str | None) -> ServedModel:
        """The model of a request, the first if it names none. A name may have the tag `:latest` or do
        without, as in Ollama."""
        if name is None:
            return self.models[0]
        names = (name, name.removesuffix(LATEST), name + LATEST)
        model = next((self.by_name[each] for each in names if each in self.by_name), None)
        if model is None:
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist; there are {', '.join(m.name for m in self.models)}",
                param="model",
                code="model_not_found",
            )
        return model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        exchange = Exchange(self, scope, receive, send)
        self.exchanges.add(exchange)
        watch: asyncio.Task[None] | None = None
        try:
            route = self._route(exchange)
            if route is None:
                return await self._preflight(exchange)
            await exchange.read()
            watch = asyncio.create_task(exchange.watch())
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told, and never how our stack looks
            await exchange.fail(to_api_error(error))
        finally:
            self.exchanges.discard(exchange)
            self.body_bytes -= exchange.size
            if watch is not None:
                watch.cancel()
            if not exchange.ended:  # its client has left
                self.count(exchange)

    def count(self, exchange: Exchange) -> None:
        """Writes the line of a request that ends into the log, and counts it. Called once."""
        if exchange.route is None or not exchange.route.quiet:
            seconds = time.perf_counter() - exchange.arrival
            self.http_metrics.observe(exchange.method, exchange.handler, status_of(exchange), seconds)
        log_request(exchange, self.config.log_requests)

    # Before a handler

    def _route(self, exchange: Exchange) -> Route | None:
        """None for a CORS preflight. Raises ApiError: 404, 405, 401."""
        self._add_cors(exchange)
        path, method = exchange.path, "GET" if exchange.method == "HEAD" else exchange.method
        methods = self._table.get(path)
        if methods is None:
            methods = next(
                (
                    m
                    for prefix, m in self._prefixes.items()
                    if path.startswith(prefix) and len(path) > len(prefix)
                ),
                None,
            )
        if methods is None:
            raise ApiError(404, f"there is nothing at {path!r:.100}; /openapi.json lists what there is")
        exchange.handler = next(iter(methods.values())).path
        if (
            method == "OPTIONS"
            and b"origin" in exchange.headers
            and b"access-control-request-method" in exchange.headers
        ):
            return None
        route = methods.get(method)
        if route is None:
            allowed = sorted({*methods, *(["HEAD"] if "GET" in methods else [])})
            raise ApiError(
                405,
                f"{path} takes {' or '.join(methods)}, not {method:.20}",
                headers={"allow": ", ".join(allowed)},
            )
        exchange.route, exchange.dialect = route, route.dialect
        if method == "POST":
            self._check_origin(exchange)
        if not route.public:
            if self._keys:
                self._check_key(exchange)
            elif self.is_admin:
                self._check_host(exchange)
        return route

    def _check_origin(self, exchange: Exchange) -> None:
        """Some browser on this machine may have the page of a stranger open. It must not operate the server,
        nor have it compute: a key would keep it out, and where there is none, its origin tells. Programs send
        no Origin."""
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        if not origin or (self._keys and not self.is_admin) or self._allowed_origin(exchange) is not None:
            return
        scheme, _, site = origin.partition("://")
        own = [
            exchange.headers.get(name, b"").decode("latin-1").lower()
            for name in (b"host", b"x-forwarded-host")
        ]
        # others are installed programs: an editor's view, an extension
        is_page = scheme in ("http", "https", "null")
        if self.is_admin or (is_page and (not site or site.lower() not in own)):
            raise ApiError(
                403,
                f"pages of {origin!r:.100} may not use this server, unless --allowed-origins names "
                "their site",
            )

    def _check_host(self, exchange: Exchange) -> None:
        """A page of a stranger whose name has come to mean this machine's address (DNS rebinding) still sends
        its own name as Host."""
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        try:
            name = urllib.parse.urlsplit("//" + host).hostname or ""
        except ValueError:  # half an IPv6 address
            name = host
        if name not in ("", "localhost", self.config.admin_host.lower()) and not is_address(name):
            raise ApiError(
                403,
                f"this port is asked as {host!r:.100}, and without keys it answers to addresses, "
                "localhost and --admin-host alone; set --api-key to have it answer under other names",
            )

    def _check_key(self, exchange: Exchange) -> None:
        scheme, _, value = exchange.headers.get(b"authorization", b"").partition(b" ")
        # some clients send both
        given = [
            exchange.headers.get(b"x-api-key", b""),
            value.strip() if scheme.lower() == b"bearer" else b"",
        ]
        # All keys are compared, whichever fits, and by their digests: the time says nothing about any of
        # them.
        if not sum(
            [hmac.compare_digest(hashlib.sha256(one).digest(), key) for one in given for key in self._keys]
        ):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # CORS

    def _allowed_origin(self, exchange: Exchange) -> bytes | None:
        origins, origin = self.config.allowed_origins or (), exchange.headers.get(b"origin")
        if origin is None:
            return None
        if "*" in origins:
            return b"*"
        return origin if origin.decode("latin-1") in origins else None

    def _add_cors(self, exchange: Exchange) -> None:
        if (origin := self._allowed_origin(exchange)) is None:
            return
        exchange.more_headers += [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]
        if origin != b"*":
            exchange.more_headers.append((b"vary", b"origin"))
        if self.config.allow_credentials:
            exchange.more_headers.append((b"access-control-allow-credentials", b"true"))

    async def _preflight(self, exchange: Exchange) -> None:
        """A browser asks before a page of another site may call."""
        asked = [
            exchange.headers.get(b"access-control-request-" + name, b"") for name in (b"method", b"headers")
        ]
        if not all(value.isascii() for value in asked):  # they come back in the answer's head
            raise ApiError(400, "the method or the headers that are asked for are no ASCII")
        asked_method, asked_headers = (value.decode("ascii") for value in asked)
        methods, headers = (
            self.config.allowed_methods or ["*"],
            [h.lower() for h in self.config.allowed_headers or ["*"]],
        )
        names = [h.strip().lower() for h in asked_headers.split(",") if h.strip()]
        wrong = [
            what
            for what, is_wrong in (
                ("origin", self._allowed_origin(exchange) is None),
                ("method", "*" not in methods and asked_method not in methods),
                ("headers", "*" not in headers and not set(names) <= set(headers)),
            )
            if is_wrong
        ]
        if wrong:
            raise ApiError(
                400,
                f"this server's CORS options do not allow the {' and '.join(wrong)} (--allowed-origins and "
                "the like)",
            )
        exchange.read_all = True
        allowed = {
            "access-control-allow-methods": asked_method if "*" in methods else ", ".join(methods),
            "access-control-max-age": "600",
        }
        if names:
            allowed["access-control-allow-headers"] = (
                ", ".join(names) if "*" in headers else ", ".join(headers)
            )
        await exchange.respond(b"", 204, b"text/plain", allowed)

    # The end

    @property
    def draining(self) -> bool:
        return any(model.admission.draining for model in self.models)

    async def drain(self, grace: float) -> None:
        """Refuses new requests, waits for the running ones, and ends what still runs after `grace`
        seconds."""
        for model in self.models:
            model.admission.draining = True
        try:
            async with asyncio.timeout(grace):
                for model in self.models:
                    await model.admission.wait_idle()
        except TimeoutError:
            self.stop("the server is shutting down and its grace period is over")

    def stop(self, why: str) -> None:
        """Ends whatever runs now; clients are told."""
        for exchange in list(self.exchanges):
            exchange.stop(ApiError(503, why))


def create_app(models: Sequence[ServedModel], config: ServerConfig) -> Server:
    """The public port."""
    from shoal.server.routes import PUBLIC_ROUTES

    return Server(models, config, PUBLIC_ROUTES)


def create_admin_app(models: Sequence[ServedModel], config: ServerConfig) -> Server:
    """The port for whoever operates the server: sleep, weights, pause."""
    from shoal.server.admin import ADMIN_ROUTES

    return Server(models, config, ADMIN_ROUTES, is_admin=True)
