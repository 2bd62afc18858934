"""Routes of a port, and the table that finds the route of a path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.server.http.exchange import OPENAI, Dialect, Exchange

Handler = Callable[[Exchange], Awaitable[None]]
# Paths of the description of a port's routes: for people, and for programs.
DOCS, DOCUMENT = "/docs", "/openapi.json"


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may end in `/{id}`, which stands for one or more segments. The handler takes them from the
    path."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: type | None = None  # the Struct of the body, for the OpenAPI document
    response: type | None = None  # the Struct of a JSON answer, for the same document
    content_type: str = "text/plain"  # for answers without a Struct
    public: bool = False  # asks for no key
    quiet: bool = False  # polled by machines: neither logged nor counted
    dialect: Dialect = OPENAI


class RouteTable:
    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}  # path: method: route
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in routes:
            table = self._prefixes if route.path.endswith("{id}") else self._exact
            table.setdefault(route.path.removesuffix("{id}"), {})[route.method] = route

    def find(self, path: str) -> tuple[str, Mapping[str, Route]] | None:
        """Returns the routes of the path, by method, and the path as they know it. None if there is nothing.

        Base URLs are often written with a slash at their end, or without /v1, as in llama.cpp."""
        path = path.rstrip("/") or "/"
        for known in (path, f"/v1{path}"):
            if (methods := self._exact.get(known)) is not None:
                return known, methods
            for prefix, methods in self._prefixes.items():
                if known.startswith(prefix):
                    return known, methods
        return None

    def dialect_beside(self, path: str) -> Dialect:
        """Returns the dialect of the routes in the same folder as an unknown path, if they have one: Ollama's
        clients read errors in its form alone."""
        folder = path.rpartition("/")[0] + "/"
        dialects = [
            route.dialect
            for found, methods in self._exact.items()
            if found.startswith(folder)
            for route in methods.values()
        ]
        return dialects[0] if len(set(map(id, dialects))) == 1 else OPENAI

    def overview(self) -> str:
        """Returns a list of the routes, for the error of an unknown path."""
        if DOCUMENT in self._exact:
            return f"{DOCUMENT} lists what there is"
        paths = [*self._exact, *(prefix + "{id}" for prefix in self._prefixes)]
        return f"there are {', '.join(sorted(paths))}"
