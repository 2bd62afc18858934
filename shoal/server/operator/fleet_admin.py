"""A fleet's admin port: the paths of `shoal serve`'s, for one worker, some or all of them.

Every path takes ?workers=a,b (default: all, or all of ?model=NAME) and ?rolling=true (one after the other,
each without requests meanwhile). The answer has each worker's answer under `workers`, and their common fields
beside it, so that one server and a fleet answer with the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.control import (
    COMMANDS,
    AdminRoute,
    Command,
    ReadSleepState,
    Sleep,
    StopProfile,
    UpdateWeights,
    WakeUp,
)
from shoal.errors import RequestError
from shoal.fleet_api import CommandResults, FleetControl
from shoal.server.apis.protocol import UpdateWeightsRequest
from shoal.server.errors import ApiError, to_api_error
from shoal.server.http.exchange import Exchange
from shoal.server.http.query import Query, one_of, query_of
from shoal.server.http.route import Handler, Route
from shoal.server.operator.admin import checkpoint_of, command_of

TARGET = ("workers", "model", "rolling")
STATE = ReadSleepState()


@dataclass(frozen=True, slots=True)
class _Verb:
    """A path, its command, and the shape of one worker's answer."""

    method: str
    path: str
    summary: str
    make: Callable[[Exchange, Query], Command[Any]]
    shape: Callable[[Any], dict[str, Any]]
    fields: tuple[str, ...] = ()  # the command's own parameters of the URL's query
    request: type | None = None


def fleet_admin_routes(fleet: FleetControl) -> list[Route]:
    return [
        Route(verb.method, verb.path, _handler(fleet, verb), verb.summary, verb.request) for verb in VERBS
    ]


def _handler(fleet: FleetControl, verb: _Verb) -> Handler:
    async def handle(exchange: Exchange) -> None:
        query = query_of(exchange, (*verb.fields, *TARGET))
        names = [name for value in query.get("workers", []) for name in value.split(",") if name]
        if "workers" in query and not names:
            raise RequestError(
                "workers must name at least one, got nothing; write ?workers=a,b, or leave it out for all"
            )
        found = await fleet.command(
            verb.make(exchange, query),
            names or None,
            model=one_of(query, "model") or None,
            rolling=_is_true(one_of(query, "rolling", "false"), "rolling"),
        )
        await _answer(exchange, found, verb)

    return handle


async def _answer(exchange: Exchange, found: CommandResults, verb: _Verb) -> None:
    """Answers with all workers' answers. A failure has the status of the first worker's failure."""
    answers = {name: verb.shape(result) for name, result in found.results.items()}
    if not found.errors:
        first, *others = answers.values()
        common = {key: value for key, value in first.items() if all(one.get(key) == value for one in others)}
        await exchange.json({**common, "workers": answers})
        return
    errors = {name: to_api_error(error) for name, error in found.errors.items()}
    message = "; ".join([f"worker {name}: {error.message}" for name, error in errors.items()])
    if found.not_asked:
        message += f". It ended there; not asked: {', '.join(found.not_asked)}"
    if found.versions:
        message += ". Versions of the weights: " + ", ".join(
            f"{name} {n}" for name, n in found.versions.items()
        )
    error = next(iter(errors.values()))
    body = msgspec.json.decode(ApiError(error.status, message, param=error.param, code=error.code).body())
    failed = {name: {"error": each.message} for name, each in errors.items()}
    await exchange.json({**body, "workers": {**answers, **failed}}, error.status)


def _is_true(value: str, name: str) -> bool:
    if value not in ("true", "false", "1", "0"):
        raise RequestError(f"{name} must be true or false, got {value!r:.40}", field=name)
    return value in ("true", "1")


def _from_table(kind: type[Command[Any]], route: AdminRoute) -> _Verb:
    shape = _under(route.answer) if route.answer else msgspec.to_builtins
    fields = kind.__struct_fields__
    return _Verb(
        route.method, route.path, route.summary, lambda _, query: command_of(kind, query), shape, fields
    )


def _under(key: str) -> Callable[[Any], dict[str, Any]]:
    return lambda result: {key: msgspec.to_builtins(result)}


VERBS = (
    # A trace is one worker's own affair.
    *[
        _from_table(kind, kind.route)
        for kind in COMMANDS
        if kind.route is not None and kind is not StopProfile
    ],
    _Verb(
        "GET",
        "/is_sleeping",
        "Whether the workers sleep",
        lambda *_: STATE,
        lambda found: {"is_sleeping": found.is_sleeping},
    ),
    _Verb(
        "POST",
        "/pause",
        "Stop scheduling",
        lambda _, query: Sleep(0, None, one_of(query, "mode", "abort")),
        lambda _: {"status": "paused"},
        ("mode",),
    ),
    _Verb("POST", "/resume", "Schedule again", lambda *_: WakeUp(), lambda _: {"status": "resumed"}),
    _Verb(
        "GET",
        "/is_paused",
        "Whether scheduling is stopped",
        lambda *_: STATE,
        lambda found: {"is_paused": found.is_sleeping},
    ),
    _Verb(
        "POST",
        "/update_weights",
        "Load other weights in place",
        lambda exchange, _: UpdateWeights(checkpoint_of(exchange)),
        _under("version"),
        request=UpdateWeightsRequest,
    ),
)
