"""The OpenAPI document. It is made from the table of routes and the Structs that requests are decoded into,
so it says what the code does."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal import __version__
from shoal.server.http.exchange import Exchange
from shoal.server.http.route import Handler, Route

ERRORS = {
    400: "The request is malformed or impossible",
    401: "The API key is missing or wrong",
    403: "A web page of another site asks",
    404: "There is no such model",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full; see Retry-After",
    500: "The engine failed",
    503: "Not now: asleep, ending or dead; see Retry-After",
    504: "The request's time is over",
}
# A stream is described by its event, whose data is JSON, or [DONE] at the end of OpenAI's older streams.
EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
OF_A_GET = (401, 404, 500, 503)


def openapi(routes: Sequence[Route]) -> Handler:
    """Returns a handler that answers with the document of these routes. They may grow until the first
    request."""

    @functools.cache
    def encoded(root_path: str | None) -> bytes:
        servers = {} if root_path is None else {"servers": [{"url": root_path}]}
        return msgspec.json.encode(document(routes) | servers)

    async def handle(exchange: Exchange) -> None:
        await exchange.json(encoded(exchange.context.config.root_path))

    return handle


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Returns the document of these routes, in OpenAPI 3.1."""
    types = [
        t for route in routes for t in (route.request, route.response, route.dialect.error) if t is not None
    ]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, found))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Shoal",
            "version": __version__,
            "description": "OpenAI's, Anthropic's and Ollama's APIs, and some of vLLM's.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    """Returns the operation of one route. `security` also allows no key, as a server may be started
    without keys."""
    content: dict[str, Any] = {route.content_type: {"schema": {"type": "string"}}}
    if route.response is not None:
        content = {"application/json": {"schema": schemas[route.response]}}
    if route.request is not None and "stream" in route.request.__struct_fields__:  # type: ignore[attr-defined]
        kind = route.dialect.stream_type.partition(";")[0]
        content[kind] = {"schema": EVENT if kind == "text/event-stream" else {}}
    is_known_api = route.path.startswith(("/v1/", "/api/"))
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.dialect.name if is_known_api else "This server"],
        "operationId": f"{route.method.lower()}{route.path}",
        "responses": {"200": {"description": "OK", "content": content}},
    }
    error = schemas[route.dialect.error]
    for status, text in ERRORS.items():
        if (route.request is not None or status in OF_A_GET) and (status != 401 or not route.public):
            operation["responses"][str(status)] = {
                "description": text,
                "content": {"application/json": {"schema": error}},
            }
    if not route.public:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[route.request]}},
        }
    if route.path.endswith("{id}"):
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return operation
