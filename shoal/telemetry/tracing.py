"""Requests as OpenTelemetry traces: a span for each request and, below it, the spans of its timeline.

OpenTelemetry is imported only when a Tracing is opened. Attributes follow its conventions for generative AI;
latencies, which have no names there, have vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from shoal.errors import ConfigError
from shoal.telemetry.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

TRACE_HEADERS = ("traceparent", "tracestate")  # W3C's trace context
REQUEST_SPAN = "llm_request"  # vLLM's name
TRACES_PATH = "/v1/traces"
CONVERSATIONS = ("/v1/messages", "/v1/responses")  # endpoints of chats without "chat" in their path
LAST_SPANS_S = 1.0  # for sending the last spans at the end
LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}


def check_tracing(endpoint: str | None) -> None:
    """Raises ConfigError for an endpoint that is not a URL, and if OpenTelemetry is not installed. None: no
    traces."""
    if endpoint is None:
        return
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half a bracket, or a malformed port
        is_url = False
    if not is_url:
        raise ConfigError(
            f"otlp_traces_endpoint must be an http:// or https:// URL, got {endpoint!r:.200}; give a "
            "collector's OTLP/HTTP port, such as http://127.0.0.1:4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint {endpoint!r:.200} needs OpenTelemetry, which is not installed ({error}): "
            "pip install 'shoal[otel]', or leave the option out"
        ) from None


@contextlib.asynccontextmanager
async def opened_tracing(endpoint: str | None, instance: str) -> AsyncIterator[Tracing | None]:
    """Yields a Tracing, or None without an endpoint; sends the last spans at the end of the block. endpoint:
    the URL of a collector's OTLP/HTTP port, or of its path for traces. instance: see Tracing. Raises as
    check_tracing does."""
    check_tracing(endpoint)
    if endpoint is None:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    has_path = urllib.parse.urlsplit(endpoint).path not in ("", "/")
    url = endpoint if has_path else endpoint.rstrip("/") + TRACES_PATH
    tracing = Tracing(OTLPSpanExporter(endpoint=url), instance)
    try:
        yield tracing
    finally:
        await asyncio.to_thread(tracing.close)


class Tracing:
    """Sends the traces of one process. A thread of the SDK sends spans; while the collector does not accept
    them, spans beyond the SDK's queue are dropped."""

    def __init__(self, exporter: SpanExporter, instance: str = "") -> None:
        """instance: the name of this process within the service, such as a worker's id. The service is
        "shoal", unless OTEL_SERVICE_NAME names another."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {"service.instance.id": instance} if instance else {}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            named["service.name"] = "shoal"
        # A provider of its own, as programs that use this package may have set the global one.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("shoal")
        self._context = TraceContextTextMapPropagator()

    def begin(self, line: Timeline, headers: Mapping[str, str] | None) -> Trace:
        """Begins the trace of a request. headers: its trace context; without one a new trace begins."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._context.extract(headers or {})
        start_ns = _nanoseconds(line.started_at)
        span = self._tracer.start_span(REQUEST_SPAN, parent, SpanKind.SERVER, start_time=start_ns)
        passed_on: dict[str, str] = {}
        self._context.inject(passed_on, set_span_in_context(span))
        return Trace(self, span, passed_on)

    def end(self, span: Span, line: Timeline, error: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        if span.is_recording():
            below = set_span_in_context(span)
            for part in line.all_spans():
                start_s = line.started_at + part.start_s
                attributes = {f"shoal.{name}": value for name, value in part.attributes.items()}
                if part.worker:
                    attributes["shoal.worker"] = part.worker
                child = self._tracer.start_span(
                    part.name, below, attributes=attributes, start_time=_nanoseconds(start_s)
                )
                child.end(_nanoseconds(start_s + part.seconds))
            span.set_attributes(_attributes_of(line))
            if error is not None:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(line.started_at + line.seconds))

    def close(self) -> None:
        """Sends the last spans. Blocks for a bounded time: an unreachable collector must not delay the end of
        the process, and the SDK would retry for a while."""
        sending = threading.Thread(target=self._provider.shutdown, name="shoal-last-spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)
        if sending.is_alive():
            logger.warning(
                "the collector of traces has not taken the last spans within %g s; they are lost",
                LAST_SPANS_S,
            )
            self._exporter.shutdown()  # stops the SDK's retries


class Trace:
    """The trace of one request. `headers` go to other processes with a part of it, whose spans come below
    this one."""

    def __init__(self, tracing: Tracing, span: Span, headers: dict[str, str]) -> None:
        self._tracing, self._span, self.headers = tracing, span, headers

    def end(self, line: Timeline, error: str | None = None) -> None:
        """Ends the trace; called once, after the end of the timeline. error: the kind of a failure, such as
        "500"."""
        self._tracing.end(self._span, line, error)


def _attributes_of(line: Timeline) -> dict[str, str | int | float | list[str]]:
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": _operation_of(line.endpoint),
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": line.model,
        "gen_ai.response.model": line.model,
        "gen_ai.request.id": line.id,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": line.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": line.cached_tokens,
        "gen_ai.latency.e2e": line.seconds,
    }
    if line.endpoint:
        found["http.route"] = line.endpoint
    if line.reasons:
        found["gen_ai.response.finish_reasons"] = sorted(line.reasons)
    if line.params is not None:
        found["gen_ai.request.temperature"] = line.params.temperature
        found["gen_ai.request.top_p"] = line.params.top_p
        found["gen_ai.request.choice.count"] = line.params.n
        if line.params.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = line.params.max_tokens
    if line.output_tokens:
        found["gen_ai.latency.time_to_first_token"] = line.first - line.began
    for name, key in LATENCIES.items():
        spans = [span.seconds for span in line.all_spans() if span.name == name]
        if spans:
            found[key] = sum(spans)
    return found


def _operation_of(endpoint: str) -> str:
    if "embed" in endpoint:
        return "embeddings"
    return "chat" if "chat" in endpoint or endpoint in CONVERSATIONS else "text_completion"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
