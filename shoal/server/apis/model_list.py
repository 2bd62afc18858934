"""/v1/models, in OpenAI's shape, and in Anthropic's for clients that send the header anthropic-version."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence

from shoal.errors import RequestError
from shoal.server.apis.anthropic import ANTHROPIC
from shoal.server.http.exchange import Exchange
from shoal.server.served.external_model import ExternalModel
from shoal.server.served.model import ServedModel

STARTED = int(time.time())
DEFAULT_LIMIT, MAX_LIMIT = 20, 1000  # models on a page, as in Anthropic's API


async def list_models(exchange: Exchange) -> None:
    models = [*exchange.models, *exchange.models.external]
    cards = [_card(exchange, model, name) for model in models for name in model.names]
    if exchange.dialect is ANTHROPIC:
        await exchange.json(_page(cards, exchange.query()))
    else:
        await exchange.json({"object": "list", "data": cards})


async def get_model(exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    model = exchange.models.find_external(name) or exchange.models.find(name)
    await exchange.json(_card(exchange, model, name))


def _card(exchange: Exchange, model: ServedModel | ExternalModel, name: str) -> dict[str, object]:
    if exchange.dialect is ANTHROPIC:
        created = datetime.datetime.fromtimestamp(STARTED, datetime.UTC)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "max_input_tokens": model.max_model_len,
            "max_tokens": model.max_model_len,
        }
    card = model.loaded.card if isinstance(model, ServedModel) else None
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "shoal",
        # Clients such as `vllm bench` load the tokenizer by it.
        "root": model.name if card is None else card.model,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


def _page(cards: list[dict[str, object]], query: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Returns the page of models that the query asks for: `limit` of them, after or before an id."""
    after, before = query.get("after_id"), query.get("before_id")
    ids = [card["id"] for card in cards]
    if after:
        cards = cards[_place(ids, "after_id", after[-1]) + 1 :]
    elif before:
        cards = cards[: _place(ids, "before_id", before[-1])]
    limit = _limit(query.get("limit", ()))
    # Before an id, the page is the one that ends there.
    shown = cards[-limit:] if before and not after else cards[:limit]
    return {
        "data": shown,
        "has_more": len(shown) < len(cards),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


def _place(ids: list[object], field: str, name: str) -> int:
    if name not in ids:
        raise RequestError(f"{field}: there is no model {name!r:.100}; take an id of the list", field=field)
    return ids.index(name)


def _limit(given: Sequence[str]) -> int:
    text = given[-1] if given else str(DEFAULT_LIMIT)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_LIMIT):
        raise RequestError(f"limit must be from 1 to {MAX_LIMIT}, got {text!r:.100}", field="limit")
    return int(text)
