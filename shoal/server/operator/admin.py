"""The admin port: putting a model to sleep and waking it, weights, pause. Every path takes ?model=NAME;
without it, the first model.

Most routes come from the table of commands: a command's arguments are the parameters of the URL's query.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from shoal.control import COMMANDS, AdminRoute, Command
from shoal.errors import RequestError
from shoal.server.apis.protocol import UpdateWeightsRequest
from shoal.server.http.exchange import Exchange
from shoal.server.http.query import Query, one_of, query_of
from shoal.server.http.route import Handler, Route
from shoal.server.operator.system import health, metrics
from shoal.server.served.model import ServedModel

MOST_FOLDER_CHARACTERS = 200

# Routes from the table of commands


def _route(kind: type[Command[Any]], route: AdminRoute) -> Route:
    return Route(route.method, route.path, _handler(kind, route.answer), route.summary)


def _handler(kind: type[Command[Any]], answer: str) -> Handler:
    async def handle(exchange: Exchange) -> None:
        query = query_of(exchange, (*kind.__struct_fields__, "model"))
        model = _model(exchange, query)
        result = await model.engine.control(command_of(kind, query))
        await exchange.json({answer: result} if answer else result)

    return handle


def command_of(kind: type[Command[Any]], query: Query) -> Command[Any]:
    """Returns the command with its arguments from a URL's query, which may have other parameters too.
    Raises ApiError (400) for a value of a wrong type, and ConfigError for an invalid one."""
    arguments = {}
    for field in msgspec.structs.fields(kind):
        if field.name in query:
            value = query[field.name] if _is_list(field.type) else one_of(query, field.name)
            try:
                arguments[field.name] = msgspec.convert(value, field.type, strict=False)
            except msgspec.ValidationError as error:
                raise RequestError(
                    f"{field.name} {value!r:.40} cannot be read: {error}", field=field.name
                ) from None
        elif field.required:
            raise RequestError(f"{field.name} is missing; give it in the URL's query", field=field.name)
    return kind(**arguments)


def _is_list(kind: Any) -> bool:
    """Returns whether a field of this type takes several values, as in ?tags=a&tags=b."""
    alternatives = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return any(typing.get_origin(one) is list for one in alternatives)


# Routes with their own shape


async def is_sleeping(exchange: Exchange) -> None:
    state = await _model(exchange, query_of(exchange, ("model",))).engine.sleep_state()
    await exchange.json({"is_sleeping": state.is_sleeping})


async def pause(exchange: Exchange) -> None:
    """Pauses the engine (sleep level 0): nothing is scheduled, nothing released."""
    query = query_of(exchange, ("mode", "model"))
    await _model(exchange, query).engine.sleep(0, None, one_of(query, "mode", "abort"))
    await exchange.json({"status": "paused"})


async def resume(exchange: Exchange) -> None:
    await _model(exchange, query_of(exchange, ("model",))).engine.wake_up()
    await exchange.json({"status": "resumed"})


async def is_paused(exchange: Exchange) -> None:
    """Answers true when asleep or paused: as in vLLM, either way nothing is scheduled."""
    state = await _model(exchange, query_of(exchange, ("model",))).engine.sleep_state()
    await exchange.json({"is_paused": state.is_sleeping})


async def update_weights(exchange: Exchange) -> None:
    model = _model(exchange, query_of(exchange, ("model",)))
    await exchange.json({"version": await model.engine.update_weights(checkpoint_of(exchange))})


def checkpoint_of(exchange: Exchange) -> str:
    """Returns the checkpoint that the body names: a folder, a file, or a model's name. Raises ApiError."""
    request = exchange.decode(UpdateWeightsRequest)
    if (request.path is None) == (request.model is None):
        raise RequestError(
            "path and model: give exactly one of them, a checkpoint's folder or file, or a model's name",
            field="path",
        )
    return request.path or request.model or ""


async def start_profile(exchange: Exchange) -> None:
    query = query_of(exchange, ("folder", "model"))
    folder = _below(exchange.context.config.profile_dir, one_of(query, "folder", ""))
    await _model(exchange, query).engine.start_profile(folder)
    await exchange.json({"status": "tracing"})


def _below(profile_dir: str, name: str) -> str:
    """Returns the folder of traces that a request names."""
    parts = PurePosixPath(name).parts
    if (
        not name.isprintable()
        or len(name) > MOST_FOLDER_CHARACTERS
        or name.startswith(("/", "~"))
        or ".." in parts
    ):
        raise RequestError(
            f"folder must be below the server's --profile-dir ({profile_dir}), got {name!r:.100}; give a "
            f"relative path of at most {MOST_FOLDER_CHARACTERS} printable characters",
            field="folder",
        )
    return str(Path(profile_dir, *parts))


def _model(exchange: Exchange, query: Query) -> ServedModel:
    return exchange.models.find(one_of(query, "model") or None)


ADMIN_ROUTES: tuple[Route, ...] = (
    *[_route(kind, kind.route) for kind in COMMANDS if kind.route is not None],
    Route("GET", "/is_sleeping", is_sleeping, "Whether the model sleeps"),
    Route("POST", "/pause", pause, "Stop scheduling"),
    Route("POST", "/resume", resume, "Schedule again"),
    Route("GET", "/is_paused", is_paused, "Whether scheduling is stopped"),
    Route("POST", "/update_weights", update_weights, "Load other weights", UpdateWeightsRequest),
    Route("POST", "/start_profile", start_profile, "Trace what runs, for ui.perfetto.dev"),
    Route("GET", "/health", health, "Whether the server works", public=True, quiet=True),
    Route("GET", "/metrics", metrics, "Metrics for Prometheus", public=True, quiet=True),
)
