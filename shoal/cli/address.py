"""A server's address and API key, as given to `shoal chat` and `shoal top`, and requests to that server."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

from shoal.errors import ConfigError, UnavailableError

API_KEY_HELP = "API key of that server; default: SHOAL_API_KEY or OPENAI_API_KEY"


def server_key(given: str | None) -> str | None:
    """Returns the key to send to a server: the given one, or the environment's."""
    keys = (given, os.environ.get("SHOAL_API_KEY", "").partition(",")[0], os.environ.get("OPENAI_API_KEY"))
    return next(filter(None, keys), None)


def parts_of(url: str) -> SplitResult:
    """Returns the parts of a server's address. Raises ConfigError for a malformed one."""
    if "@" in url:  # not shown, as there may be a password before it
        raise ConfigError("the server's address has an @; leave user and password out, and give --api-key")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half a bracket, or a malformed port
        is_address = False
    if not is_address or not _is_plain(url) or " " in url:
        raise ConfigError(
            f"the server's address must be an http or https URL, got {url!r:.100}; give one such as "
            "http://127.0.0.1:8000"
        )
    return parts


def key_header(api_key: str | None) -> dict[str, str]:
    """Returns the header with the key, if there is one. Raises ConfigError."""
    if not api_key:
        return {}
    if not _is_plain(api_key):
        raise ConfigError(
            "the API key must be printable ASCII without line ends, got another character; give it by "
            "--api-key or SHOAL_API_KEY as the server has it"
        )
    return {"Authorization": f"Bearer {api_key}"}


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key and the conversation are for the named server only."""

    def redirect_request(self, *_: Any) -> None:
        return None  # urllib then raises the redirect as an HTTPError


def ask(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """Sends a request, with the exceptions of urlopen; raises UnavailableError for a redirect."""
    try:
        answer = urllib.request.build_opener(_Stay).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            to = str(error.headers.get("Location", "nowhere"))
            raise UnavailableError(
                f"{request.full_url:.200} redirects to {to!r:.200} ({error.code}), which is not followed, as "
                "the key is for the named server only; give the right address"
            ) from None
        raise
    return cast(http.client.HTTPResponse, answer)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable()
