"""A router's own routes: selection of a worker for a prompt, and operation of the fleet on the admin port."""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.errors import RequestError
from shoal.fleet_api import FleetControl
from shoal.fleet_views import Selected
from shoal.server.http.decode import decode
from shoal.server.http.exchange import Exchange
from shoal.server.http.route import Route
from shoal.server.operator import system
from shoal.server.operator.monitoring_routes import FLEET
from shoal.server.served.catalog import Catalog

MANY = 1000  # workers in one request


class SelectRequest(msgspec.Struct):
    """`token_ids`, `prompt` or `messages`, the last as in a chat."""

    model: str | None = None
    token_ids: list[int] | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    session: str | None = None
    tags: list[str] = []


class WorkersRequest(msgspec.Struct, forbid_unknown_fields=True):
    """External workers to add, in the form of --worker, and ids of external workers to remove. Unknown
    fields are refused, as a misspelt one would look like a change that was made."""

    add: list[str] = []
    remove: list[str] = []


class RoleRequest(msgspec.Struct, forbid_unknown_fields=True):
    role: str  # "both", "prefill" or "decode"


class WorkersChanged(msgspec.Struct):
    added: list[str]
    removed: list[str]


class Done(msgspec.Struct):
    status: str


class FleetRoutes:
    def __init__(self, fleet: FleetControl) -> None:
        self._fleet = fleet

    def public(self) -> list[Route]:
        return [
            Route("POST", "/fleet/select", self._select, "Where a prompt would go", SelectRequest, Selected)
        ]

    def admin(self) -> list[Route]:
        return [
            FLEET,
            Route("POST", "/fleet/drain/{id}", self._drain, "Send a worker nothing new", response=Done),
            Route("POST", "/fleet/resume/{id}", self._resume, "Send it requests again", response=Done),
            Route("POST", "/fleet/role/{id}", self._change_role, "Give it another role", RoleRequest, Done),
            Route(
                "POST",
                "/fleet/workers",
                self._change_workers,
                "Add and remove external workers",
                WorkersRequest,
                WorkersChanged,
            ),
            Route("GET", "/fleet/config", self._show_config, "The settings that may change"),
            Route("POST", "/fleet/config", self._change_config, "Change some of them"),
            Route("GET", "/health", system.health, "Whether the router works", public=True, quiet=True),
            self.metrics,
        ]

    @property
    def metrics(self) -> Route:
        return Route("GET", "/metrics", self._metrics, "Metrics for Prometheus", public=True, quiet=True)

    async def _select(self, exchange: Exchange) -> None:
        request = exchange.decode(SelectRequest)
        body = {name: value for name, value in msgspec.structs.asdict(request).items() if value is not None}
        if exchange.models.find_external(request.model) is None:
            body["token_ids"] = await _token_ids(exchange.models, request)
        await exchange.json(await self._fleet.select(request.model, body))

    async def _drain(self, exchange: Exchange) -> None:
        await self._fleet.drain(exchange.path.removeprefix("/fleet/drain/"))
        await exchange.json(Done("draining"))

    async def _resume(self, exchange: Exchange) -> None:
        await self._fleet.resume(exchange.path.removeprefix("/fleet/resume/"))
        await exchange.json(Done("resumed"))

    async def _change_role(self, exchange: Exchange) -> None:
        role = exchange.decode(RoleRequest).role
        await self._fleet.change_role(exchange.path.removeprefix("/fleet/role/"), role)
        await exchange.json(Done(role))

    async def _change_workers(self, exchange: Exchange) -> None:
        request = exchange.decode(WorkersRequest)
        if len(request.add) + len(request.remove) > MANY:
            raise RequestError(
                f"add and remove must name at most {MANY} workers, got "
                f"{len(request.add) + len(request.remove)}; send several requests"
            )
        added = await self._fleet.change_workers(request.add, request.remove)
        await exchange.json(WorkersChanged(added, request.remove))

    async def _show_config(self, exchange: Exchange) -> None:
        await exchange.json(await self._fleet.configure({}))

    async def _change_config(self, exchange: Exchange) -> None:
        await exchange.json(await self._fleet.configure(decode(dict[str, Any], exchange.body)))

    async def _metrics(self, exchange: Exchange) -> None:
        await system.metrics(exchange, self._fleet.metrics())


async def _token_ids(models: Catalog, request: SelectRequest) -> list[int]:
    """Returns the prompt's tokens, for a model with native workers."""
    model = models.find(request.model)
    adds_special_tokens = request.add_special_tokens
    if request.token_ids is not None:
        token_ids = request.token_ids
    elif isinstance(request.prompt, list):
        token_ids = request.prompt
    elif request.prompt is not None:
        [token_ids] = await model.encode([request.prompt], adds_special_tokens is not False)
    elif request.messages is not None:
        prompt = await model.chat_prompt(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=adds_special_tokens,
            variables=request.chat_template_kwargs,
        )
        token_ids = prompt.token_ids
    else:
        raise RequestError("prompt is missing; give token_ids, prompt or messages", field="prompt")
    wrong = next((i for i in token_ids if not 0 <= i < model.loaded.vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"token_ids must be from 0 to {model.loaded.vocab_size - 1} for {model.name}, got {wrong}",
            field="token_ids",
        )
    return token_ids
