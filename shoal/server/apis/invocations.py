"""/invocations: SageMaker's one path for requests. As in vLLM, a body's shape says which API it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import RequestError
from shoal.server.apis.protocol import Struct
from shoal.server.http.decode import decode
from shoal.server.http.exchange import Exchange
from shoal.server.http.route import Handler, Route

# The field by which a body shows its API, and the path of that API. Of several fields the first counts.
FIELD_TO_PATH = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}


class InvocationRequest(Struct, kw_only=True):
    """A request of chat (`messages`), completions (`prompt`) or embeddings (`input`), with all its fields."""

    messages: Any = None
    prompt: Any = None
    input: Any = None
    stream: bool | None = None


def invocations(routes: Sequence[Route]) -> Handler:
    """A handler that answers as the one of these routes whose request the body is."""
    handlers = {route.path: route.handler for route in routes if route.method == "POST"}

    async def handle(exchange: Exchange) -> None:
        request = decode(InvocationRequest, exchange.body)
        found = [path for name, path in FIELD_TO_PATH.items() if getattr(request, name) is not None]
        if not found:
            raise RequestError(
                "the body must have messages (chat), prompt (completions) or input (embeddings), and has "
                "none of them; send one"
            )
        exchange.path = found[0]
        await handlers[exchange.path](exchange)

    return handle
