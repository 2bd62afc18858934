"""Random raw HTTP, JSON bodies and clients that leave at every stage: the real server, a fake engine.

Whatever comes, no answer is a 5xx but 503 and 504, every connection ends by itself, nothing is left behind,
and the log is silent.
SHOAL_FUZZ_SEED repeats a run; SHOAL_FUZZ_CASES is the number of cases of the long runs.
"""

import asyncio
import collections
import http.client
import logging
import os
import random
import re
import socket
import struct

import psutil
import pytest

from shoal.server import run
from shoal.server.operator.admin import ADMIN_ROUTES
from shoal.server.routes import PUBLIC_ROUTES
from tests.fake_server import FakeServer, engine_saying, post
from tests.http_shapes import (
    ADMIN_PATHS,
    BODIES,
    LAST,
    SECOND,
    SMUGGLING,
    TARGETS,
    raw_request,
    request_for,
    spoilt_json,
)
from tests.waiting import eventually

SEED = int(os.environ.get("SHOAL_FUZZ_SEED", random.randrange(1 << 30)))
CASES = int(os.environ.get("SHOAL_FUZZ_CASES", 20_000))
long = pytest.mark.parametrize(
    "cases",
    [300, pytest.param(CASES, marks=[pytest.mark.slow, pytest.mark.timeout(0)])],
    ids=["short", "long"],
)
AT_ONCE = 150
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the end is a reset


@pytest.fixture
def server(caplog, monkeypatch):
    """A server that was left as it was found, or the test fails."""
    # A trailer may swallow the wish to close; then it is the keep-alive time that ends the connection.
    monkeypatch.setattr(run, "KEEP_ALIVE_SECONDS", 5)
    print(f"SHOAL_FUZZ_SEED={SEED}")
    caplog.set_level(logging.INFO)
    engine = engine_saying("word ")
    # read_timeout: enough where others use the processor too, and little, as unfinished requests wait so
    # long.
    model = {"tool_call_parser": "hermes", "max_model_len": 4096}
    with FakeServer(
        engine, model=model, read_timeout=1.0, write_timeout=5.0, max_queued_requests=1000
    ) as server:
        assert server.json("/version")[0] == 200
        open_before = psutil.Process().num_fds()
        yield server
        eventually(lambda: not server.engine._running and server.model.admission.active == 0)
        eventually(lambda: not server.app.exchanges and server.app.context.body_bytes == 0)
        eventually(lambda: psutil.Process().num_fds() <= open_before)
        assert server.json("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert server.metric("vllm:num_requests_running") == 0
    records = [record for when in ("setup", "call", "teardown") for record in caplog.get_records(when)]
    wrong = [record for record in records if record.levelno >= logging.ERROR or record.exc_info]
    assert not wrong, [(record.getMessage(), record.exc_info) for record in wrong[:5]]


@long
def test_raw_http_of_any_shape_is_answered_or_refused(cases, server):
    rng = random.Random(SEED)
    statuses = collections.Counter()

    async def one(data):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
            writer.write(data[:cut])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(data[cut:] + LAST)
            answer = await asyncio.wait_for(
                reader.read(), 60
            )  # to the end: a server that never ends it hangs
        except ConnectionError:
            answer = b""  # refused while we wrote
        except TimeoutError:
            raise AssertionError(f"neither answered nor ended: {data!r}") from None
        finally:
            writer.transport.abort()
        found = STATUS.findall(answer)
        statuses.update(found)
        assert not [s for s in found if s >= b"500" and s not in (b"503", b"504")], (data, answer)

    async def all_of_them():
        await asyncio.gather(*(one(request_for(target)) for target in TARGETS))
        for start in range(0, cases, AT_ONCE):
            await asyncio.gather(*(one(raw_request(rng)) for _ in range(min(AT_ONCE, cases - start))))

    asyncio.run(all_of_them())
    print(dict(statuses))
    assert statuses[b"200"] and statuses[b"400"] and statuses[b"404"]


@pytest.mark.parametrize("shape", SMUGGLING)
def test_no_request_is_hidden_in_another(shape, server):
    connection = server.raw(SMUGGLING[shape] + SECOND + LAST)
    connection.settimeout(30)
    answer = b""
    while part := connection.recv(65536):
        answer += part
    connection.close()
    first = STATUS.search(answer)
    assert b"/smuggled" not in answer, answer
    assert first is not None and first[1] == b"400", answer


def test_the_bodies_are_right_before_they_are_spoilt_and_cover_every_route(server):
    paths = {route.path for route in (*PUBLIC_ROUTES, *ADMIN_ROUTES) if route.request is not None}
    assert paths == BODIES.keys()
    for path, body in BODIES.items():
        if path not in ADMIN_PATHS:
            status, _, text = server.request(path, body)
            assert status == 200, (path, text)


@long
def test_spoilt_json_is_answered_or_refused(cases, server):
    rng = random.Random(SEED)
    statuses = collections.Counter()
    ports = {True: server.admin_port, False: server.port}
    connections = {
        is_admin: http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for is_admin, port in ports.items()
    }
    paths = list(BODIES)
    for number in range(2 * cases):
        path = paths[number % len(paths)]
        data = spoilt_json(rng, BODIES[path])
        connection = connections[path in ADMIN_PATHS]
        connection.request("POST", path, data)
        answer = connection.getresponse()
        text = answer.read()
        statuses[answer.status] += 1
        assert answer.status < 500 or answer.status in (503, 504), (path, data, text)
        assert answer.status != 200 or path != "/update_weights" or b"version" in text
    for connection in connections.values():
        connection.close()
    print(dict(statuses))
    assert statuses[200] and statuses[400]


STAGES = (
    "before the head",
    "in the head",
    "before the body",
    "in the body",
    "at once",
    "before the first token",
    "in the stream",
    "in the answer",
    "with one behind",
    "with many behind",
)


@long
def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(cases, server):
    rng = random.Random(SEED)
    server.engine.token_seconds, server.engine.prefill_seconds = 0.01, 0.05
    counts = collections.Counter()

    async def one(stage):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = {
            "prompt": "a",
            "max_tokens": 200,
            "stream": stage != "in the answer",
            "n": rng.choice((1, 1, 4)),
        }
        data = post("/v1/completions", body)
        head = data.index(b"\r\n\r\n") + 4
        sent = {
            "before the head": 0,
            "in the head": rng.randrange(1, head),
            "before the body": head,
            "in the body": rng.randrange(head, len(data)),
        }
        behind = {
            "with one behind": b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n",
            "with many behind": data * rng.randrange(1, 30),
        }
        try:
            writer.write(data[: sent.get(stage, len(data))] + behind.get(stage, b""))
            await writer.drain()
            if stage == "before the first token":
                await asyncio.sleep(rng.random() * 0.05)
            elif stage in ("in the stream", "with one behind", "with many behind"):
                assert await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), 60)
            elif stage == "in the answer":
                await asyncio.sleep(rng.random() * 0.2)
        except ConnectionError:
            pass
        if rng.random() < 0.5 and not writer.transport.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        counts[stage] += 1

    async def all_of_them():
        for start in range(0, cases, AT_ONCE):
            await asyncio.gather(*(one(rng.choice(STAGES)) for _ in range(min(AT_ONCE, cases - start))))

    asyncio.run(all_of_them())
    print(dict(counts))
    assert counts.keys() == set(STAGES)
