"""CORS: which pages of other sites a browser lets use this server, as the options say."""

from __future__ import annotations

from shoal.config import ServerConfig
from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange

MAX_AGE_S = 600  # how long a browser may remember the answer to a preflight


class Cors:
    def __init__(self, config: ServerConfig) -> None:
        self._origins = config.allowed_origins or ()
        self._methods = config.allowed_methods or ["*"]
        self._headers = [name.lower() for name in config.allowed_headers or ["*"]]
        self._allow_credentials = config.allow_credentials

    def allowed_origin(self, exchange: Exchange) -> bytes | None:
        """Returns the Origin of the request as the answer may name it. None if it is absent or not
        allowed."""
        origin = exchange.headers.get(b"origin")
        if origin is None:
            return None
        if "*" in self._origins:
            return b"*"
        return origin if origin.decode("latin-1") in self._origins else None

    def add_headers(self, exchange: Exchange) -> None:
        """Adds the headers that let a page of an allowed site read the answer."""
        origin = self.allowed_origin(exchange)
        if origin is None:
            return
        exchange.more_headers += [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
        ]
        if origin != b"*":
            exchange.more_headers.append((b"vary", b"origin"))
        if self._allow_credentials:
            exchange.more_headers.append((b"access-control-allow-credentials", b"true"))

    @staticmethod
    def is_preflight(exchange: Exchange) -> bool:
        """Returns whether this is a browser's preflight for a call by a page of another site."""
        return (
            exchange.method == "OPTIONS"
            and b"origin" in exchange.headers
            and b"access-control-request-method" in exchange.headers
        )

    async def answer_preflight(self, exchange: Exchange) -> None:
        """Answers a preflight. Raises ApiError (400) for anything that the options do not allow."""
        method_asked = exchange.headers.get(b"access-control-request-method", b"")
        headers_asked = exchange.headers.get(b"access-control-request-headers", b"")
        if not (method_asked.isascii() and headers_asked.isascii()):  # they come back in the answer's head
            raise ApiError(
                400, "the headers Access-Control-Request-Method and -Headers must be ASCII; send plain names"
            )
        method = method_asked.decode("ascii")
        names = [name.strip().lower() for name in headers_asked.decode("ascii").split(",") if name.strip()]
        wrong = []
        if self.allowed_origin(exchange) is None:
            wrong.append("origin")
        if "*" not in self._methods and method not in self._methods:
            wrong.append("method")
        if "*" not in self._headers and not set(names) <= set(self._headers):
            wrong.append("headers")
        if wrong:
            raise ApiError(
                400,
                f"this server's CORS options do not allow the {' and '.join(wrong)} (--allowed-origins and "
                "the like)",
            )
        exchange.read_all = True
        allowed = {
            "access-control-allow-methods": method if "*" in self._methods else ", ".join(self._methods),
            "access-control-max-age": str(MAX_AGE_S),
        }
        if names:
            shown = names if "*" in self._headers else self._headers
            allowed["access-control-allow-headers"] = ", ".join(shown)
        await exchange.respond(b"", 204, b"text/plain", allowed)
