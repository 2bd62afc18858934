"""What one sees of a server and its fleet: the data, and the page that shows it."""

from __future__ import annotations

import math

from shoal.fleet_api import FleetView
from shoal.server.errors import ApiError
from shoal.server.http import Exchange
from shoal.server.route import Route
from shoal.server.web_page import web_page


async def _fleet(exchange: Exchange) -> None:
    query = exchange.query()
    if unknown := [name for name in query if name not in ("since", "worker")]:
        raise ApiError(400, f"there is no parameter {unknown[0]!r:.100}; there are since and worker")
    since = None
    if "since" in query:
        try:
            since = float(query["since"][-1])
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise ApiError(
                400, f"since {query['since'][-1]!r:.100} is no number; give seconds since 1970", param="since"
            )
    await exchange.json(await exchange.port.watch.view(since, query.get("worker", [None])[-1]))


async def _dashboard(exchange: Exchange) -> None:
    body, headers = web_page("dashboard.html")
    await exchange.respond(body, content_type=b"text/html; charset=utf-8", headers=headers)


FLEET = Route("GET", "/fleet", _fleet, "The workers, and what they do", response=FleetView, quiet=True)
DASHBOARD = Route("GET", "/dashboard", _dashboard, "The dashboard", content_type="text/html", public=True)
