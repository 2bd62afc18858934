"""The sockets of KV events: loopback by default, frames that are too long end a connection, and without a key
nothing is sent."""

from __future__ import annotations

import contextlib
import socket
import struct

import psutil
import pytest
import zmq
import zmq.auth

from shoal.config import KVEventsConfig
from shoal.errors import ConfigError
from shoal.kv.events.endpoints import is_ours, leaves_the_host
from shoal.kv.events.publisher import KvEvents
from tests.cpu.kv.test_replay import read, store
from tests.serving import free_port

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


@pytest.fixture
def start():
    made = []

    def events(**options):
        made.append(KvEvents(KVEventsConfig(enable_kv_cache_events=True, **options)))
        return made[-1]

    yield events
    for one in made:
        one.close()


@pytest.fixture
def keys(tmp_path):
    """Certificates of a server, a client that is let in, and one that is not."""
    (tmp_path / "clients").mkdir()
    for name in ("server", "friend", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    (tmp_path / "friend.key").rename(tmp_path / "clients" / "friend.key")
    return tmp_path


def listening():
    """Addresses that this process listens at."""
    return {tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_the_default_is_loopback(start, caplog):
    port = free_port()
    start(endpoint=KVEventsConfig().endpoint.replace("5557", str(port)))
    assert KVEventsConfig().endpoint.endswith(":5557") and ("127.0.0.1", port) in listening()
    assert "sends every prompt" not in caplog.text


def test_every_interface_is_had_with_a_warning(start, caplog):
    port = free_port()
    start(endpoint=f"tcp://*:{port}")
    assert any(address[1] == port and address[0] in ("0.0.0.0", "::") for address in listening())
    assert f"endpoint tcp://*:{port} sends every prompt, answer and cache_salt to any peer" in caplog.text


@pytest.mark.parametrize(
    "endpoint, ours, leaves",
    [
        ("tcp://*:1", True, True),
        ("tcp://lo:1", True, False),
        ("tcp://[::]:1", True, True),
        ("tcp://[::1]:1", True, False),
        ("tcp://127.0.0.1:1", False, False),
        ("tcp://router:1", False, True),
        ("ipc:///tmp/x", True, False),
        ("inproc://x", True, False),
    ],
)
def test_what_is_bound_and_what_leaves_the_host(endpoint, ours, leaves):
    assert (is_ours(endpoint), leaves_the_host(endpoint)) == (ours, leaves)


@pytest.mark.parametrize("which, kind", [("endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_a_frame_that_is_announced_too_long_ends_the_connection(start, which, kind):
    ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
    events = start(**{name: f"tcp://lo:{port}" for name, port in ports.items()})
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    with socket.create_connection(("127.0.0.1", ports[which]), timeout=10) as connection:
        connection.sendall(GREETING + bytes([4, len(ready)]) + ready)
        connection.sendall(b"\x02" + struct.pack(">Q", 2**31) + bytes(100))  # a long frame
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass  # its own greeting
    store(events, 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(f"tcp://127.0.0.1:{ports['replay_endpoint']}")
        client.send_multipart([b"", bytes(8)])
        assert read(client) == [0]


def test_with_keys_only_who_has_one_that_is_let_in_hears_anything(start, keys):
    events_port, replay_port = free_port(), free_port()
    events = start(
        endpoint=f"tcp://*:{events_port}",
        replay_endpoint=f"tcp://*:{replay_port}",
        topic="t",
        curve_secret_key_file=str(keys / "server.key_secret"),
        curve_client_keys_dir=str(keys / "clients"),
    )
    server, _ = zmq.auth.load_certificate(keys / "server.key")
    with zmq.Context() as context:
        clients = {}
        for name in ("friend", "stranger", "nobody", "guesser"):
            sub, ask = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            for one, port in ((sub, events_port), (ask, replay_port)):
                one.linger = 0
                if name != "nobody":
                    public, secret = zmq.curve_keypair()
                    if name != "guesser":
                        public, secret = zmq.auth.load_certificate(keys / f"{name}.key_secret")
                    one.curve_publickey, one.curve_secretkey, one.curve_serverkey = public, secret, server
                one.connect(f"tcp://127.0.0.1:{port}")
            sub.subscribe(b"")
            ask.send_multipart([b"", bytes(8)])  # goes out as soon as there is a connection
            clients[name] = sub, ask
        friend, ask = clients["friend"]
        number = 0
        while not friend.poll(20):
            store(events, number)
            number += 1
        assert friend.recv_multipart()[0] == b"t"
        read(ask)  # what there was when it had connected
        ask.send_multipart([b"", bytes(8)])
        assert read(ask)[:1] == [0]
        for name in ("stranger", "nobody", "guesser"):
            sub, ask = clients[name]
            assert not sub.poll(100) and not ask.poll(100), name
        for pair in clients.values():
            for one in pair:
                one.close()


def test_keys_that_cannot_be_had_are_config_errors(start, keys):
    good = dict(
        curve_secret_key_file=str(keys / "server.key_secret"), curve_client_keys_dir=str(keys / "clients")
    )
    (keys / "empty").mkdir()
    (keys / "odd").mkdir()
    (keys / "odd" / "x.key").write_text("no key")
    for change, words in (
        (dict(curve_secret_key_file="/nowhere"), "curve_secret_key_file '/nowhere' cannot be read"),
        (dict(curve_secret_key_file=str(keys / "server.key")), "holds a public key only"),
        (dict(curve_client_keys_dir="/nowhere"), "curve_client_keys_dir '/nowhere' cannot be read"),
        (dict(curve_client_keys_dir=str(keys / "empty")), "got a folder without any"),
        (dict(curve_client_keys_dir=str(keys / "odd")), "curve_client_keys_dir .* cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            start(endpoint=f"tcp://lo:{free_port()}", **good | change)


def test_a_libzmq_without_curve_says_so(start, keys, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    with pytest.raises(ConfigError, match="needs a libzmq with CURVE"):
        start(
            endpoint=f"tcp://lo:{free_port()}",
            curve_secret_key_file=str(keys / "server.key_secret"),
            curve_client_keys_dir=str(keys / "clients"),
        )
