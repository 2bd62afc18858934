"""Connections that do what no ordinary client does: nobody else may notice, and memory stays bounded."""

import contextlib
import errno
import logging
import random
import re
import resource
import select
import socket
import ssl
import stat
import struct
import threading
import time
from asyncio.selector_events import _SelectorSocketTransport

import psutil
import pytest

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.server import run
from shoal.server.http.connection import MAX_HEADER_BYTES, Connection
from shoal.server.run import max_connections, open_ports
from tests.certificates import write_certificate
from tests.fake_server import FakeServer, engine_saying, post, read_until
from tests.waiting import eventually

COMPLETE = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 255}
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"prompt":"a","max_tokens":2}'


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


@pytest.fixture
def slow():
    with FakeServer(engine_saying("word ", token_seconds=1.0)) as server:
        yield server


def idle(server):
    return not server.engine._running and server.model.admission.active == 0


def send_until_cut(connection, piece, limit):
    """Sends `piece` again and again until the server has had enough; returns how many bytes it took."""
    sent = 0
    connection.settimeout(3)
    try:
        while sent < limit:
            sent += connection.send(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("second", [GET, post(COMPLETE, LONG), GET * 100])
def test_a_client_that_leaves_takes_what_it_asked_ahead_with_it(stream, second, slow, caplog):
    connection = slow.raw(post(COMPLETE, {**LONG, "stream": stream}) + second)
    eventually(lambda: len(slow.engine._running) == 1)
    connection.close()
    eventually(lambda: idle(slow))
    assert len(slow.engine.seen) == 1, "a request was begun for a client that had left"
    assert "socket.send() raised exception" not in caplog.text


def test_requests_that_come_ahead_of_their_turn_are_answered_in_order(server):
    count = 4000
    connection = server.raw(b"")
    threading.Thread(
        target=connection.sendall, args=(GET * (count - 1) + GET.replace(b"Host: x", b"Connection: close"),)
    ).start()
    answers = read_until(connection)
    assert answers.count(b"HTTP/1.1 200 OK") == count and b"HTTP/1.1 4" not in answers


def read_and_forget(connection):
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


@pytest.mark.parametrize("reads", [pytest.param(True, marks=pytest.mark.slow), False])
def test_requests_that_come_ahead_of_their_turn_take_no_memory_without_end(reads, server):
    small = b"GET /ping HTTP/1.1\r\n\r\n"
    with server.raw(b"") as connection:
        if reads:
            threading.Thread(target=read_and_forget, args=(connection,), daemon=True).start()
        before = psutil.Process().memory_info().rss
        send_until_cut(connection, small * 20_000, 20 << 20)
        assert psutil.Process().memory_info().rss - before < 32 << 20
        connection.shutdown(socket.SHUT_RDWR)
    assert server.json("/version")[0] == 200


def test_what_comes_in_parts_behind_requests_that_wait_is_answered_too(server):
    big = post(COMPLETE, {"prompt": [1] * 60_000, "max_tokens": 1})
    good = post(COMPLETE, {"prompt": "a", "max_tokens": 1})
    data = GET * 2000 + good + big + GET * 1500 + good + GET.replace(b"Host: x", b"Connection: close")
    rng = random.Random(1)
    connection = server.raw(b"")

    def send():
        at = 0
        while at < len(data):
            count = rng.choice((1, 100, 5000, 200_000))
            connection.sendall(data[at : at + count])
            at += count

    threading.Thread(target=send, daemon=True).start()
    found = re.findall(rb"HTTP/1\.1 (\d{3}) ", read_until(connection))
    assert found == [b"200"] * 2001 + [b"400"] + [b"200"] * 1502


def test_thousands_of_offers_of_another_protocol_are_declined(server):
    offer = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
    connection = server.raw(b"")
    last = GET.replace(b"Host: x", b"Connection: close")
    threading.Thread(target=connection.sendall, args=(offer * 3000 + last,)).start()
    assert read_until(connection).count(b"HTTP/1.1 200 OK") == 3001


@pytest.mark.parametrize(
    ("line", "times"),
    [
        (b"X-A: " + b"b" * 1000 + b"\r\n", 70),
        (b"A: b\r\n", 12_000),
        (b"X-A: " + b"b" * (70 << 10) + b"\r\n", 1),
    ],
)
def test_a_head_beyond_the_limit_is_refused_however_it_comes(line, times, server):
    head = b"GET /version HTTP/1.1\r\nHost: x\r\n" + line * times + b"\r\n"
    assert len(head) > MAX_HEADER_BYTES
    assert b" 431 " in read_until(server.raw(head))
    connection = server.raw(head[:1000])
    connection.sendall(head[1000:])
    assert b" 431 " in read_until(connection)


@pytest.mark.parametrize("start", [b"GET /version HTTP/1.1\r\nX: ", b"no HTTP\r\n\r\n"], ids=["431", "400"])
def test_a_client_that_goes_on_sending_reads_why_it_was_refused(start, server):
    """Regression: the connection was closed at once, data that came then reset it, and the answer was lost."""
    connection = server.raw(start + b"b" * (70 << 10) + b"\r\n\r\n")
    assert select.select([connection], [], [], 30)[0], "no answer"
    for _ in range(3):
        connection.sendall(b"b" * (100 << 10))
        time.sleep(0.05)
    assert read_until(connection).startswith(b"HTTP/1.1 4")


def test_a_client_that_resets_while_it_is_refused_ends_without_an_error(server, monkeypatch, caplog):
    def reset(transport):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(_SelectorSocketTransport, "write_eof", reset)
    assert read_until(server.raw(b"no HTTP\r\n\r\n"), b"400")
    assert server.json("/version")[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_head_below_the_limit_is_taken(server):
    head = (
        b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        + b"X-A: "
        + b"b" * (60 << 10)
        + b"\r\n\r\n"
    )
    assert b" 200 OK" in read_until(server.raw(head))


@pytest.mark.parametrize("piece", [b"X: y\r\n" * 20_000, b"y" * 120_000], ids=["many", "one"])
def test_trailers_have_the_heads_limit(piece, server):
    connection = server.raw(CHUNKED + b"%x\r\n%b\r\n0\r\nX: " % (len(BODY), BODY))
    before = psutil.Process().memory_info().rss
    assert send_until_cut(connection, piece, 64 << 20) < 16 << 20
    assert psutil.Process().memory_info().rss - before < 32 << 20
    assert server.json("/version")[0] == 200 and not server.engine.seen


@pytest.mark.parametrize("piece", [b"x" * 100_000, b"1;" + b"x" * 1000 + b"\r\n \r\n"], ids=["one", "many"])
def test_extensions_of_chunks_have_a_limit(piece, server):
    connection = server.raw(CHUNKED + (b"1;" if b"\n" not in piece else b""))
    assert send_until_cut(connection, piece, 64 << 20) < 16 << 20
    assert server.json("/version")[0] == 200


def test_trailers_and_small_chunks_within_the_limits_are_taken(server):
    chunks = b"".join(b"1;name=value\r\n%c\r\n" % byte for byte in BODY.ljust(3000))
    connection = server.raw(CHUNKED + chunks + b"0\r\nX-Checksum: 1\r\n\r\n")
    assert b" 200 OK" in read_until(connection, b'"usage"')


@pytest.mark.parametrize("late", [b'8\r\n{"prompt\r\n0\r\n\r\n', b'8\r\n{"pro', b"\r\n"])
def test_what_comes_behind_an_answer_does_not_keep_the_connection_for_ever(late, monkeypatch):
    monkeypatch.setattr(run, "KEEP_ALIVE_SECONDS", 1)
    start = CHUNKED.replace(COMPLETE.encode(), b"/nowhere") if late != b"\r\n" else GET
    with FakeServer() as server:
        connection = server.raw(start)
        connection.settimeout(30)
        assert b"HTTP/1.1" in connection.recv(65536)
        connection.sendall(late)
        while connection.recv(65536):
            pass
        connection.close()


def test_beyond_the_cap_the_longest_idle_connection_makes_room():
    with FakeServer(engine_saying("word ", token_seconds=0.02), max_connections=20) as server:
        stream = server.raw(post(COMPLETE, {**LONG, "max_tokens": 100, "stream": True}))
        read_until(stream, b"data:")
        held = [server.raw(b"") for _ in range(100)]
        assert server.json("/version")[0] == 200
        assert server.raw(GET) and b"[DONE]" in read_until(stream, b"[DONE]"), (
            "the busy connection was closed"
        )
        num_open = sum(not closed(one) for one in held)
        assert num_open < 20
        for one in held:
            one.close()


def closed(connection):
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_beyond_the_cap_of_busy_connections_a_new_one_is_asked_to_come_back(caplog):
    with FakeServer(engine_saying("word ", token_seconds=1.0), max_connections=4) as server:
        held = [server.raw(post(COMPLETE, {**LONG, "stream": True})) for _ in range(4)]
        eventually(lambda: len(server.engine._running) == 4)
        answer = read_until(server.raw(b""))
        assert b" 503 " in answer and b"retry-after: 1" in answer and b"--max-connections" in answer
        for one in held:
            one.close()
        eventually(lambda: idle(server))
        assert server.json("/version")[0] == 200


def test_where_files_run_out_the_log_says_so_once_and_the_server_lives_on(caplog):
    with FakeServer() as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = []
        try:
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (len(psutil.Process().open_files()) + psutil.Process().num_fds() + 40, hard),
            )
            with pytest.raises(OSError):
                for _ in range(100):
                    held.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            eventually(lambda: "cannot be accepted" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in held:
                one.close()
        assert caplog.text.count("cannot be accepted") == 1
        eventually(lambda: server.json("/version")[0] == 200)


def test_more_connections_than_files_are_a_mistake():
    with pytest.raises(ConfigError, match=r"max_connections 100000000 .* open files .*ulimit -n"):
        max_connections(ServerConfig(max_connections=100_000_000))


def over_file(path, data):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(path))
        connection.sendall(data)
        return read_until(connection)


def test_a_unix_socket_serves_its_owner_alone_and_is_removed_at_the_end(tmp_path):
    path = tmp_path / "shoal.sock"
    last = GET.replace(b"Host: x", b"Connection: close")
    with FakeServer(uds=str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b" 200 OK" in over_file(path, last)
        assert b'"usage"' in over_file(
            path, post(COMPLETE, {**LONG, "max_tokens": 2}, more_headers="Connection: close\r\n")
        )
        with pytest.raises(ConfigError, match="another server listens there"):
            open_ports(ServerConfig(uds=str(path)))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        server.say("word ", token_seconds=1.0)
        connection.sendall(post(COMPLETE, {**LONG, "stream": True}) + GET)
        eventually(lambda: len(server.engine._running) == 1)
        connection.close()
        eventually(lambda: idle(server))
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_no_other_file(tmp_path):
    path = tmp_path / "shoal.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with FakeServer(uds=str(path)):
        assert b" 200 OK" in over_file(path, GET.replace(b"Host: x", b"Connection: close"))
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"uds .* is not a socket; choose another path"):
        open_ports(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"
    for bad in (str(tmp_path / ("x" * 200)), str(tmp_path / "none" / "sock"), "a\0b"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            open_ports(ServerConfig(uds=bad))


@pytest.mark.parametrize(
    "target",
    [b"version", b"http://other.example", b"http://other.example:443", b"?a=b", b"http://[::1/version"],
)
def test_a_target_without_a_path_is_a_mistake_of_the_client(target, server, caplog):
    assert b" 400 " in read_until(server.raw(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target))
    assert "Traceback" not in caplog.text and not server.app.exchanges


def test_an_offer_of_another_protocol_with_a_wrong_coding_is_a_mistake_of_the_client(server, caplog):
    head = b"POST /ping HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked, gzip\r\n\r\n"
    answer = read_until(server.raw(head + b"0\r\n\r\n"))
    assert b" 400 " in answer and b"Traceback" not in answer
    assert "Traceback" not in caplog.text
    eventually(lambda: not server.app.exchanges)


@pytest.mark.parametrize("name, expected", [(b"\xff", 400), (b"\\ud800", 200), (b"\\udc00\\ud800", 200)])
def test_a_field_whose_name_is_not_text_is_a_mistake_of_the_client(name, expected, server):
    """But half a character is replaced, and an unknown field is ignored by any name."""
    status, _, text = server.request(COMPLETE, b'{"prompt":"a","max_tokens":2,"x%b":1}' % name)
    assert status == expected and "internal" not in text


def test_what_is_written_is_sent_at_once(server, monkeypatch):
    """With Nagle's algorithm the second part of an answer waits for the client's acknowledgement of the
    first, up to 40 ms."""
    found = []
    made = Connection.connection_made

    def look(self, transport):
        found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", look)
    server.json("/version")
    assert found == [1]


@pytest.mark.parametrize("method, stream", [("POST", True), ("POST", False), ("HEAD", False)])
def test_a_head_goes_out_with_its_body_and_a_streams_end_with_its_last_token(
    method, stream, server, monkeypatch
):
    """Each call of the system takes as long as passing on a token."""
    sent = []
    send = _SelectorSocketTransport.write
    monkeypatch.setattr(
        _SelectorSocketTransport, "write", lambda self, data: (sent.append(bytes(data)), send(self, data))
    )
    if method == "HEAD":
        asked = b"HEAD /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    else:
        asked = post(COMPLETE, {"prompt": "a", "max_tokens": 3, "stream": stream}).replace(
            b"\r\n\r\n", b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n", 1
        )
    read_until(server.raw(asked))
    answer = [piece for piece in sent if not piece.startswith(b"HTTP/1.1 100")]
    assert answer[0].startswith(b"HTTP/1.1 200 OK\r\n") and sum(b"HTTP/1.1" in piece for piece in answer) == 1
    assert (b'"text":' in answer[0]) == (method == "POST")
    if stream:
        assert b'"finish_reason":"length"' in answer[-1] and answer[-1].endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert len(answer) <= 3  # tokens


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    key, path = write_certificate(tmp_path_factory.mktemp("tls"))
    return {"ssl_keyfile": key, "ssl_certfile": path}


def client_hello():
    """The first message of a TLS handshake."""
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def secure_version(server):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw,
        context.wrap_socket(raw) as connection,
    ):
        connection.sendall(GET.replace(b"Host: x", b"Connection: close"))
        return read_until(connection)


def test_handshakes_that_are_none_or_break_off_leave_nothing_behind(certificate, caplog):
    hello = client_hello()
    rng = random.Random(7)
    firsts = [
        GET,
        b"\x00" * 500,
        rng.randbytes(2000),
        b"\x16\x03\x01\xff\xff" + b"a" * 100,
        hello[:20],
        hello[:-1],
        hello,
        hello[:50] + rng.randbytes(len(hello) - 50),
        b"\x16\x03\x01\x00\x00",
        b"\x80\x2e\x01\x03\x01",
        b"",
    ]
    with FakeServer(**certificate) as server:
        assert b" 200 OK" in secure_version(server)
        before = psutil.Process().num_fds()
        for _ in range(10):
            held = [server.raw(first) for first in firsts]
            for one, ends_by_reset in zip(held, [True, False] * len(held)):
                if ends_by_reset:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
        assert b" 200 OK" in secure_version(server)
        eventually(lambda: psutil.Process().num_fds() <= before)
    assert "Traceback" not in caplog.text


@pytest.mark.slow
def test_a_handshake_that_never_ends_is_ended_by_the_server(certificate):
    with FakeServer(**certificate) as server:
        held = [server.raw(client_hello()[:20]) for _ in range(50)]
        assert b" 200 OK" in secure_version(server)
        start = time.monotonic()
        for one in held:
            one.settimeout(100)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
        assert 10 < time.monotonic() - start < 100


@pytest.mark.parametrize(
    "head",
    [
        b"GET http:// HTTP/1.1",
        b"GET http://host HTTP/1.1",
        b"CONNECT a:80 HTTP/1.1",
        b"GET http://[::1/ HTTP/1.1",
        b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip",
    ],
)
def test_a_head_that_means_nothing_is_a_mistake_of_the_client_and_no_trace_in_the_log(head, server, caplog):
    answer = read_until(server.raw(head + b"\r\nHost: x\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"message"' in answer
    assert "Traceback" not in caplog.text
    assert server.json("/version")[0] == 200


@pytest.mark.parametrize("last", [b"\x00 no HTTP\r\n\r\n", b""])
def test_a_client_that_does_not_read_holds_no_connection_that_is_being_closed(last):
    with FakeServer(write_timeout=0.5) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(20)
        request = post("/tokenize", {"prompt": "a" * 3_000_000})  # answered by more than sockets hold
        connection.sendall(request if last else request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        connection.recv(1, socket.MSG_PEEK)
        connection.sendall(last)
        eventually(
            lambda: (
                not any(
                    one.laddr.port == server.port and one.raddr
                    for one in psutil.Process().net_connections()
                    if one.laddr
                )
            )
        )
        connection.close()


def test_a_client_that_leaves_before_it_gets_its_error_leaves_no_trace_in_the_log(caplog):
    with FakeServer() as server:
        # What is asked second is a mistake, and its answer waits until the first one is read.
        connection = server.raw(
            post("/tokenize", {"prompt": "a" * 3_000_000}) + post(COMPLETE, {"prompt": []})
        )
        connection.recv(1, socket.MSG_PEEK)
        eventually(lambda: any(one.error is not None for one in server.app.exchanges))
        connection.close()
        eventually(lambda: not server.app.exchanges)
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize(
    "more", [b"", b"Connection: keep-alive\r\nExpect: 100-continue\r\n"], ids=["plain", "more"]
)
def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(more, server):
    """Regression: the sizes of chunks lay in the body, which an HTTP/1.0 client takes as it is."""
    body = b'{"prompt":"a","max_tokens":2,"stream":true}'
    head = b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (more, len(body))
    answer_head, _, answer = read_until(server.raw(head + body)).partition(b"\r\n\r\n")
    assert b" 200 OK" in answer_head and b"transfer-encoding" not in answer_head.lower()
    assert b"connection: close" in answer_head.lower()
    events = answer.split(b"\n\n")
    assert events.pop() == b"" and events[-1] == b"data: [DONE]"
    assert all(event.startswith(b"data: ") for event in events)


def test_a_whole_answer_for_http_1_0_keeps_its_length(server):
    answer = read_until(server.raw(b"GET /version HTTP/1.0\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower() and body.startswith(b"{")


def test_clients_must_show_a_certificate_where_the_server_asks_for_one(certificate):
    path = certificate["ssl_certfile"]
    with FakeServer(**certificate, ssl_ca_certs=path, ssl_cert_reqs=2, ssl_ciphers="HIGH") as server:
        context = ssl.create_default_context(cafile=path)
        context.check_hostname = False

        def asked():
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw,
                context.wrap_socket(raw) as connection,
            ):
                connection.sendall(GET.replace(b"Host: x", b"Connection: close"))
                return read_until(connection)

        answer = b""
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # or the end of the connection
            answer = asked()
        assert answer == b""
        context.load_cert_chain(path, certificate["ssl_keyfile"])
        assert b" 200 " in asked()


@pytest.mark.parametrize(
    "options", [{"ssl_ciphers": "NONE-SUCH"}, {"ssl_ca_certs": "/nonexistent", "ssl_cert_reqs": 1}]
)
def test_tls_that_cannot_work_is_reported_before_the_model_is_loaded(options, certificate):
    with pytest.raises(ConfigError, match=r"ssl_ca_certs .* or ssl_ciphers .* cannot be used"):
        run.check_tls(ServerConfig(**certificate, **options))
    for alone in (options, {**certificate, "ssl_cert_reqs": 1}):
        with pytest.raises(ConfigError, match="ssl_"):
            ServerConfig(**alone)
