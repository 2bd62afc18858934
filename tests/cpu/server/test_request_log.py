"""The server's log: what it says of requests and of the server's work, and what it never says."""

import asyncio
import itertools
import json
import logging
import re
import time
from types import SimpleNamespace

import pytest

from shoal.apps import serve
from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.fake_engine import FakeEngine
from shoal.server.errors import ApiError
from shoal.server.http.keys import check_admin_port
from shoal.server.http.request_log import RefusalLog
from shoal.server.served.throughput import report_throughput
from shoal.telemetry.logs import JsonFormatter, TextFormatter
from tests.fake_server import FakeServer, engine_saying, post, read_until
from tests.waiting import eventually

SECRET = "the treasure lies under the old oak"
MESSAGES = [{"role": "user", "content": SECRET}]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = [
    (COMPLETE, {"prompt": SECRET, "max_tokens": 5}),
    (COMPLETE, {"prompt": [SECRET, SECRET], "max_tokens": 5, "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
    ("/v1/responses", {"input": SECRET, "max_output_tokens": 5}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
    ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 5}}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5}}),
    ("/v1/embeddings", {"input": SECRET}),
]


def as_json(record):
    return json.loads(JsonFormatter().format(record))


@pytest.fixture(scope="module")
def server():
    with FakeServer(engine_saying("Never to be logged. ", cached_tokens=2)) as server:
        yield server


@pytest.fixture
def lines(caplog):
    """lines() -> the text of what has been logged by the request log."""
    caplog.set_level(logging.INFO, "shoal")
    return lambda: [
        TextFormatter().format(r) for r in caplog.records if r.name == "shoal.server.http.request_log"
    ]


@pytest.fixture
def fields(caplog, lines):
    """fields() -> the JSON objects of the same."""
    return lambda: [as_json(r) for r in caplog.records if r.name == "shoal.server.http.request_log"]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[f"{path}-{'stream' in body}" for path, body in ASKED])
def test_an_answered_request_is_one_line_with_its_tokens_and_times(server, lines, fields, path, body):
    assert server.request(path, body, headers={"x-request-id": "seven"})[0] == 200
    [line], [found] = lines(), fields()
    num_answers = 4 if body.get("n") else 1
    out = 0 if path.endswith("embeddings") else 5 * num_answers
    assert (found["method"], found["path"], found["status"]) == ("POST", path, 200)
    assert found["request_id"] == "seven"
    assert found["level"] == "info" and found["client"] == "127.0.0.1" and found["model"] == "tiny"
    prompts = [request.prompt_token_ids for request in server.engine.seen[-num_answers:]]
    assert found["prompt_tokens"] * body.get("n", 1) == sum(map(len, prompts))  # a prompt counts once
    assert found["completion_tokens"] == out and found["finish_reason"] == ("length" if out else "stop")
    assert ("ttft_seconds" in found) == ("tokens_per_second" in found) == bool(out)
    assert found["seconds"] >= found.get("ttft_seconds", 0) >= 0
    assert re.fullmatch(
        rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d INFO    127.0.0.1 POST {path} 200 \d+\.\d\d\ds "
        r"model=tiny in=\d+ .*id=seven",
        line,
    )
    assert "treasure" not in line + str(found) and "Never" not in line + str(found)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (
            COMPLETE,
            {"prompt": SECRET, "temperature": -1},
            400,
            "temperature must be a finite number in [0, inf), got -1",
        ),
        (
            COMPLETE,
            {"prompt": SECRET, "model": "no such model"},
            404,
            "the model 'no such model' does not exist",
        ),
        (CHAT, {"messages": [SECRET]}, 400, "message"),
        (CHAT, {"messages": [{"role": "user", "content": {"it's": SECRET * 9}}]}, 400, "content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "x": f'"{SECRET}'}]}]},
            400,
            "part",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "x": SECRET}]}], "max_tokens": 5},
            400,
            "content",
        ),
        ("/api/generate", {"prompt": SECRET, "think": True}, 400, "does not think aloud"),
        ("/nowhere", {"prompt": SECRET}, 404, "there is nothing at"),
        ("/metrics", {"prompt": SECRET}, 405, "not POST"),
    ],
)
def test_a_refusal_is_reported_with_its_reason_and_not_what_was_said(
    server, lines, fields, path, body, status, words
):
    assert server.request(path, body)[0] == status
    [line], [found] = lines(), fields()
    assert (found["status"], found["level"], found["path"]) == (status, "warning", path)
    assert words in found["error"] and f" {path} {status} " in line and words in line
    assert "treasure" not in line and "treasure" not in str(found)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_one_line(lines, fields, stream):
    with FakeServer(engine_saying("word ", token_seconds=0.05)) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 255, "stream": stream}))
        eventually(lambda: server.engine._running)
        connection.close()
        eventually(lambda: not server.app.exchanges)
        connection = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        eventually(lambda: server.app.exchanges)
        connection.close()
        eventually(lambda: not server.app.exchanges)
    assert [found["status"] for found in fields()] == [499, 499] and len(lines()) == 2
    assert fields()[0]["finish_reason"] == "abort"


def test_a_stream_that_fails_midway_is_reported(lines, fields):
    with FakeServer(FakeEngine(300, error_after=3)) as server:
        assert server.request(COMPLETE, {"prompt": "a", "max_tokens": 9, "stream": True})[0] == 200
    [found] = fields()
    assert (found["status"], found["level"], found["finish_reason"]) == (200, "error", "error")
    assert found["error"] == "the fake engine was set to fail"


def test_no_request_can_forge_a_line_or_steer_a_terminal(server, lines, caplog):
    server.request("/%0A2026-11-22 12:00:00 INFO forged%1b[2J%e2%80%a8x".replace(" ", "%20"))
    server.request("/nowhere", headers={"x-request-id": 'a" status=200 b'})
    server.request(COMPLETE, {"prompt": "x", "model": "\n2026-11-22 12:00:00 INFO \x1b[2J\u2028 forged"})
    found = lines()
    assert len(found) == 3
    for line in found:
        assert all(part.startswith("    ") for part in line.split("\n")[1:]) and line.isprintable()
    assert 'id="a\\" status=200 b"' in found[1]
    record = logging.LogRecord("x", logging.WARNING, "", 0, "one\n2026-11-22 two\x1b[2J", None, None)
    assert TextFormatter().format(record).splitlines()[1] == "    2026-11-22 two\\x1b[2J"


def test_invalid_http_is_reported(server, lines):
    connection = server.raw(b"\x16\x03\x01 this is TLS\r\n\r\n")
    assert b"400" in read_until(connection)
    connection.close()
    eventually(lines)
    [line] = lines()
    assert line.endswith('WARNING 127.0.0.1 - - 400 error="the request is not valid HTTP"')


def test_a_flood_of_refusals_is_a_line_a_second(lines, caplog, monkeypatch):
    log = RefusalLog("all")
    for now in (0.0, 0.1, 0.9, 1.5):
        monkeypatch.setattr("shoal.server.http.request_log.time.monotonic", lambda now=now: now)
        log.log("127.0.0.1", ApiError(431, "too much"))
    found = [line.partition("error=")[2] for line in lines()]
    assert found == ['"too much"', '"too much" (and 2 others before)']


def test_what_machines_ask_all_day_is_logged_with_verbose_alone(server, lines, caplog):
    paths = ("/health", "/ping", "/metrics", "/load", "/version")
    for path in paths:
        server.request(path)
    assert not lines()
    caplog.set_level(logging.DEBUG, "shoal")
    for path in paths:
        server.request(path)
    assert [re.search(r"GET (\S+) 200", line)[1] for line in lines()] == list(paths)


def test_errors_alone_or_nothing_are_logged_on_demand(lines):
    for wanted, statuses in (("errors", ["404"]), ("off", [])):
        before = len(lines())
        with FakeServer(log_requests=wanted) as server:
            server.request(COMPLETE, {"prompt": "a", "max_tokens": 3})
            server.request("/nowhere")
            read_until(server.raw(b"no http\r\n\r\n"))
        assert [line.split()[6] for line in lines()[before:] if " - - " not in line] == statuses, wanted
        assert len(lines()) - before == 2 * len(statuses)


@pytest.mark.parametrize("path", ["/fleet", "/requests", "/requests/any", "/load"])
def test_what_machines_ask_for_is_logged_where_the_key_is_wrong(path, lines):
    """Else keys could be guessed there without a trace."""
    with FakeServer(api_key=["sesame"]) as server:
        assert server.request(path, headers={"authorization": "Bearer guess"})[0] == 401
        assert len(lines()) == 1 and f"GET {path} 401" in lines()[0]
        server.request(path, headers={"authorization": "Bearer sesame"})
        assert len(lines()) == 1
        assert server.metric("http_requests_total") == 1


def test_unknown_levels_and_formats_are_refused():
    for name in ("log_requests", "log_format"):
        with pytest.raises(ConfigError, match=f"{name} must be one of .*, got 'loud'"):
            ServerConfig(**{name: "loud"})


def told_of_throughput(caplog):
    return [r for r in caplog.records if r.name == "shoal.server.served.throughput"]


async def sampled(server, between=lambda: None):
    """Samples the server twice, and reports what it does after each; `between` is called between the two."""
    monitor = server.app.context.monitor
    report = asyncio.create_task(report_throughput(server.app.context.models, monitor, 0.001))
    for _ in range(2):
        await monitor.sample()
        await asyncio.sleep(0.05)
        between()
    report.cancel()


def test_throughput_is_logged_while_there_is_work(caplog):
    caplog.set_level(logging.INFO, "shoal")
    with FakeServer(engine_saying("word ", token_seconds=0.05, cached_tokens=1)) as server:
        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 200, "stream": True}))
        read_until(connection, b"data: ")
        asyncio.run_coroutine_threadsafe(sampled(server), server.loop).result()
        connection.close()
    told = told_of_throughput(caplog)
    busy = [as_json(r) for r in told]
    assert busy[-1]["generation_tokens_per_second"] > 0
    assert (busy[-1]["running"], busy[-1]["model"]) == (1, "tiny") and busy[-1]["kv_cache_usage"] > 0
    assert re.fullmatch(
        r"tiny: prompt [\d.]+ tokens/s, generation [\d.]+ tokens/s, running \d, waiting 0, "
        r"KV cache [\d.]+%, prefix cache hits (-|[\d.]+%)",
        told[-1].getMessage(),
    )


def test_nothing_is_logged_of_a_server_without_work(caplog):
    caplog.set_level(logging.INFO, "shoal")
    with FakeServer() as server:
        asyncio.run_coroutine_threadsafe(sampled(server), server.loop).result()
    assert not told_of_throughput(caplog)


def test_a_routers_probes_of_an_idle_worker_are_no_work(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "shoal")
    ticks = itertools.count(0, 10)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), time=time.time)
    monkeypatch.setattr("shoal.server.served.monitoring.time", clock)
    with FakeServer() as server:

        def probed():
            server.model.metrics.prompt_tokens += 1
            server.model.metrics.generation_tokens += 1

        asyncio.run_coroutine_threadsafe(sampled(server, probed), server.loop).result()
        assert server.app.context.monitor.recent("tiny").output_tokens_s > 0
    assert not told_of_throughput(caplog)


def test_a_model_that_comes_later_is_logged_as_a_router_offers_them(caplog):
    caplog.set_level(logging.INFO, "shoal")
    with FakeServer(engine_saying("word ", token_seconds=0.05)) as server:
        models = server.app.context.models

        def offered():
            models.add(server.model)

        connection = server.raw(post(COMPLETE, {"prompt": "a", "max_tokens": 200, "stream": True}))
        read_until(connection, b"data: ")
        server.call(lambda: models.remove(server.model))
        asyncio.run_coroutine_threadsafe(sampled(server, offered), server.loop).result()
        connection.close()
    assert [as_json(r)["running"] for r in told_of_throughput(caplog)]


@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": ["sesame"]}, False),
    ],
)
def test_an_open_port_without_a_key_is_warned_of(options, is_warned, caplog, monkeypatch):
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    serve.warn_of_open_port(ServerConfig(**options), 8000)
    assert [record.args[0] for record in caplog.records] == [8000] * is_warned


def test_an_admin_port_beyond_this_machine_needs_a_key(monkeypatch):
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    check_admin_port(ServerConfig(admin_host="192.0.2.1"))
    check_admin_port(ServerConfig(admin_host="192.0.2.1", admin_port=9000, api_key=["sesame"]))
    with pytest.raises(ConfigError, match=r"admin_host must be .*'192.0.2.1'.* --api-key"):
        check_admin_port(ServerConfig(admin_host="192.0.2.1", admin_port=9000))
