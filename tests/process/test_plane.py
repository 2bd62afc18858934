"""The contract of the plane: every implementation passes it, with real processes, sockets and a real nats-server."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec
import nats.errors
import nats.js.errors
import pytest

from shoal.errors import ConfigError, ShoalError
from shoal.fleet.registry.open import open_plane
from shoal.fleet.registry.registry import Member
from shoal.fleet.registry.streams import WINDOW, PeerGone
from tests import nats_server
from tests.asynchronous import within
from tests.process.plane_messages import Note
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
LEASE_S = 2.5
PATIENCE_S = 90
asynchronous = within(PATIENCE_S)


class Site:
    """A plane at an address, whose process can be killed and started, and processes that join it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.processes = kind, folder, []
        self.url = {
            "tcp": f"tcp://127.0.0.1:{free_port()}",
            "ipc": f"ipc://{folder}/plane",
            "nats": f"nats://127.0.0.1:{free_port()}",
        }[kind]
        self.start()

    def start(self) -> None:
        if self.kind == "nats":
            port = self.url.rpartition(":")[2]
            options = ["-a", "127.0.0.1", "-p", port, "-js", "-sd", str(self.folder)]
            self.server = subprocess.Popen([nats_server.find(), *options], stderr=subprocess.DEVNULL)
            self.processes.append(self.server)
        else:
            self.server = self.join("host")

    def kill(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.wait()

    def join(self, what: str, name: str = "") -> subprocess.Popen:
        """A process that does that, which it has done when this returns."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.toy_member", self.url, str(LEASE_S), what, name],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    @asynccontextmanager
    async def planes(self, number: int = 2):
        planes = [open_plane(self.url, lease_s=LEASE_S) for _ in range(number)]
        try:
            yield planes
        finally:
            await asyncio.gather(*(plane.close() for plane in planes))


@pytest.fixture(params=["tcp", pytest.param("ipc", marks=pytest.mark.slow), "nats"])
def site(request, tmp_path):
    site = Site(request.param, tmp_path)
    yield site
    for process in site.processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def member(member_id: str, **fields) -> Member:
    return Member(**{"id": member_id, "role": "both", "address": "http://127.0.0.1:9001"} | fields)


async def until(plane, *ids: str) -> None:
    """Waits until exactly these live, as this plane sees it."""
    async for members in plane.watch():
        if set(members) == set(ids):
            return


async def in_thread(function, *args):
    return await asyncio.to_thread(function, *args)


# Members


@asynchronous
async def test_members_are_seen_by_all_with_what_they_say_and_gone_when_they_leave(site):
    async with site.planes(3) as (a, b, c):
        said = member("w.1", model="m", role="prefill", details={"slots": 4})
        await a.register(said)
        for plane in (a, b, c):
            await until(plane, "w.1")
            assert plane.members["w.1"] == said
        await a.register(member("w.1", details={"draining": True}))
        while not b.members["w.1"].details.get("draining"):
            await asyncio.sleep(0.01)
        await a.unregister("w.1")
        for plane in (a, b, c):
            await until(plane)
        await b.register(said)
        await until(c, "w.1")
        await b.close()
        await until(c)


@asynchronous
async def test_two_watchers_and_one_that_comes_late_see_the_same(site):
    async with site.planes(3) as (a, b, c):
        await asyncio.gather(*(plane.register(member(f"w{i}")) for i, plane in enumerate((a, b, c))))
        for plane in (a, b, c):
            await until(plane, "w0", "w1", "w2")
        async with site.planes(1) as (late,):
            await until(late, "w0", "w1", "w2")
            assert late.members == a.members == b.members


@asynchronous
async def test_a_killed_process_is_gone_from_everyones_view(site):
    async with site.planes(2) as (a, b):
        await a.register(member("stays"))
        process = await in_thread(site.join, "register", "dies")
        for plane in (a, b):
            await until(plane, "stays", "dies")
        process.kill()
        for plane in (a, b):
            await until(plane, "stays")


@asynchronous
async def test_an_id_that_a_living_process_has_is_refused_and_that_of_a_dead_one_is_free(site):
    async with site.planes(1) as (plane,):
        process = await in_thread(site.join, "register", "w")
        with pytest.raises(ConfigError, match="'w' is there already"):
            await plane.register(member("w"))
        process.kill()
        await plane.register(member("w"))
        await until(plane, "w")


@asynchronous
async def test_a_lease_is_renewed_under_load(site):
    """For three leases the plane carries as many messages as it takes, and nobody is lost meanwhile."""
    async with site.planes(2) as (a, b):
        await a.register(member("busy"))
        await until(b, "busy")
        views = []

        async def watch():
            async for members in b.watch():
                views.append(set(members))

        async def publish():
            while True:
                await a.publish("load", Note(1, "x" * 1000))

        async def read(subscription):
            async for _ in subscription:
                pass

        load = [publish(), publish(), read(await b.subscribe("load", Note)), watch()]
        tasks = [asyncio.create_task(task) for task in load]
        await asyncio.sleep(3 * LEASE_S)
        for task in tasks:
            task.cancel()
        assert views == [{"busy"}]


# Messages


@asynchronous
async def test_ten_thousand_messages_come_in_order_of_each_publisher(site):
    async with site.planes(3) as (a, b, c):
        subscription = await c.subscribe("events", Note, max_buffered=20_000)
        other = await c.subscribe("other", Note)

        async def publish(plane, name):
            for n in range(10_000):
                await plane.publish("events", Note(n, name))

        publishing = asyncio.gather(publish(a, "a"), publish(b, "b"))
        got = {"a": [], "b": []}
        async for note in subscription:
            got[note.text].append(note.n)
            if sum(map(len, got.values())) == 20_000:
                break
        await publishing
        assert got == {"a": list(range(10_000)), "b": list(range(10_000))}
        other.close()
        assert [note async for note in other] == []


@asynchronous
async def test_a_slow_subscriber_loses_the_oldest_and_holds_up_nobody(site):
    async with site.planes(2) as (a, b):
        slow = await b.subscribe("events", Note, max_buffered=10)
        quick = await b.subscribe("events", Note)
        for n in range(100):
            await a.publish("events", Note(n))
        assert [(await anext(quick)).n for _ in range(100)] == list(range(100))
        assert [(await anext(slow)).n for _ in range(10)] == list(range(90, 100))
        assert slow.num_lost == 90 and quick.num_lost == 0


@asynchronous
async def test_what_cannot_be_read_is_counted_logged_once_and_skipped(site, caplog):
    async with site.planes(2) as (a, b):
        subscription = await b.subscribe("events", Note)
        for garbage in (b"", b"\xc1\xff", msgspec.msgpack.encode({"n": "no number"})):
            await a.send("events", garbage)
        await a.publish("events", Note(1))
        assert (await anext(subscription)).n == 1
        assert b.reader.num_unreadable == {"subject events": 3}
        assert sum("subject events" in record.message for record in caplog.records) == 1


@asynchronous
async def test_a_message_larger_than_the_plane_takes_is_refused_with_the_limit(site):
    async with site.planes(1) as (plane,):
        await plane.register(member("w"))
        with pytest.raises(ConfigError, match=r"message of 6710\d+ bytes is too large for the plane \(limit"):
            await plane.publish("events", Note(0, "x" * (64 * 2**20 + 1000)))


@pytest.mark.parametrize("name", ["", "a b", "a.*", ">", "a..b", "ä"])
@asynchronous
async def test_names_that_mean_something_to_nats_are_refused(name, tmp_path):
    plane = open_plane(f"ipc://{tmp_path}/plane")
    with pytest.raises(ConfigError, match="no name on the plane"):
        await plane.publish(name, Note(0))
    await plane.close()


# A plane that restarts


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_each_outage_of_nats_is_told(site, caplog):
    caplog.set_level(logging.INFO)
    async with site.planes(1) as (plane,):
        for _ in range(2):
            await plane.register(member("a"))
            caplog.clear()
            site.kill()
            while "the NATS server cannot be used; trying on" not in caplog.text:
                await asyncio.sleep(0.01)
            site.start()
            while "the NATS server is there again" not in caplog.text:
                await asyncio.sleep(0.01)


@asynchronous
async def test_members_and_subscriptions_come_back_with_a_plane_that_restarts(site):
    async with site.planes(2) as (a, b):
        await a.register(member("w"))
        await until(b, "w")
        subscription = await b.subscribe("events", Note)
        views = []

        async def watch():
            async for members in b.watch():
                views.append(set(members))

        watching = asyncio.create_task(watch())
        for _ in range(2):
            site.kill()
            await asyncio.sleep(1.5 * LEASE_S)
            await in_thread(site.start)
            reading = asyncio.create_task(anext(subscription))
            while not reading.done():
                await a.publish("events", Note(5))
                await asyncio.sleep(0.05)
            async with site.planes(1) as (late,):
                await until(late, "w")
        assert views == [{"w"}], "a plane that was away is no death of its members"
        watching.cancel()
        await a.unregister("w")
        await until(b)


# Streams


async def count_up(request: Note):
    for n in range(request.n):
        yield Note(n)


@asynchronous
async def test_a_request_is_answered_by_a_stream_that_ends_once(site):
    async with site.planes(2) as (a, b):
        await b.serve("count", Note, count_up)
        streams = [await a.request("count", Note(n), Note) for n in (0, 1, 500)]
        for stream, number in zip(streams, (0, 1, 500)):
            assert [note.n async for note in stream] == list(range(number))
            assert [note async for note in stream] == []


@asynchronous
async def test_an_error_of_the_server_ends_the_stream_with_it(site):
    async def fail(request: Note):
        yield Note(1)
        raise ConfigError("not this one") if request.n else ZeroDivisionError("oops")

    async with site.planes(2) as (a, b):
        await b.serve("fail", Note, fail)
        for n, error in ((1, ConfigError), (0, ShoalError)):
            stream = await a.request("fail", Note(n), Note)
            assert (await anext(stream)).n == 1
            with pytest.raises(error, match=r"not this one|oops"):
                await anext(stream)
            assert [note async for note in stream] == []


@asynchronous
async def test_a_stream_that_its_reader_closes_is_cancelled_at_the_server(site):
    ended = asyncio.Event()

    async def endless(request: Note):
        try:
            while True:
                yield Note(0)
        finally:
            ended.set()

    async with site.planes(2) as (a, b):
        await b.serve("endless", Note, endless)
        stream = await a.request("endless", Note(0), Note)
        await anext(stream)
        stream.close()
        await ended.wait()
        assert [note async for note in stream] == []


@asynchronous
async def test_a_server_is_no_more_than_a_window_ahead_of_its_reader(site):
    sent = 0

    async def endless(request: Note):
        nonlocal sent
        while True:
            sent += 1
            yield Note(sent)

    async with site.planes(2) as (a, b):
        await b.serve("endless", Note, endless)
        stream = await a.request("endless", Note(0), Note)
        read = 0
        for _ in range(3):
            await asyncio.sleep(0.3)
            assert 0 < sent <= read + WINDOW + 1
            for _ in range(100):
                read = (await anext(stream)).n
        stream.close()


@asynchronous
async def test_a_stream_of_a_killed_server_ends_with_peer_gone(site):
    process = site.join("serve", "toy")
    async with site.planes(1) as (plane,):
        stream = await plane.request("toy", Note(3), Note)
        assert [(await anext(stream)).n for _ in range(3)] == [0, 1, 2]
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(2 * LEASE_S)
        assert not waiting.done(), "a server that has nothing to say yet is no dead one"
        process.kill()
        with pytest.raises(PeerGone):
            await waiting
        nobody = await plane.request("nobody", Note(3), Note)
        with pytest.raises(PeerGone, match="no sign of life"):
            await anext(nobody)


@asynchronous
async def test_a_handler_is_closed_when_its_caller_is_gone(site):
    ended = asyncio.Event()

    async def wait(request: Note):
        try:
            yield Note(0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with site.planes(1) as (server,):
        await server.serve("wait", Note, wait)
        async with site.planes(1) as (caller,):
            await anext(await caller.request("wait", Note(0), Note))
        await ended.wait()


# NATS alone


async def kept_by_server(plane) -> list[str]:
    """The keys of members, whatever their leases."""
    try:
        return await plane._bucket.keys(["member."])
    except nats.js.errors.NoKeysError:
        return []


class Proxy:
    """Between a plane and a nats-server: it keeps what the plane sends, counts the connections, and lets nothing
    of the server's pass while it is not `open`."""

    def __init__(self, port: str) -> None:
        self.port, self.sent, self.number = int(port), b"", 0
        self.open = asyncio.Event()
        self.open.set()

    async def connect(self, reader, writer):
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:  # the server starts yet
            writer.close()
            return
        self.number += 1
        both = asyncio.gather(self.pass_on(reader, ours), self.give_back(theirs, writer))
        with suppress(asyncio.CancelledError, OSError):  # the test is over
            await both

    async def pass_on(self, reader, writer):
        while data := await reader.read(1 << 16):
            self.sent += data
            writer.write(data)
        writer.close()

    async def give_back(self, reader, writer):
        while data := await reader.read(1 << 16):
            await self.open.wait()
            writer.write(data)
        writer.close()

    @asynccontextmanager
    async def plane(self, lease_s):
        server = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        plane = open_plane(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", lease_s=lease_s)
        try:
            yield plane
        finally:
            self.open.set()
            await plane.close()
            server.close()


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_a_subscription_is_with_the_nats_server_when_it_is_promised(site):
    """A pong tells that the server has what was sent before its ping."""
    proxy = Proxy(site.url.rpartition(":")[2])
    async with proxy.plane(lease_s=30) as plane:
        for number in range(10):
            await plane.subscribe(f"events{number}", Note)
            subscribed = proxy.sent.index(b"SUB shoal.subject.events%d " % number)
            assert b"PING" in proxy.sent[subscribed:]


@pytest.mark.slow
@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_many_processes_that_join_at_once_see_each_other(site):
    """A watcher of a bucket missed keys that were there before it, in one of 50 to 500 joins of this kind."""
    names = [f"w{number}" for number in range(16)]
    async with site.planes(1) as (writer,):

        async def write():
            for number in count():
                await writer.register(member("writer", details={"number": number}))
                await asyncio.sleep(0.005)

        writing = asyncio.create_task(write())
        for _ in range(40):
            async with site.planes(len(names)) as planes:
                await asyncio.gather(*(plane.register(member(name)) for plane, name in zip(planes, names)))
                await asyncio.gather(*(until(plane, "writer", *names) for plane in planes))
        writing.cancel()


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_a_late_answer_of_nats_leaves_the_connection_whole(site):
    proxy = Proxy(site.url.rpartition(":")[2])
    async with proxy.plane(lease_s=30) as plane:
        subscription = await plane.subscribe("events", Note)
        before = proxy.number
        proxy.open.clear()
        with pytest.raises(nats.errors.TimeoutError):
            await plane._round_trip(0.1)
        proxy.open.set()
        await plane._round_trip()
        await plane.publish("events", Note(1))
        assert (await anext(subscription)).n == 1
        assert proxy.number == before


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_members_leave_while_a_ping_is_under_way(site):
    proxy = Proxy(site.url.rpartition(":")[2])
    async with site.planes(1) as (other,):
        async with proxy.plane(lease_s=6) as plane:
            for name in ("a", "b", "c"):
                await plane.register(member(name))
            await until(other, "a", "b", "c")
            proxy.open.clear()
            with pytest.raises(nats.errors.TimeoutError):
                await plane._round_trip(0.01)
            proxy.open.set()  # the pong comes while the plane leaves
        assert await kept_by_server(other) == []


@asynchronous
async def test_nats_takes_user_and_password_from_the_url(tmp_path, caplog):
    port = free_port()
    options = [
        "-a",
        "127.0.0.1",
        "-p",
        str(port),
        "-js",
        "-sd",
        str(tmp_path),
        "--user",
        "u",
        "--pass",
        "secret",
    ]
    server = subprocess.Popen([nats_server.find(), *options], stderr=subprocess.DEVNULL)
    stranger = open_plane(f"nats://u:wrong@127.0.0.1:{port}", lease_s=LEASE_S)
    friend = open_plane(f"nats://u:secret@127.0.0.1:{port}", lease_s=LEASE_S)
    try:
        await friend.register(member("w"))
        while "Authorization" not in caplog.text:
            await asyncio.sleep(0.05)
        assert stranger.members == {} and "secret" not in caplog.text and "wrong" not in caplog.text
        with pytest.raises(ConfigError, match="cannot be read"):
            open_plane(f"nats://127.0.0.1:{port}", credentials_file=str(tmp_path / "none.creds"))
    finally:
        await stranger.close()
        await friend.close()
        server.kill()
        server.wait()


# The embedded plane alone


@pytest.mark.parametrize(
    "url",
    [
        "tcp://0.0.0.0:5600",
        "tcp://10.0.0.1:5600",
        "tcp://*:5600",
        "tcp://localhost:0",
        "ipc://plane",
        "http://127.0.0.1:1",
        "127.0.0.1:1",
    ],
)
@asynchronous
async def test_an_address_beyond_this_host_is_refused_and_nats_is_named(url):
    with pytest.raises(ConfigError, match="nats://"):
        open_plane(url)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
@asynchronous
async def test_the_first_that_may_host_binds_and_others_connect(kind, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"ipc://{tmp_path}/plane"
    first, second = open_plane(url, may_host=True), open_plane(url, may_host=True)
    assert first.host and not second.host
    await second.register(member("w"))
    await until(first, "w")
    await second.close()
    await first.close()


@asynchronous
async def test_garbage_from_a_stranger_on_the_socket_harms_nobody():
    import zmq

    url = f"tcp://127.0.0.1:{free_port()}"
    plane = open_plane(url, may_host=True)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(url)
        for frames in ([b""], [b"\xc1"], [b"a", b"b", b"c"], [msgspec.msgpack.encode(["Hello", -1, "x"])]):
            stranger.send_multipart(frames)
        while plane.host.num_unreadable < 4:
            await asyncio.sleep(0.01)
    await plane.register(member("w"))
    await until(plane, "w")
    await plane.close()
