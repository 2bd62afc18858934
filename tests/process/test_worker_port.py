"""A worker's token-level port and the router's end of it, over real sockets, with an engine that is a fake."""

import asyncio
import dataclasses
import time
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio

from shoal.api import FinishReason, Output, Request
from shoal.collector import Collector
from shoal.control import ReadSleepState, Sleep
from shoal.errors import (
    BusyError,
    ConfigError,
    EngineDeadError,
    RequestError,
    UnavailableError,
    WorkerFailedError,
)
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.key import FleetKey
from shoal.fleet.native import worker_server
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.native.worker_server import EventEndpoints, WorkerServer
from shoal.fleet.native.worker_wire import AskEvents, Hello, encode
from shoal.fleet.worker import WorkerInfo
from shoal.kv_events import END
from shoal.model_card import ModelCard
from shoal.sampling_params import SamplingParams
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.wire import Add, ModelInfo, TakeBackKv
from tests.asynchronous import within
from tests.waiting import until

PATIENCE_S = 60
asynchronous = within(PATIENCE_S)
INFO = ModelInfo("fake", 1, 4096, 512, 64, (2,), {}, 1024, 16384, 16, 4, "cpu", "float32")
CARD = ModelCard(info=INFO, names=["fake"], model="fake", eos_token_ids=(2,))


class Site:
    def __init__(self, engine, key=None):
        self.engine = engine
        self.gate, self.metrics = Admission(4, 4), ModelMetrics("fake", 4096, {})
        self.key = key

    def open(self, port=0, events=None):
        self.port = WorkerServer.open(
            "w", self.engine, self.gate, self.metrics, LoopClock(), port=port, key=self.key, events=events
        )
        return self.port

    def remote(self, worker_id="w", key=None):
        info = WorkerInfo(id=worker_id, url="http://127.0.0.1:1", models=("fake",))
        return RemoteEngine(info, CARD, self.port.address, key or self.key)


@asynccontextmanager
async def joined(engine=None, key=None, events=None):
    site = Site(engine or FakeEngine(vocab_size=512), key)
    site.open(events=events)
    remote = site.remote()
    try:
        await remote.check()
        yield site, remote
    finally:
        await remote.close()
        await site.port.close()


def request(name="r", max_tokens=10, **params):
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=max_tokens, **params), eos_token_ids=(2,))


async def tokens(engine, asked):
    ids, last = [], None
    async for output in engine.generate(asked):
        assert output.request_id == asked.request_id and last is None
        ids, last = [*ids, *output.token_ids], output.finish_reason
    return ids, last


@asynchronous
async def test_a_remote_engine_gives_what_the_engine_gives():
    async with joined() as (site, remote):
        expected = await tokens(site.engine, request())
        assert (
            await tokens(remote, request())
            == expected
            == ([72, 101, 108, 108, 111, 32] + [72, 101, 108, 108], "length")
        )
        with_logprobs = [o async for o in remote.generate(request("l", 3, logprobs=2))]
        assert with_logprobs[0].logprobs[0][72].rank == 1
        assert site.metrics.generation_tokens == 13 and site.gate.active == 0


class Lender(FakeEngine):
    """Its tickets are all there is."""

    def __init__(self):
        super().__init__(vocab_size=512, prefill_seconds=30.0)
        self.returned = []

    async def control(self, command):
        if isinstance(command, TakeBackKv):
            return self.returned.append(command.ticket)
        return await super().control(command)


@asynchronous
async def test_tickets_of_who_has_left_are_given_back():
    async with joined(Lender()) as (site, remote):
        unread = remote.open(dataclasses.replace(request("unread"), offers_kv=True))
        await until(lambda: unread.collector.output is not None)
        unread.close()
        late = remote.open(dataclasses.replace(request("late"), offers_kv=True))
        del remote._streams["late"]  # as if its reader had left between the two messages
        await until(lambda: len(site.engine.returned) == 2)
        assert site.engine.returned == [b"KV of unread/0", b"KV of late/1"]
        remote._streams["late"] = late
        late.close()
        read = remote.open(dataclasses.replace(request("read"), offers_kv=True))
        assert (await read.get()).kv_ticket == b"KV of read/2"
        read.close()
        await remote.control(ReadSleepState())
        assert len(site.engine.returned) == 2, "it is its reader's"


@asynchronous
async def test_two_routers_may_use_one_request_id_at_a_time():
    async with joined(FakeEngine(vocab_size=512, token_seconds=0.01)) as (site, remote):
        other = site.remote()
        await other.check()
        first, second = await asyncio.gather(tokens(remote, request()), tokens(other, request()))
        assert first == second and len(first[0]) == 10
        await other.close()


@asynchronous
async def test_the_tokens_of_a_step_come_in_one_message():
    async with joined() as (site, remote):
        seen, take = [], remote._take
        remote._reader._take = lambda frames: (seen.append(frames[0]), take(frames))
        collectors = {}

        async def generate(request):
            collector = collectors[request.request_id] = Collector()
            for _ in range(3):
                yield await collector.get()

        site.engine.generate = generate
        running = [asyncio.create_task(tokens(remote, request(f"r{i}"))) for i in range(4)]
        for step in range(3):
            await until(lambda: len(collectors) == 4 and all(c._waiter for c in collectors.values()))
            for name, collector in collectors.items():
                collector.put(Output(name, [step], finish_reason=FinishReason.LENGTH if step == 2 else None))
            await asyncio.sleep(0.02)
        assert await asyncio.gather(*running) == [([0, 1, 2], "length")] * 4
        outputs = [m[1] for m in map(msgspec.msgpack.decode, seen) if m[0] == "Outputs"]
        assert list(map(len, outputs)) == [4, 4, 4]


@pytest.mark.parametrize(
    "error",
    [RequestError("no"), UnavailableError("asleep"), BusyError("full"), EngineDeadError("gone")],
    ids=repr,
)
@asynchronous
async def test_errors_travel_as_what_they_are(error):
    async with joined() as (site, remote):

        async def fail(request):
            raise error
            yield

        site.engine.generate = fail
        with pytest.raises(type(error), match=str(error)):
            await tokens(remote, request())
        assert site.gate.active == 0


@asynchronous
async def test_a_full_worker_says_so():
    async with joined(FakeEngine(vocab_size=512, token_seconds=0.05)) as (site, remote):
        running = [asyncio.create_task(tokens(remote, request(f"r{i}", 4))) for i in range(8)]
        await until(lambda: site.gate.active == 8)
        with pytest.raises(BusyError):
            await tokens(remote, request("one more"))
        assert all(len(ids) == 4 for ids, _ in await asyncio.gather(*running))


@asynchronous
async def test_leaving_a_stream_aborts_it_at_the_worker():
    async with joined(FakeEngine(vocab_size=512, token_seconds=0.01)) as (site, remote):
        stream = remote.generate(request("r", 4000))
        await anext(stream)
        assert len(site.engine._running) == 1
        await stream.aclose()
        await until(lambda: not site.engine._running)
        whole = asyncio.create_task(tokens(remote, request("r", 4000)))
        await until(lambda: site.engine._running)
        await remote.abort("r")
        assert (await whole)[1] == FinishReason.ABORT


@asynchronous
async def test_commands_and_reports_cross():
    async with joined() as (_, remote):
        assert await remote.update_weights("/a/b") == 1
        await remote.control(Sleep(level=1))
        assert (await remote.sleep_state()).asleep == {"weights", "kv_cache"}
        await until(lambda: remote.report.sleep.is_sleeping and remote.report.weights_version == 1)
        assert remote.report.stats.num_blocks == 1024
        with pytest.raises(ConfigError, match="trace"):
            await remote.stop_profile()
        with pytest.raises(UnavailableError, match="sleeps"):
            await tokens(remote, request())


@asynchronous
async def test_an_answer_of_another_version_is_a_failure_of_the_worker():
    async with joined() as (site, remote):

        async def control(command):
            return {"neither": "a number"}

        site.engine.control = control
        with pytest.raises(WorkerFailedError, match="w: its answer to update_weights cannot be read"):
            await remote.update_weights("/a/b")


@asynchronous
async def test_a_worker_that_goes_ends_its_streams_and_one_that_comes_back_is_found():
    engine = FakeEngine(vocab_size=512, token_seconds=0.01)
    async with joined(engine) as (site, remote):
        lost = []
        remote.on_lost = lost.append
        stream = remote.generate(request("r", 4000))
        await anext(stream)
        number = int(site.port.address.rpartition(":")[2])
        await site.port.close()
        with pytest.raises(WorkerFailedError):
            async for _ in stream:
                pass
        assert len(lost) == 1
        with pytest.raises(WorkerFailedError):
            await tokens(remote, request())
        site.open(number)
        await remote.check()
        assert len((await tokens(remote, request()))[0]) == 10


@asynchronous
async def test_a_router_that_dies_takes_its_requests_with_it():
    async with joined(FakeEngine(vocab_size=512, token_seconds=0.01)) as (site, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as router:
            router.connect(site.port.address)
            router.send(encode(Hello("w")))
            router.send(encode(Add(request("r", 4000))))
            await until(lambda: site.engine._running)
            router.close(linger=0)
        await until(lambda: not site.engine._running)
        assert site.gate.active == 0


@asynchronous
async def test_garbage_and_strangers_change_nothing(caplog):
    async with joined() as (site, remote):
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(site.port.address)
            wrong = (b"", b"\x93garbage", encode(AskEvents(-1)), encode(AskEvents(1 << 63)))
            for message in (*wrong, encode(Hello("another")), encode(Add(request()))):
                stranger.send(message)
            await until(lambda: "cannot be read" in caplog.text)
            stranger.close(linger=0)
        assert len((await tokens(remote, request()))[0]) == 10
        assert len(site.engine.seen) == 1


@asynchronous
async def test_a_request_that_cannot_be_read_is_refused():
    async with joined() as (_, remote):
        wrong = request()
        wrong.prompt_token_ids = ["a"]
        with pytest.raises(RequestError, match="cannot read"):
            await tokens(remote, wrong)


@asynchronous
async def test_with_a_key_nobody_without_it_is_heard():
    key = FleetKey(b"k" * 32)
    async with joined(key=key) as (site, remote):
        assert len((await tokens(remote, request()))[0]) == 10
        for wrong in (None, FleetKey(b"x" * 32)):
            info = WorkerInfo(id="w", url="http://127.0.0.1:1", models=("fake",))
            stranger = RemoteEngine(info, CARD, site.port.address, wrong)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stranger._connected.wait(), 0.5)
            await stranger.close()
        assert len(site.port._routers) == 1


@asynchronous
async def test_a_router_with_a_key_speaks_to_no_worker_without_it():
    async with joined() as (site, _):
        router = site.remote(key=FleetKey(b"k" * 32))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(router._connected.wait(), 0.5)
        await router.close()


@asynchronous
async def test_a_port_beyond_this_machine_needs_a_key():
    site = Site(FakeEngine(vocab_size=512))
    with pytest.raises(ConfigError, match="--fleet-key-file"):
        WorkerServer.open("w", site.engine, site.gate, site.metrics, LoopClock(), host="0.0.0.0")


@asynchronous
async def test_a_canary_is_answered_by_a_token_and_else_by_progress():
    async with joined() as (site, remote):
        await remote.canary()
        assert len(site.engine.seen) == 1 and site.metrics.generation_tokens == 1

        async def hang(request):
            await asyncio.Event().wait()
            yield

        site.engine.generate = hang
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.canary(), 2.5)
        stats = site.engine.stats

        async def growing():
            site.steps = getattr(site, "steps", 0) + 1
            return dataclasses.replace(await stats(), step_tokens=site.steps)

        site.engine.stats = growing
        await remote.canary()


@asynchronous
async def test_a_request_is_as_old_at_the_worker_as_its_router_says():
    async with joined() as (site, remote):
        begun = time.monotonic()
        asked = request()
        asked.arrival = begun - 100.0
        async for _ in remote.generate(asked):
            pass
        [seen] = site.engine.seen
        assert seen.arrival == pytest.approx(begun - 100.0, abs=5.0)
        # A router of another host, whose clock began at another time, sends the age alone.
        remote._send(Add(dataclasses.replace(asked, request_id="other", arrival=1e9), 50.0))
        while len(site.engine.seen) < 2:
            await asyncio.sleep(0.01)
        assert begun - 51.0 < site.engine.seen[1].arrival < time.monotonic() - 50.0 + 1.0


@asynchronous
async def test_what_a_late_engine_still_replays_is_not_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_server, "REPLAY_PATIENCE_S", 0.3)
    events = EventEndpoints(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(events.replay)
    asked = engine.recv_multipart()

    async def answer(frames, *numbers):
        for number in numbers:
            await engine.send_multipart([frames[0], b"", b"", number.to_bytes(8, "big"), b"batch"])
        await engine.send_multipart([frames[0], b"", b"", END, b""])

    class Told:
        def __init__(self):
            self.numbers, self.replay_from, self.missing = [], 0, asyncio.Event()

        def replayed(self, number, payload):
            self.numbers.append(number)

        def replay_ended(self):
            self.replay_from = None

        def check(self):
            pass

    async with joined(events=events) as (site, first):
        second = site.remote()
        await second.check()
        feeds = Told(), Told()
        following = [
            asyncio.create_task(one.follow_events(feed)) for one, feed in zip((first, second), feeds)
        ]
        try:
            late = await asked
            then = await engine.recv_multipart()  # the first one was given up
            await answer(late, 70, 71)
            await asyncio.sleep(0.1)
            await answer(then, 0, 1)
            while any(feed.replay_from is not None for feed in feeds):
                await asyncio.sleep(0.01)
            assert sorted(feed.numbers for feed in feeds) == [[], [0, 1]]
        finally:
            for task in following:
                task.cancel()
            await second.close()
    context.destroy(0)


@asynchronous
async def test_a_worker_reports_what_it_has_served():
    async with joined() as (_, remote):
        async for _ in remote.generate(Request("a", [1, 2, 3], SamplingParams(max_tokens=4))):
            pass
        while remote.report.served is None or not remote.report.served.output_tokens:
            await asyncio.sleep(0.05)
        served = remote.report.served
        assert (served.prompt_tokens, served.output_tokens, served.failed) == (3, 4, 0)
        assert sum(served.first_token) == 1 and sum(served.between_tokens) == 3
