"""The contract of the registry, which every implementation passes with real processes, sockets and nats-server."""

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
from random import Random

import msgspec
import nats.errors
import nats.js.errors
import pytest

from shoal.errors import ConfigError, ShoalError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.registry.nats import NatsRegistry
from shoal.fleet.registry.open import open_registry
from shoal.fleet.registry.registry import Member
from tests import nats_server
from tests.asynchronous import within
from tests.process.registry_messages import Note
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
LEASE_S = 2.5
PATIENCE_S = 90
asynchronous = within(PATIENCE_S)


class Site:
    """A registry at an address, whose process can be killed and started, and processes that join it."""

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
        """Starts a process that does `what`, and returns when it has done it."""
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
    async def registries(self, number: int = 2):
        registries = [open_registry(self.url, lease_s=LEASE_S) for _ in range(number)]
        try:
            yield registries
        finally:
            await asyncio.gather(*(registry.close() for registry in registries))


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


async def until(registry, *ids: str) -> None:
    """Waits until the registry has exactly these members."""
    async for members in registry.watch():
        if set(members) == set(ids):
            return


async def in_thread(function, *args):
    return await asyncio.to_thread(function, *args)


# Members


@asynchronous
async def test_members_are_seen_by_all_with_their_fields_and_gone_when_they_leave(site):
    async with site.registries(3) as (a, b, c):
        said = member("w.1", model="m", role="prefill", details={"slots": 4})
        await a.register(said)
        for registry in (a, b, c):
            await until(registry, "w.1")
            assert registry.members["w.1"] == said
        await a.register(member("w.1", details={"draining": True}))
        while not b.members["w.1"].details.get("draining"):
            await asyncio.sleep(0.01)
        await a.close()
        for registry in (b, c):
            await until(registry)
        await b.register(said)
        await until(c, "w.1")
        await b.close()
        await until(c)


@asynchronous
async def test_two_watchers_and_one_that_comes_late_see_the_same(site):
    async with site.registries(3) as (a, b, c):
        await asyncio.gather(*(registry.register(member(f"w{i}")) for i, registry in enumerate((a, b, c))))
        for registry in (a, b, c):
            await until(registry, "w0", "w1", "w2")
        async with site.registries(1) as (late,):
            await until(late, "w0", "w1", "w2")
            assert late.members == a.members == b.members


@asynchronous
async def test_a_killed_process_is_gone_from_everyones_view(site):
    async with site.registries(2) as (a, b):
        await a.register(member("stays"))
        process = await in_thread(site.join, "register", "dies")
        for registry in (a, b):
            await until(registry, "stays", "dies")
        process.kill()
        for registry in (a, b):
            await until(registry, "stays")


@asynchronous
async def test_the_id_of_a_living_process_is_refused_and_a_dead_ones_is_free(site):
    async with site.registries(1) as (registry,):
        process = await in_thread(site.join, "register", "w")
        with pytest.raises(ConfigError, match="unique on the plane, got 'w', which another process has"):
            await registry.register(member("w"))
        process.kill()
        await registry.register(member("w"))
        await until(registry, "w")


@asynchronous
async def test_a_lease_is_renewed_under_load(site):
    """For three leases the registry is saturated with messages, and no member is lost."""
    async with site.registries(2) as (a, b):
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


# Broadcast


@asynchronous
async def test_ten_thousand_messages_come_in_order_of_each_publisher(site):
    async with site.registries(3) as (a, b, c):
        subscription = await c.subscribe("events", Note, max_buffered=20_000)
        other = await c.subscribe("other", Note)

        async def publish(registry, name):
            for n in range(10_000):
                await registry.publish("events", Note(n, name))

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
async def test_a_slow_subscriber_loses_the_oldest_is_logged_and_holds_up_nobody(site, caplog):
    async with site.registries(2) as (a, b):
        slow = await b.subscribe("events", Note, max_buffered=10)
        quick = await b.subscribe("events", Note)
        for n in range(100):
            await a.publish("events", Note(n))
        assert [(await anext(quick)).n for _ in range(100)] == list(range(100))
        assert [(await anext(slow)).n for _ in range(10)] == list(range(90, 100))
        assert slow.num_lost == 90 and quick.num_lost == 0
        assert (
            sum("the oldest messages beyond 10 are lost" in record.message for record in caplog.records) == 1
        )


@asynchronous
async def test_an_unreadable_message_is_counted_logged_once_and_skipped(site, caplog):
    async with site.registries(2) as (a, b):
        subscription = await b.subscribe("events", Note)
        for garbage in (b"", b"\xc1\xff", msgspec.msgpack.encode({"n": "no number"})):
            await a.send("events", garbage)
        await a.publish("events", Note(1))
        assert (await anext(subscription)).n == 1
        assert b.reader.num_unreadable == {"subject events": 3}
        assert sum("subject events" in record.message for record in caplog.records) == 1


@asynchronous
async def test_a_message_that_is_too_large_is_refused_with_the_limit(site):
    async with site.registries(1) as (registry,):
        await registry.register(member("w"))
        with pytest.raises(ConfigError, match=r"at most \d+ bytes, got 6710\d+"):
            await registry.publish("events", Note(0, "x" * (64 * 2**20 + 1000)))


@pytest.mark.parametrize("name", ["", "a b", "a.*", ">", "a..b", "ä"])
@asynchronous
async def test_names_that_mean_something_to_nats_are_refused(name, tmp_path):
    registry = open_registry(f"ipc://{tmp_path}/plane")
    with pytest.raises(ConfigError, match="must be letters, digits"):
        await registry.publish(name, Note(0))
    await registry.close()


# A registry that restarts


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_each_outage_of_nats_is_logged(site, caplog):
    caplog.set_level(logging.INFO)
    async with site.registries(1) as (registry,):
        for _ in range(2):
            await registry.register(member("a"))
            caplog.clear()
            site.kill()
            while "the NATS server cannot be used; still trying" not in caplog.text:
                await asyncio.sleep(0.01)
            site.start()
            while "the NATS server is there again" not in caplog.text:
                await asyncio.sleep(0.01)


@asynchronous
async def test_members_and_subscriptions_come_back_with_a_registry_that_restarts(site):
    async with site.registries(2) as (a, b):
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
            async with site.registries(1) as (late,):
                await until(late, "w")
        assert views == [{"w"}], "no member leaves while the registry is away"
        watching.cancel()
        await a.close()
        await until(b)


# Requests


async def square(note: Note) -> Note:
    return Note(note.n * note.n)


@asynchronous
async def test_a_request_gets_one_reply_from_the_process_of_the_member(site):
    async with site.registries(3) as (a, b, c), b.serving("b", Note, square), c.serving("c", Note, square):
        await b.register(member("b"))
        await c.register(member("c"))
        replies = await asyncio.gather(*(a.request("b", Note(n), Note) for n in range(50)))
        assert [reply.n for reply in replies] == [n * n for n in range(50)]
        assert (await b.request("c", Note(3), Note)).n == 9
        assert (await b.request("b", Note(4), Note)).n == 16, "a process may ask itself"


@asynchronous
async def test_an_error_of_the_handler_reaches_the_requester(site, caplog):
    async def fail(note: Note) -> Note:
        raise ConfigError("not this one") if note.n else ZeroDivisionError("oops")

    async with site.registries(2) as (a, b), b.serving("b", Note, fail):
        await b.register(member("b"))
        for n, error in ((1, ConfigError), (0, ShoalError)):
            with pytest.raises(error, match=r"not this one|oops"):
                await a.request("b", Note(n), Note)
        [record] = [record for record in caplog.records if record.name == "shoal.fleet.registry.registry"]
        assert record.exc_info[0] is ZeroDivisionError, "a bug is logged, a refusal is not"


@asynchronous
async def test_a_request_to_nobody_ends_after_a_lease(site):
    async with site.registries(2) as (a, b):
        await b.register(member("deaf"))
        for name in ("deaf", "nobody"):
            with pytest.raises(UnavailableError, match=f"'{name}' takes no requests"):
                await a.request(name, Note(1), Note)


@asynchronous
async def test_a_request_to_a_killed_process_ends_with_its_lease(site):
    process = await in_thread(site.join, "serve", "toy")
    async with site.registries(1) as (registry,):
        waiting = asyncio.create_task(registry.request("toy", Note(3), Note))
        await asyncio.sleep(2 * LEASE_S)
        assert not waiting.done(), "the process lives, and may take its time"
        process.kill()
        with pytest.raises(UnavailableError, match="'toy' has left, or died"):
            await waiting


@asynchronous
async def test_a_handler_ends_its_work_without_its_requester_and_is_cancelled_with_its_service(site):
    steps, go_on = [], asyncio.Event()

    async def work(note: Note) -> Note:
        steps.append(f"{note.n} starts")
        try:
            await go_on.wait()
            steps.append(f"{note.n} ends")
        except asyncio.CancelledError:
            steps.append(f"{note.n} is cancelled")
            raise
        return note

    async with site.registries(1) as (server,):
        async with server.serving("w", Note, work):
            await server.register(member("w"))
            async with site.registries(1) as (requester,):
                asking = asyncio.create_task(requester.request("w", Note(1), Note))
                while not steps:
                    await asyncio.sleep(0.01)
                asking.cancel()
            go_on.set()
            while len(steps) < 2:
                await asyncio.sleep(0.01)
            go_on.clear()
            asking = asyncio.create_task(server.request("w", Note(2), Note))
            while len(steps) < 3:
                await asyncio.sleep(0.01)
        assert steps == ["1 starts", "1 ends", "2 starts", "2 is cancelled"]
        asking.cancel()


@asynchronous
async def test_a_registry_that_restarts_fails_the_requests_under_way_and_serves_later_ones(site):
    """A request that was sent is never sent again, as it may have been carried out."""
    calls, go_on = [], asyncio.Event()

    async def work(note: Note) -> Note:
        calls.append(note.n)
        await go_on.wait()
        return note

    async with site.registries(2) as (a, b), b.serving("b", Note, work):
        await b.register(member("b"))
        lost = asyncio.create_task(a.request("b", Note(1), Note))
        while not calls:
            await asyncio.sleep(0.01)
        site.kill()
        await asyncio.sleep(1.5 * LEASE_S)
        await in_thread(site.start)
        with pytest.raises(UnavailableError, match="the reply to a request is lost"):
            await lost
        go_on.set()
        assert (await a.request("b", Note(2), Note)).n == 2
        assert calls == [1, 2]


@asynchronous
async def test_calls_on_a_registry_that_is_closed_end_with_an_error(site):
    async def wait(note: Note) -> Note:
        await asyncio.Event().wait()
        return note

    async with site.registries(2) as (a, b), b.serving("b", Note, wait):
        await b.register(member("b"))
        waiting = asyncio.create_task(a.request("b", Note(1), Note))
        await until(a, "b")
        await asyncio.sleep(0.2)
        await a.close()
        with pytest.raises(UnavailableError, match="has left the plane"):
            await waiting


@asynchronous
async def test_a_request_of_another_type_is_refused(site):
    class Other(msgspec.Struct):
        words: list[str]

    async with site.registries(2) as (a, b), b.serving("b", Note, square):
        await b.register(member("b"))
        with pytest.raises(ShoalError, match="request to b cannot be read"):
            await a.request("b", Other(["a"]), Note)
        with pytest.raises(UnavailableError, match="the reply of member 'b' cannot be read"):
            await a.request("b", Note(1), Other)


# NATS alone


async def kept_by_server(registry) -> list[str]:
    """Returns the keys of members, whatever their leases."""
    try:
        return await registry._bucket.keys(["member."])
    except nats.js.errors.NoKeysError:
        return []


class Proxy:
    """A proxy between a registry and a nats-server: it stores the registry's bytes, counts the connections, and holds
    back the server's bytes while it is not `open`."""

    def __init__(self, port: str) -> None:
        self.port, self.sent, self.number = int(port), b"", 0
        self.open = asyncio.Event()
        self.open.set()

    async def connect(self, reader, writer):
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:  # the server is still starting
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
    async def registry(self, lease_s):
        server = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        registry = open_registry(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", lease_s=lease_s)
        try:
            yield registry
        finally:
            self.open.set()
            await registry.close()
            server.close()


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_a_subscription_is_with_the_nats_server_when_it_is_promised(site):
    """A pong shows that the server has the messages that were sent before its ping."""
    proxy = Proxy(site.url.rpartition(":")[2])
    async with proxy.registry(lease_s=30) as registry:
        for number in range(10):
            await registry.subscribe(f"events{number}", Note)
            subscribed = proxy.sent.index(b"SUB shoal.subject.events%d " % number)
            assert b"PING" in proxy.sent[subscribed:]


@pytest.mark.slow
@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_many_processes_that_join_at_once_see_each_other(site):
    """Regression: a watcher of a bucket missed older keys in one of 50 to 500 joins of this kind."""
    names = [f"w{number}" for number in range(16)]
    async with site.registries(1) as (writer,):

        async def write():
            for number in count():
                await writer.register(member("writer", details={"number": number}))
                await asyncio.sleep(0.005)

        writing = asyncio.create_task(write())
        for _ in range(40):
            async with site.registries(len(names)) as registries:
                await asyncio.gather(
                    *(registry.register(member(name)) for registry, name in zip(registries, names))
                )
                await asyncio.gather(*(until(registry, "writer", *names) for registry in registries))
        writing.cancel()


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_a_late_answer_of_nats_leaves_the_connection_whole(site):
    proxy = Proxy(site.url.rpartition(":")[2])
    async with proxy.registry(lease_s=30) as registry:
        subscription = await registry.subscribe("events", Note)
        before = proxy.number
        proxy.open.clear()
        with pytest.raises(nats.errors.TimeoutError):
            await registry._round_trip(0.1)
        proxy.open.set()
        await registry._round_trip()
        await registry.publish("events", Note(1))
        assert (await anext(subscription)).n == 1
        assert proxy.number == before


@pytest.mark.parametrize("site", ["nats"], indirect=True)
@asynchronous
async def test_members_leave_while_a_ping_is_under_way(site):
    proxy = Proxy(site.url.rpartition(":")[2])
    async with site.registries(1) as (other,):
        async with proxy.registry(lease_s=6) as registry:
            for name in ("a", "b", "c"):
                await registry.register(member(name))
            await until(other, "a", "b", "c")
            proxy.open.clear()
            with pytest.raises(nats.errors.TimeoutError):
                await registry._round_trip(0.01)
            proxy.open.set()  # the pong comes while the registry leaves
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
    stranger = open_registry(f"nats://u:wrong@127.0.0.1:{port}", lease_s=LEASE_S)
    friend = open_registry(f"nats://u:secret@127.0.0.1:{port}", lease_s=LEASE_S)
    try:
        await friend.register(member("w"))
        while "Authorization" not in caplog.text:
            await asyncio.sleep(0.05)
        assert stranger.members == {} and "secret" not in caplog.text and "wrong" not in caplog.text
        with pytest.raises(ConfigError, match="must be a file that can be read"):
            open_registry(f"nats://127.0.0.1:{port}", credentials_file=str(tmp_path / "none.creds"))
    finally:
        await stranger.close()
        await friend.close()
        server.kill()
        server.wait()


# The embedded registry alone


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
        open_registry(url)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
@asynchronous
async def test_the_first_that_may_host_binds_and_others_connect(kind, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"ipc://{tmp_path}/plane"
    first, second = open_registry(url, may_host=True), open_registry(url, may_host=True)
    assert first.host and not second.host
    await second.register(member("w"))
    await until(first, "w")
    await second.close()
    await first.close()


@asynchronous
async def test_garbage_from_a_stranger_on_the_socket_harms_nobody():
    import zmq

    url = f"tcp://127.0.0.1:{free_port()}"
    registry = open_registry(url, may_host=True)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(url)
        for frames in ([b""], [b"\xc1"], [b"a", b"b", b"c"], [msgspec.msgpack.encode(["Hello", -1, "x"])]):
            stranger.send_multipart(frames)
        while registry.host.num_unreadable < 4:
            await asyncio.sleep(0.01)
    await registry.register(member("w"))
    await until(registry, "w")
    await registry.close()


@asynchronous
async def test_an_id_that_is_lost_while_leases_are_renewed_and_joined_ends_neither(caplog):
    """Regression: the second of them raised KeyError, and so no lease of the process was renewed any more."""
    registry = NatsRegistry(LoopClock(), Random(1), LEASE_S, None)
    registry._registered["w"] = Member(id="w", role="decode", address="http://127.0.0.1:1")

    async def claim(member):
        await asyncio.sleep(0.01)
        return False

    registry._claim = claim
    await asyncio.gather(registry._claim_again(), registry._claim_again())
    assert registry._registered == {}
    assert [record.message for record in caplog.records] == ["member 'w': another process has the id now"]
