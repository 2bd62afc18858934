"""The last requests of this port, with the time of each and of its parts."""

from __future__ import annotations

import msgspec

from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange
from shoal.server.http.query import count_of, query_of
from shoal.telemetry.timeline import MAX_KEPT, RequestSummary


class RequestList(msgspec.Struct):
    requests: list[RequestSummary]  # the newest first


async def list_requests(exchange: Exchange) -> None:
    limit = count_of(query_of(exchange, ("limit",)), "limit", MAX_KEPT)
    lines = exchange.context.timelines.newest_first()[:limit]
    await exchange.json(RequestList([line.summary() for line in lines]))


async def get_request(exchange: Exchange) -> None:
    request_id = exchange.path.removeprefix("/requests/")
    line = exchange.context.timelines.find(request_id)
    if line is None:
        raise ApiError(
            404, f"there is no request {request_id!r:.100} among the last {MAX_KEPT}; /requests lists them"
        )
    await exchange.json(line.details())
