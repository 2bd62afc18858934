"""Access to a port: API keys, the origins of web pages, and the host names under which it answers."""

from __future__ import annotations

import urllib.parse

from shoal.config import ServerConfig
from shoal.hosts import is_address
from shoal.server.errors import ApiError
from shoal.server.http.cors import Cors
from shoal.server.http.exchange import Exchange
from shoal.server.http.keys import Keys


class Access:
    """The access rules of one port."""

    def __init__(self, config: ServerConfig, keys: Keys, cors: Cors, *, is_admin: bool) -> None:
        """is_admin: a web page must not put models to sleep, so pages are refused unless --allowed-origins
        names their site."""
        self._config, self._keys, self._cors, self._is_admin = config, keys, cors, is_admin

    def check(self, exchange: Exchange, *, is_public: bool) -> None:
        """is_public: the route asks for no key. Raises ApiError (401, 403)."""
        if exchange.method == "POST":
            self._check_origin(exchange)
        if is_public:
            return
        if self._keys:
            self._check_key(exchange)
        elif self._is_admin:
            self._check_host(exchange)

    def _check_origin(self, exchange: Exchange) -> None:
        """Refuses pages of other sites, which some browser on this machine may have open: they must not
        operate the server, nor make it compute. A key would keep them out; without keys their origin does.
        Programs send no Origin."""
        origin = exchange.headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._cors.allowed_origin(exchange) is not None:
            return
        if not self._is_admin and (self._keys or self._is_own_page(exchange, origin)):
            return
        raise ApiError(
            403,
            f"pages of {origin!r:.100} may not use this server, unless --allowed-origins names their site",
        )

    @staticmethod
    def _is_own_page(exchange: Exchange, origin: str) -> bool:
        """Returns whether the request comes from a page of this server, or from an installed program such
        as an editor's view or an extension."""
        scheme, _, site = origin.partition("://")
        if scheme not in ("http", "https", "null"):
            return True
        # A proxy may send its own name for this server. The browser knows whether the page and the request
        # have the same origin, and no page can set this header itself.
        if exchange.headers.get(b"sec-fetch-site") == b"same-origin":
            return True
        own = [exchange.headers.get(name, b"") for name in (b"host", b"x-forwarded-host")]
        return bool(site) and site.lower() in [name.decode("latin-1").lower() for name in own]

    def _check_host(self, exchange: Exchange) -> None:
        """Refuses other host names: after DNS rebinding a page's own host name resolves to this machine,
        and the page still sends that name as Host."""
        host = exchange.headers.get(b"host", b"").decode("latin-1")
        try:
            name = urllib.parse.urlsplit("//" + host).hostname or ""
        except ValueError:  # half an IPv6 address
            name = host
        if name not in ("", "localhost", self._config.admin_host.lower()) and not is_address(name):
            raise ApiError(
                403,
                "without keys the header Host must be an address, localhost or --admin-host, got "
                f"{host!r:.100}; "
                "set --api-key to allow other names",
            )

    def _check_key(self, exchange: Exchange) -> None:
        scheme, _, value = exchange.headers.get(b"authorization", b"").partition(b" ")
        bearer = value.strip() if scheme.lower() == b"bearer" else b""
        # some clients send both
        if not self._keys.hold([exchange.headers.get(b"x-api-key", b""), bearer]):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
