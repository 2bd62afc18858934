"""Routes for operators and probes: health, version, load, metrics; and the chat page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from shoal import __version__
from shoal.errors import EngineDeadError
from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange
from shoal.server.operator.web_page import vendored, web_page
from shoal.server.served.model import ServedModel
from shoal.stats import SleepState, Stats
from shoal.telemetry.metrics import exposition

METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


async def health(exchange: Exchange) -> None:
    """Answers 200 while the server can work, asleep or not: sleep is an operator's choice, and a restart
    would not end it.

    Answers 503 when an engine is dead, and while draining. Load balancers and Kubernetes' readiness probes
    then send new requests elsewhere.
    """
    if exchange.models.draining:
        raise ApiError(503, "the server is shutting down")
    for model in exchange.models:
        try:
            await model.stats()
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="engine_dead") from None
    await exchange.respond(b"", content_type=b"text/plain")


async def version(exchange: Exchange) -> None:
    await exchange.json({"version": __version__})


async def load(exchange: Exchange) -> None:
    await exchange.json({"server_load": sum(admission.active for admission in exchange.models.admissions)})


async def metrics(exchange: Exchange, more: Iterable[Metric] = ()) -> None:
    """more: further metrics, besides the models' and the port's."""
    families: list[Metric] = []
    for model in exchange.models:
        families += await _families(model)
    families += exchange.context.metrics.collect()
    families += more
    await exchange.respond(exposition(families), content_type=METRICS_TYPE)


async def _families(model: ServedModel) -> Iterable[Metric]:
    is_up = True
    try:
        stats, state = await model.stats(), await model.sleep_state()
    except EngineDeadError:  # nothing runs any more; what the server has counted stays
        stats, state, is_up = Stats(), SleepState(), False
    return model.metrics.collect(stats, state.level, model.admission.refused, is_up)


async def page(exchange: Exchange) -> None:
    body, headers = web_page("chat.html")
    await exchange.respond(body, content_type=b"text/html; charset=utf-8", headers=headers)


async def vendored_file(exchange: Exchange) -> None:
    found = vendored(exchange.path.removeprefix("/vendor/"))
    if found is None:
        raise ApiError(404, f"there is no file {exchange.path!r:.100}; / is the page that names the files")
    body, content_type, headers = found
    await exchange.respond(body, content_type=content_type, headers=headers)
