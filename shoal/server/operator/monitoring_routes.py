"""Routes of monitoring: the state of a server and its fleet as JSON, and the dashboard."""

from __future__ import annotations

import math

from shoal.errors import RequestError
from shoal.fleet_views import FleetView
from shoal.server.http.exchange import Exchange
from shoal.server.http.query import one_of, query_of
from shoal.server.http.route import Route
from shoal.server.operator.web_page import web_page


async def _fleet(exchange: Exchange) -> None:
    query = query_of(exchange, ("since", "worker"))
    since = None
    if "since" in query:
        text = one_of(query, "since")
        try:
            since = float(text)
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise RequestError(
                f"since must be a number, got {text!r:.100}; give seconds since 1970", field="since"
            )
    await exchange.json(await exchange.context.monitor.view(since, one_of(query, "worker") or None))


async def _dashboard(exchange: Exchange) -> None:
    body, headers = web_page("dashboard.html")
    await exchange.respond(body, content_type=b"text/html; charset=utf-8", headers=headers)


FLEET = Route("GET", "/fleet", _fleet, "The workers and their state", response=FleetView, quiet=True)
DASHBOARD = Route("GET", "/dashboard", _dashboard, "The dashboard", content_type="text/html", public=True)
