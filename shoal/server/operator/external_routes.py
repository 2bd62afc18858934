"""Routes of a router: the public ones, which pass requests for external models on to their workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from shoal.fleet_api import ExternalCall
from shoal.server.apis.protocol import Seconds
from shoal.server.errors import ApiError
from shoal.server.http.decode import decode
from shoal.server.http.exchange import Exchange
from shoal.server.http.route import Handler, Route
from shoal.server.served.external_model import ExternalModel

# Paths of requests without an answer of the model; they are not listed.
UNLISTED = frozenset(
    {
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/api/show",
    }
)
STREAMS = (b"text/event-stream", b"application/x-ndjson")
# Paths whose body or query names a model, and that its workers could answer.
PASSED_ON = frozenset(
    {
        "/tokenizer_info",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/inference/v1/generate",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
    }
)


class _ModelFields(msgspec.Struct):
    """The fields of a body that the router reads itself."""

    model: str | None = None
    name: str | None = None  # the model, in older requests of Ollama
    timeout: Seconds | None = None


def with_external_models(routes: Sequence[Route]) -> list[Route]:
    """Returns the routes with handlers that pass requests for external models on."""
    return [
        replace(route, handler=_passing_on(route.handler)) if route.path in PASSED_ON else route
        for route in routes
    ]


def _passing_on(handler: Handler) -> Handler:
    async def handle(exchange: Exchange) -> None:
        if not exchange.models.external:
            return await handler(exchange)
        if exchange.method in ("GET", "HEAD"):
            asked = _ModelFields(next(iter(exchange.query().get("model", ())), None))
        else:
            asked = decode(_ModelFields, exchange.body)
        model = exchange.models.find_external(asked.model or asked.name)
        if model is None:
            return await handler(exchange)
        return await _pass_on(exchange, model, asked)

    return handle


async def _pass_on(exchange: Exchange, model: ExternalModel, asked: _ModelFields) -> None:
    limits = [t for t in (asked.timeout, model.request_timeout) if t is not None]
    seconds = min(limits) if limits else None
    query = exchange.scope["query_string"].decode("latin-1")
    call = ExternalCall(
        exchange.begin_line(model.name, is_listed=exchange.path not in UNLISTED),
        exchange.method,
        f"{exchange.path}?{query}" if query else exchange.path,
        exchange.headers,
        _as_operated(exchange),
    )
    model.admission.enter(1)
    try:
        async with asyncio.timeout(seconds):
            await _answer(exchange, model, call)
    except TimeoutError:
        raise ApiError(504, f"the request took longer than its {seconds:g} s") from None
    finally:
        model.admission.leave(1)


def _as_operated(exchange: Exchange) -> bytes:
    """Returns the body with the fields that the router's options force in OpenAI's older APIs."""
    config = exchange.context.config
    if exchange.path not in ("/v1/chat/completions", "/v1/completions") or not (
        config.enable_force_include_usage or config.return_tokens_as_token_ids
    ):
        return exchange.body
    body = decode(dict[str, Any], exchange.body)
    if config.enable_force_include_usage and body.get("stream"):
        given = body.get("stream_options")
        body["stream_options"] = {**(given if isinstance(given, dict) else {}), "include_usage": True}
    if config.return_tokens_as_token_ids and body.get("return_tokens_as_token_ids") is None:
        body["return_tokens_as_token_ids"] = True
    return msgspec.json.encode(body)


async def _answer(exchange: Exchange, model: ExternalModel, call: ExternalCall) -> None:
    answer = await model.forwarder.forward(call)
    exchange.more_headers += answer.headers
    async with aclosing(answer.chunks) as chunks:
        if answer.content_type.startswith(STREAMS):
            async for chunk in chunks:
                await exchange.send(chunk)
            await exchange.end(b"")
        else:
            body = b"".join([chunk async for chunk in chunks])
            await exchange.respond(body, answer.status, answer.content_type)
