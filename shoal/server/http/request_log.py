"""The server's log of requests: one line when a request ends, with its costs and without its text.

`in` and `out` are tokens, `cached` is the part of `in` that the prefix cache held, `speed` is tokens a second
after the first one. `recomputed`: tokens after `cached` whose keys and values the cache held, too, but that
were computed again, as no state of the recurrent layers was kept at their end. A client that left before its
answer was whole is a 499, as in nginx."""

from __future__ import annotations

import logging
import math
import re
import time
import urllib.parse
from typing import Any

from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange
from shoal.server.served.generation import Generation
from shoal.telemetry.logs import Event, quoted
from shoal.telemetry.timeline import Timeline

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
MAX_PATH = 200  # characters
REFUSAL_SECONDS = 1.0
# A field, its name in a line of text, and its unit.
LABELS = (
    ("model", "model", ""),
    ("prompt_tokens", "in", ""),
    ("cached_tokens", "cached", ""),
    ("recomputed_tokens", "recomputed", ""),
    ("completion_tokens", "out", ""),
    ("ttft_seconds", "ttft", "s"),
    ("tokens_per_second", "speed", "/s"),
    ("finish_reason", "finish", ""),
    ("worker", "worker", ""),
    ("prefill_worker", "prefill", ""),
    ("request_id", "id", ""),
    ("error", "error", ""),
)
# Errors quote the wrong value, which may be a prompt, so quotations stay out of the log. Long values are cut,
# so a quotation may have no end.
QUOTED = re.compile(r"""(?<!\w)(['"])(?:(?!\1)[^\\]|\\.)*(?:\1|\\?$)""", re.DOTALL)


def log_request(exchange: Exchange, wanted: str) -> None:
    """Writes the line of a request that has ended. Requests of machines (Route.quiet) have the level DEBUG.
    wanted: ServerConfig.log_requests."""
    status, error = status_of(exchange), exchange.error
    is_error = status >= 400 or error is not None
    if wanted == "off" or (wanted == "errors" and not is_error):
        return
    level = logging.DEBUG if exchange.is_quiet else _level(status, error)
    if logger.isEnabledFor(level):
        logger.log(level, event_of(exchange))


def status_of(exchange: Exchange) -> int:
    if exchange.is_gone or exchange.status is None:
        return CLIENT_GONE
    return exchange.status


def event_of(exchange: Exchange) -> Event:
    client, path = exchange.scope.get("client"), exchange.path
    fields: dict[str, Any] = {
        "client": client[0] if client else "-",
        "method": exchange.method[:20],
        "path": path if path == exchange.handler else urllib.parse.quote(path)[:MAX_PATH],
        "status": status_of(exchange),
        "seconds": round(time.perf_counter() - exchange.arrival, 4),
    }
    if exchange.generation is not None:
        fields |= _tokens(exchange.generation, exchange.arrival)
    elif exchange.line is not None and exchange.line.answers:
        fields |= _tokens_of_external(exchange.line)
    fields["request_id"] = exchange.request_id
    if exchange.error is not None:
        fields["error"] = _message(exchange.error)
    return Event(_text(fields), fields)


class RefusalLog:
    """Logs input that never became a request: its head was not HTTP, too long or too late, or the server
    had no room for its connection. At most one line a second, as such input comes in floods."""

    def __init__(self, wanted: str) -> None:
        """wanted: ServerConfig.log_requests."""
        self._wanted, self._told_at, self._num_untold = wanted, -math.inf, 0

    def log(self, client: str, error: ApiError) -> None:
        if self._wanted == "off":
            return
        now = time.monotonic()
        if now - self._told_at < REFUSAL_SECONDS:
            self._num_untold += 1
            return
        fields = {
            "client": client,
            "method": "-",
            "path": "-",
            "status": error.status,
            "error": error.message,
            "untold": self._num_untold,
        }
        more = f" (and {self._num_untold} others before)" if self._num_untold else ""
        logger.warning(Event(f"{client} - - {error.status} error={quoted(error.message)}{more}", fields))
        self._told_at, self._num_untold = now, 0


def _tokens(generation: Generation, arrival: float) -> dict[str, Any]:
    usage, times = generation.usage, generation.times
    fields = {
        "model": generation.model.name,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if recomputed := sum(int(span.attributes.get("recomputed", 0)) for span in generation.line.spans):
        fields["recomputed_tokens"] = recomputed
    begun = [one for one in times if one.first]
    if usage.completion_tokens:
        first = min(one.first for one in begun)
        fields["ttft_seconds"] = round(first - arrival, 4)
        seconds = max(one.last for one in begun) - first
        if (later := usage.completion_tokens - len(begun)) > 0 and seconds > 0:
            fields["tokens_per_second"] = round(later / seconds, 1)
    if reasons := sorted({str(one.reason) for one in times if one.reason is not None}):
        fields["finish_reason"] = ",".join(reasons)
    if generation.worker:
        fields["worker"] = generation.worker
    if generation.prefill_worker:
        fields["prefill_worker"] = generation.prefill_worker
    return fields


def _tokens_of_external(line: Timeline) -> dict[str, Any]:
    """Returns the same fields of a request that was passed on, as far as its worker reports them."""
    summary = line.summary()
    fields: dict[str, Any] = {"model": summary.model}
    if summary.prompt_tokens:
        fields |= {"prompt_tokens": summary.prompt_tokens, "cached_tokens": summary.cached_tokens}
    if summary.output_tokens:
        fields |= {"completion_tokens": summary.output_tokens, "ttft_seconds": summary.ttft_s}
    if summary.itl_s:
        fields["tokens_per_second"] = round(1 / summary.itl_s, 1)
    if summary.finish_reason is not None:
        fields["finish_reason"] = summary.finish_reason
    if summary.workers:
        fields["worker"] = summary.workers[-1]
    return fields


def _text(fields: dict[str, Any]) -> str:
    seconds = f"{fields['seconds']:.3f}s"
    parts = [fields["client"], fields["method"], fields["path"], str(fields["status"]), seconds]
    for name, label, unit in LABELS:
        if (value := fields.get(name)) is not None:
            shown = f"{value:.3f}" if name == "ttft_seconds" else quoted(str(value))
            parts.append(f"{label}={shown}{unit}")
    return " ".join(parts)


def _message(error: ApiError) -> str:
    if error.code == "model_not_found":  # quotes a name, no text
        return error.message
    return QUOTED.sub("'…'", error.message)


def _level(status: int, error: ApiError | None) -> int:
    """Returns ERROR for failures of the server itself. Failures caused by a client or by an operator
    (sleep), and refusals that an external worker sent, are WARNINGs."""
    if error is not None:
        return logging.ERROR if error.status == 500 else logging.WARNING
    return logging.WARNING if status >= 400 and status != CLIENT_GONE else logging.INFO
