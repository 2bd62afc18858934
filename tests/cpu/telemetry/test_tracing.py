"""Requests as OpenTelemetry traces, with the SDK's own exporter into memory."""

import asyncio
import socket
import sys
import time

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.telemetry.timeline import Timeline
from shoal.telemetry.tracing import Tracing, check_tracing, opened_tracing
from tests.fake_server import FakeServer, engine_saying, read_until

SECRET = "the treasure lies under the old oak"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def traced():
    """A server, and what it has exported: traced() -> spans."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    with FakeServer(engine_saying("Never to be told. ", prefill_seconds=0.01, token_seconds=0.001)) as server:
        server.app.context.tracing = tracing

        def spans():
            tracing._provider.force_flush()
            found = exporter.get_finished_spans()
            exporter.clear()
            return found

        yield server, spans
    tracing.close()


def ask(server, path="/v1/completions", status=200, headers=(), **body):
    body = {"prompt": SECRET, "max_tokens": 5, **body}
    assert server.request(path, body, headers=dict(headers))[0] == status


def test_a_request_is_a_span_with_its_time_line_below_it(traced):
    server, spans = traced
    ask(server, headers={"x-request-id": "mine"}, temperature=0.5, top_p=0.9, n=2)
    found = spans()
    [root] = [span for span in found if span.parent is None]
    assert (root.name, root.kind, root.status.status_code) == (
        "llm_request",
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    below = [span for span in found if span is not root]
    assert sorted({span.name for span in below}) == ["decode", "prefill", "queue", "tokenize"]
    for span in below:
        assert span.parent.span_id == root.context.span_id and span.context.trace_id == root.context.trace_id
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    shown = dict(root.attributes)
    for name in (
        "e2e",
        "time_to_first_token",
        "time_in_queue",
        "time_in_model_prefill",
        "time_in_model_decode",
    ):
        assert shown.pop(f"gen_ai.latency.{name}") >= 0
    assert shown == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": len(server.engine.seen[-1].prompt_token_ids),
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": "/v1/completions",
    }
    assert root.resource.attributes["service.name"] == "shoal"
    assert not any(word in span.to_json() for span in found for word in ("treasure", "Never"))


@pytest.mark.parametrize(
    ("path", "operation"),
    [("/v1/chat/completions", "chat"), ("/v1/messages", "chat"), ("/v1/embeddings", "embeddings")],
)
def test_the_operation_is_named_as_the_conventions_name_it(traced, path, operation):
    server, spans = traced
    said = (
        {"input": SECRET}
        if operation == "embeddings"
        else {"messages": [{"role": "user", "content": SECRET}]}
    )
    ask(server, path, **said)
    assert {span.attributes.get("gen_ai.operation.name") for span in spans() if span.parent is None} == {
        operation
    }


def test_a_clients_trace_is_gone_on_with_and_passed_on(traced):
    server, spans = traced
    ask(server, headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"})
    found = spans()
    [root] = [span for span in found if span.name == "llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    passed_on = server.engine.seen[-1].trace_headers
    assert passed_on == {
        "traceparent": f"00-{TRACE}-{root.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }


def test_what_a_client_does_not_sample_is_passed_on_and_not_sent(traced):
    server, spans = traced
    ask(server, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert spans() == ()
    assert server.engine.seen[-1].trace_headers["traceparent"].startswith(f"00-{TRACE}-")


@pytest.mark.parametrize("parents", [[PARENT], [PARENT, "00f067aa0ba902b8"]])
def test_headers_that_are_repeated_are_read_as_one(traced, parents):
    """A second traceparent makes it none, so a new trace begins; several parts of tracestate are one."""
    server, spans = traced
    body = b'{"prompt": "a", "max_tokens": 1}'
    lines = [f"traceparent: 00-{TRACE}-{parent}-01" for parent in parents] + [
        "tracestate: a=b",
        "tracestate: c=d",
    ]
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines])
    read_until(server.raw(head.encode() + b"\r\n\r\n" + body), b"usage")
    [root] = [span for span in spans() if span.name == "llm_request"]
    is_theirs = f"{root.context.trace_id:032x}" == TRACE
    assert is_theirs == (len(parents) == 1)
    assert root.context.trace_state.to_header() == ("a=b,c=d" if is_theirs else "")


def test_without_tracing_a_clients_context_goes_on_as_it_came():
    with FakeServer() as server:
        ask(server, headers={"traceparent": "00-1-2-03", "tracestate": "vendor=1"})
        assert server.engine.seen[-1].trace_headers == {"traceparent": "00-1-2-03", "tracestate": "vendor=1"}
        ask(server)
        assert server.engine.seen[-1].trace_headers is None


def test_a_failure_has_its_kind_and_not_its_words(traced):
    server, spans = traced
    server.engine.refuses = SECRET
    ask(server, status=400)
    [root] = [span for span in spans() if span.name == "llm_request"]
    assert root.status.status_code == StatusCode.ERROR and root.attributes["error.type"] == "400"
    assert "treasure" not in root.to_json()


def test_a_service_may_have_another_name(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "reef")
    tracing = Tracing(InMemorySpanExporter(), "worker-1")
    shown = tracing._provider.resource.attributes
    assert (shown["service.name"], shown["service.instance.id"]) == ("reef", "worker-1")
    tracing.close()


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "", "http://[", "http://a:b"]
)
def test_an_endpoint_that_is_not_a_url_is_refused(endpoint):
    with pytest.raises(
        ConfigError, match=r"must be an http:// or https:// URL, got .*; give a collector's OTLP/HTTP port"
    ):
        check_tracing(endpoint)


@pytest.mark.parametrize(
    "module", ["opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_a_missing_extra_is_named(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[otel\]'"):
        check_tracing("http://127.0.0.1:4318")
    check_tracing(ServerConfig().otlp_traces_endpoint)  # none is wanted


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("tries_already", [False, True])
def test_a_collector_that_is_away_does_not_keep_a_process_from_its_end(
    is_silent, tries_already, monkeypatch, caplog
):
    """Regression: each process of a fleet retried for seconds, one after another."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50" if tries_already else "60000")

    async def main(port):
        async with opened_tracing(f"http://127.0.0.1:{port}", "w") as tracing:
            line = Timeline("a", "tiny", "/v1/completions", time.perf_counter())
            tracing.begin(line, None).end(line)
            await asyncio.sleep(0.5)
            return time.monotonic()

    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        if is_silent:
            collector.listen()
        left = asyncio.run(main(collector.getsockname()[1]))
        assert time.monotonic() - left < 6.0
    assert "the collector of traces has not taken the last spans within 1 s" in caplog.text
