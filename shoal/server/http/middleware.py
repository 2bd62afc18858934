"""ASGI middleware that an operator puts around the public port (--middleware)."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable

from shoal.errors import ConfigError
from shoal.server.http.exchange import Receive, Scope, Send

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def middleware(name: str) -> Callable[[Application], Application]:
    """Returns the class package.module.Class of this name, which wraps an application. Raises ConfigError."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"middleware must be importable as package.module.Class, got {name!r}: {error}"
        ) from None
    if not isinstance(found, type):
        raise ConfigError(
            f"middleware must be a class of ASGI, got {name!r}; wrap a function of Starlette's in "
            "BaseHTTPMiddleware"
        )
    return found
