"""A router's workers on virtual time: they join, break, are found broken, recover and are chosen."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal.errors import ConfigError, UnavailableError, UnknownWorkerError, WorkerFailedError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.native.fake_worker import FakeWorker
from shoal.fleet.planner.observation import DecodeLoad
from shoal.fleet.pool.fleet import MAX_GONE, Fleet
from shoal.fleet.routing.dispatcher import RoutingRequest
from shoal.fleet.worker import Worker, WorkerInfo, WorkerLoad
from shoal.kv_events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode
from shoal.stats import Stats
from shoal.telemetry.served import ServedTotals, quantiles_of

PROMPT = list(range(100, 170))  # four blocks of 16 and a tail


class Scene:
    """A fleet of fake workers."""

    def __init__(self, **options):
        self.fleet = Fleet(FleetConfig(**{"seed": 1, **options}), LoopClock())
        self.links = {}

    def add(self, name, listening=(), **more):
        info = WorkerInfo(id=name, url=f"http://{name}:1", **{"models": ("m",), "is_external": True, **more})
        link = self.links[name] = FakeWorker(info, self.fleet.clock)
        self.fleet.join(Worker(info, link, self.fleet.clock.now), listening)
        return link

    def state(self, name):
        return self.fleet.workers[name].state

    async def went(self, tokens=PROMPT, **more):
        """Returns the worker of a request that ends at once."""
        async with self.fleet.models["m"].dispatcher.assign(
            RoutingRequest(str(id(more)), tokens, **more)
        ) as assignment:
            assignment.generated(1)
            return assignment.worker.id


def scene(run, **options):
    async def main():
        s = Scene(**options)
        await s.fleet.start()
        try:
            await run(s)
        finally:
            await s.fleet.close()

    run_virtual(main())


def now():
    return asyncio.get_running_loop().time()


async def until(what, timeout=1000.0):
    deadline = now() + timeout
    while not what():
        assert now() < deadline
        await asyncio.sleep(0.05)


def test_a_worker_is_ready_as_soon_as_it_was_reached():
    async def run(s):
        link = s.add("a")
        assert s.state("a") == "broken" and s.fleet.view().workers[0].why
        await until(lambda: s.state("a") == "ready", 1)
        assert link.num_canaries == 0 and s.fleet.view().workers[0].why == ""

    scene(run)


def test_each_break_has_a_line_in_the_log_though_the_next_probe_finds_the_worker_well(caplog):
    async def run(s):
        s.add("a")
        await until(lambda: s.state("a") == "ready", 1)
        s.fleet.workers["a"].hung(WorkerFailedError("no token within 30 s"))
        await until(lambda: s.state("a") == "ready", 5)

    with caplog.at_level("INFO"):
        scene(run)
    told = [r.getMessage().partition(" at ")[2] for r in caplog.records if "worker a at" in r.getMessage()]
    assert told == ["http://a:1 is well", "http://a:1 is broken: no token within 30 s", "http://a:1 is well"]


def test_a_worker_that_nobody_answers_for_has_one_line_in_the_log(caplog):
    """Regression: a wrong URL was never logged, however long the router ran."""

    async def run(s):
        s.add("a").is_connected = False
        await asyncio.sleep(300)
        assert s.state("a") == "broken"

    scene(run)
    [line] = [r.getMessage() for r in caplog.records if "worker a at" in r.getMessage()]
    assert "http://a:1 is not reached yet: " in line and "correct its URL" in line


def test_a_worker_that_is_too_busy_to_speak_is_not_empty_for_a_planner():
    """Regression: its published load expired after ten seconds, and a planner removed it as idle."""

    async def run(s):
        s.add("a", dp_size=2)
        await until(lambda: s.state("a") == "ready")
        s.fleet.published(
            "a",
            [
                WorkerLoad(num_running=9, num_waiting=3, kv_usage=0.95),
                WorkerLoad(rank=1, num_waiting=2, kv_usage=float("nan")),
            ],
        )
        for _ in range(2):
            [load] = s.fleet.observe("m", "both").decode
            assert load == DecodeLoad(0.95, 5, has_slots=True)
            await asyncio.sleep(20)
        assert s.fleet.models["m"].router.kv_usage(WorkerRank("a", 0)) == 0.0

    scene(run)


def test_what_waits_at_a_worker_that_tells_of_no_slots_is_no_load_for_a_planner():
    async def run(s):
        s.add("a")
        await until(lambda: s.state("a") == "ready")
        s.fleet.published("a", [WorkerLoad(num_waiting=50, kv_usage=0.25)])
        assert [load.kv_load for load in s.fleet.observe("m", "both").decode] == [0.25]
        s.fleet.published("a", [WorkerLoad(num_waiting=5, kv_usage=0.25, num_running=1)])
        assert [load.kv_load for load in s.fleet.observe("m", "both").decode] == [0.35]

    scene(run)


def test_workers_that_an_operator_has_set_aside_are_told_to_a_planner_and_those_it_parked_are_not():
    async def run(s):
        for name in "abcd":
            s.add(name)
        s.add("p", role="prefill")
        await until(lambda: all(s.state(name) == "ready" for name in "abcdp"))
        for name, level in zip("abp", (0, 1, 2)):
            s.fleet.workers[name].set_sleep_level(level)
        s.fleet.workers["c"].drain(True)
        seen = s.fleet.observe("m", "decode")
        assert (len(seen.decode), seen.prefill_workers, seen.paused, seen.draining) == (1, 0, 3, 1)
        with s.fleet.workers["d"].held():  # new weights for all, one after the other
            assert s.fleet.observe("m", "decode").paused == 4
        s.fleet.parked_ids = lambda: {"b", "p"}
        assert s.fleet.observe("m", "decode").paused == 1
        s.links["a"].is_connected = False  # its host has gone, and nobody has it rest
        await until(lambda: s.state("a") == "broken")
        assert s.fleet.observe("m", "decode").paused == 0

    scene(run)


def test_whether_any_worker_of_a_model_takes_requests_is_told_also_when_the_last_one_has_gone():
    def told(s):
        [family] = [one for one in s.fleet.metrics() if one.name == "shoal:router_ready_workers"]
        return {sample.labels["model_name"]: sample.value for sample in family.samples}

    async def run(s):
        s.add("a")
        s.add("p", role="prefill")
        await until(lambda: s.state("a") == s.state("p") == "ready")
        assert told(s) == {"m": 1}
        s.fleet.workers["a"].set_sleep_level(1)
        assert told(s) == {"m": 0}
        s.fleet.workers["a"].set_sleep_level(None)
        s.fleet.leave("a")
        s.fleet.leave("p")
        await asyncio.sleep(300)
        assert told(s) == {"m": 0}

    scene(run)


def test_a_worker_that_is_gone_is_noticed_at_the_next_check_and_found_again():
    async def run(s):
        link = s.add("a")
        await asyncio.sleep(1)
        link.is_connected = False
        died = now()
        await until(lambda: s.state("a") == "broken")
        assert now() - died <= 5.1
        link.is_connected = True
        back = now()
        await until(lambda: s.state("a") == "ready")
        assert now() - back <= 5.1 and link.num_canaries == 1

    scene(run)


def test_a_refused_connection_breaks_at_once_and_is_probed_soon():
    async def run(s):
        link = s.add("a")
        await asyncio.sleep(1)
        link.is_connected = False
        with pytest.raises(WorkerFailedError):
            async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)):
                raise WorkerFailedError("connection refused", is_absent=True)
        assert s.state("a") == "broken"
        link.is_connected = True
        back = now()
        await until(lambda: s.state("a") == "ready")
        assert now() - back <= 1

    scene(run)


@pytest.mark.parametrize("kind", ["is_hung", "is_frozen"])
def test_a_worker_that_delivers_nothing_is_noticed_within_thirty_seconds(kind):
    async def run(s):
        link = s.add("a")
        await asyncio.sleep(1)
        told = []
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
            assignment.on_broken = lambda: told.append(now())
            assignment.generated(1)
            last = now()
            setattr(link, kind, True)
            await until(lambda: s.state("a") == "broken")
            assert now() - last <= 30 and told == [pytest.approx(now(), abs=0.1)]
        await asyncio.sleep(100)
        assert s.state("a") == "broken"
        setattr(link, kind, False)
        back = now()
        await until(lambda: s.state("a") == "ready")
        assert now() - back <= 30

    scene(run)


def test_a_probe_never_breaks_a_worker_that_still_delivers():
    async def run(s):
        link = s.add("a")
        await asyncio.sleep(1)
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
            link.is_hung = link.is_frozen = True
            for _ in range(200):
                assignment.generated(1)
                await asyncio.sleep(1)
                assert s.state("a") == "ready"

    scene(run)


def test_a_worker_with_nothing_to_do_is_left_alone_if_a_probe_could_cost_it_its_cache():
    async def run(s):
        small, large = s.add("a"), s.add("b", [Publisher().listen])
        await asyncio.sleep(100)
        assert small.num_canaries == 0 and large.num_canaries > 2
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)):
            await asyncio.sleep(20)
        assert small.num_canaries + large.num_canaries > 2

    scene(run)


def test_a_worker_that_is_full_works():
    async def run(s):
        link = s.add("a", [Publisher().listen])
        link.is_full = True
        await asyncio.sleep(100)
        assert s.state("a") == "ready" and link.num_canaries > 2

    scene(run)


def test_three_failures_in_succession_break_the_circuit_and_a_token_between_them_does_not():
    async def run(s):
        s.add("a")
        await asyncio.sleep(1)
        dispatcher = s.fleet.models["m"].dispatcher

        async def fail():
            with pytest.raises(WorkerFailedError):
                async with dispatcher.assign(RoutingRequest("1", PROMPT)):
                    raise WorkerFailedError("broke off")

        for _ in range(5):
            await fail()
            await fail()
            assert await s.went() == "a"
        await fail()
        await fail()
        await fail()
        assert s.state("a") == "broken" and s.fleet.view().workers[0].why == "broke off"

    scene(run)


def test_a_request_that_fails_at_every_worker_counts_against_none():
    async def run(s):
        for name in "ab":
            s.add(name)
        await asyncio.sleep(1)
        dispatcher = s.fleet.models["m"].dispatcher

        async def fail(request, **more):
            with pytest.raises(WorkerFailedError):
                async with dispatcher.assign(request) as assignment:
                    raise WorkerFailedError("it answers 500", **more)
            return assignment.worker.id

        for number in range(20):
            poison = RoutingRequest(str(number), PROMPT)
            assert {await fail(poison), await fail(poison)} == {"a", "b"}
        assert s.state("a") == s.state("b") == "ready"
        poison = RoutingRequest("another", PROMPT)
        first = await fail(poison)
        assert s.state(await fail(poison, is_absent=True)) == "broken" and s.state(first) == "ready"

    scene(run)


@pytest.mark.parametrize("fails", [True, False], ids=["the workers", "the request"])
def test_a_request_that_fails_at_every_worker_has_them_probed_at_once(fails):
    async def run(s):
        links = [s.add(name) for name in "abc"]
        await asyncio.sleep(1)
        for link in links:
            link.canary_error = WorkerFailedError("it answers 500") if fails else None
        request = RoutingRequest("1", PROMPT)
        for _ in links:
            with pytest.raises(WorkerFailedError):
                async with s.fleet.models["m"].dispatcher.assign(request):
                    raise WorkerFailedError("it answers 500")
        await asyncio.sleep(0.1)
        assert {s.state(name) for name in "abc"} == {"broken" if fails else "ready"}
        if fails:
            with pytest.raises(UnavailableError):
                await s.went()
            for link in links:
                link.canary_error = None
            await until(lambda: {s.state(name) for name in "abc"} == {"ready"}, 10)
        else:
            assert [link.num_canaries for link in links] == [1, 1, 1]

    scene(run)


def test_who_delivers_to_others_is_not_probed_for_a_request_that_fails():
    async def run(s):
        links = [s.add(name) for name in "ab"]
        await asyncio.sleep(1)
        request = RoutingRequest("1", PROMPT)
        for worker in s.fleet.workers.values():
            worker.delivered()
        for _ in links:
            with pytest.raises(WorkerFailedError):
                async with s.fleet.models["m"].dispatcher.assign(request):
                    raise WorkerFailedError("it answers 500")
        await asyncio.sleep(5)
        assert [link.num_canaries for link in links] == [0, 0]

    scene(run)


def test_a_change_of_workers_is_made_whole_or_not_at_all():
    async def run(s):
        s.fleet._connect = lambda spec: FakeWorker(spec.info(), s.fleet.clock)
        s.add("ours", models=("other",), is_external=False)
        assert await s.fleet.change_workers(["http://a:1,id=a", "http://b:1,id=b"], []) == ["a", "b"]
        for add, remove, error in (
            (["http://c:1,id=c"], ["nobody"], UnknownWorkerError),
            (["http://c:1,id=c", "http://x:1,id=a"], ["b"], ConfigError),
            (["http://c:1,id=c", "http://d:1,id=c"], ["b"], ConfigError),
            (["http://c:1,id=c", "http://d:1,colour=red"], ["b"], ConfigError),
            (["http://c:1,id=c"], ["b", "ours"], ConfigError),
        ):
            with pytest.raises(error):
                await s.fleet.change_workers(add, remove)
            assert set(s.fleet.workers) == {"a", "b", "ours"}
        assert await s.fleet.change_workers(["http://c:1,id=c"], ["a", "a"]) == ["c"]
        assert set(s.fleet.workers) == {"b", "c", "ours"}

    scene(run)


def test_a_worker_of_another_model_or_hash_seed_is_set_aside_and_named(caplog):
    async def run(s):
        s.add("a", identity={"hash_seed": 1, "weights": "x"})
        s.add("b", identity={"hash_seed": 2, "weights": "x"})
        s.add("c", is_external=False)
        s.add("d", identity={"weights": "x"})
        await asyncio.sleep(1)
        assert {name: s.state(name) for name in "abcd"} == {
            "a": "ready",
            "b": "broken",
            "c": "broken",
            "d": "ready",
        }
        whys = {worker.id: worker.why for worker in s.fleet.view().workers}
        assert "hash_seed" in whys["b"] and "external" in whys["c"]
        assert {await s.went() for _ in range(20)} == {"a", "d"}
        with pytest.raises(ConfigError, match="got 'a'"):
            s.fleet.join(
                Worker(WorkerInfo(id="a", url="http://else:1", models=("m",)), None, s.fleet.clock.now)
            )

    scene(run, policy="random")


def test_a_worker_that_was_set_aside_serves_when_the_others_have_gone():
    async def run(s):
        s.add("a", identity={"weights": "old"})
        await asyncio.sleep(1)
        old = s.fleet.models["m"]
        s.add("b", identity={"weights": "new"})
        await asyncio.sleep(1)
        assert s.state("b") == "broken"
        gone = s.fleet.workers["a"]
        s.fleet.leave("a")
        assert gone.why == "it has left", "requests that move from it say why"
        assert s.state("b") == "ready" and await s.went() == "b"
        assert s.fleet.models["m"] is not old, "what was offered by the old one's card is offered anew"
        s.fleet.leave("b")
        s.add("c", is_external=False)
        await asyncio.sleep(1)
        assert s.state("c") == "ready" and await s.went() == "c"

    scene(run)


def test_a_removed_worker_makes_room_for_one_that_was_set_aside():
    async def run(s):
        s.add("a", identity={"weights": "1"})
        await until(lambda: s.state("a") == "ready")
        s.add("b", identity={"weights": "2"})
        await until(lambda: s.fleet.workers["b"].excluded_reason)
        await s.fleet.change_workers([], ["a"])
        await until(lambda: s.state("b") == "ready")
        assert await s.went() == "b"

    scene(run)


def test_a_model_that_a_worker_cannot_serve_does_not_keep_it_from_others():
    async def run(s):
        s.add("a", identity={"weights": "old"}, models=("x",))
        await asyncio.sleep(1)
        s.add("b", identity={"weights": "new"}, models=("m", "x"))
        await asyncio.sleep(1)
        assert s.state("b") == "ready" and await s.went() == "b"
        assert set(s.fleet.models["x"].dispatcher.workers) == {"a"}

    scene(run)


def test_models_come_with_their_workers_and_are_remembered_for_a_while():
    async def run(s):
        link = s.add("a", models=())
        link.is_connected = False
        await asyncio.sleep(1)
        assert s.fleet.models == {} and s.fleet.unknown == ["a"]
        link.is_connected, link.info = (
            True,
            WorkerInfo(
                id="a", url="http://a:1", models=("m", "n"), adapters=frozenset({"x"}), is_external=True
            ),
        )
        await until(lambda: s.state("a") == "ready")
        assert list(s.fleet.models) == ["m", "x", "n"] and s.fleet.unknown == []
        s.fleet.leave("a")
        assert link.is_closed is False
        await asyncio.sleep(1)
        assert link.is_closed and list(s.fleet.models) == ["m", "x", "n"]
        with pytest.raises(UnavailableError):
            await s.went()
        await asyncio.sleep(700)
        assert s.fleet.models == {}

    scene(run)


def test_a_worker_that_serves_another_model_now_leaves_the_old_one():
    async def run(s):
        link = s.add("a")
        s.add("b")
        await asyncio.sleep(1)
        link.info = WorkerInfo(id="a", url="http://a:1", models=("other",), is_external=True)
        await asyncio.sleep(10)
        assert set(s.fleet.models["m"].dispatcher.workers) == {"b"}
        assert set(s.fleet.models["other"].dispatcher.workers) == {"a"}

    scene(run)


def test_draining_and_filters_and_thresholds():
    async def run(s):
        a = s.add("a", tags=frozenset({"big"}), adapters=frozenset({"x"}), total_blocks=100)
        s.add("b", tags=frozenset({"small"}))
        s.add("p", role="prefill")
        await asyncio.sleep(1)
        assert await s.went(tags=frozenset({"big"})) == "a"
        assert await s.went(tags=frozenset({"small"})) == "b"
        assert await s.went(lora_name="x") == "a"
        with pytest.raises(UnavailableError, match="huge"):
            await s.went(tags=frozenset({"huge"}))
        await s.fleet.drain("a")
        assert s.state("a") == "draining" and {await s.went() for _ in range(9)} == {"b"}
        await s.fleet.resume("a")
        a.load = [WorkerLoad(kv_usage=0.95)]
        await s.fleet.configure({"busy_kv_usage": 0.9})
        await asyncio.sleep(10)
        assert {await s.went() for _ in range(9)} == {"b"}
        a.load = []
        await asyncio.sleep(20)  # what a silent worker has published ages out
        assert {await s.went() for _ in range(20)} == {"a", "b"}
        with pytest.raises(UnknownWorkerError):
            await s.fleet.drain("nobody")
        with pytest.raises(ConfigError, match="policy"):
            await s.fleet.configure({"policy": "random"})

    scene(run, policy="random")


def test_a_removed_worker_gives_its_requests_up():
    async def run(s):
        s.add("a")
        await asyncio.sleep(1)
        told = []
        with pytest.raises(WorkerFailedError):
            async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
                assignment.on_broken = lambda: told.append(1)
                await s.fleet.change_workers([], ["a"])
                assert told == [1]
                raise WorkerFailedError("the link was closed")
        assert s.fleet.view().workers == [] and s.fleet.models == {}

    scene(run)


class Publisher:
    """One that a Listening listens to, on virtual time. A batch that nobody heard can be asked for."""

    def __init__(self):
        self.feed, self.batches, self.ts = None, [], 100.0

    async def listen(self, feed):
        self.feed = feed
        while True:
            feed.missing.clear()
            while feed.replay_from is not None:
                for number in range(feed.replay_from, len(self.batches)):
                    feed.replayed(number, self.batches[number])
                feed.replay_ended()
            await feed.missing.wait()

    def publish(self, *events, lost=False, rank=None):
        self.ts += 1
        self.batches.append(encode(EventBatch(self.ts, list(events), rank)))
        if self.feed is not None and not lost:
            self.feed.receive(len(self.batches) - 1, self.batches[-1])

    def store(self, tokens=PROMPT, **more):
        names = [hash(tuple(tokens[: 16 * (n + 1)])) & 2**63 - 1 for n in range(len(tokens) // 16)]
        self.publish(BlockStored(names, None, tokens[: 16 * len(names)], 16, None, GPU, None), **more)
        return names

    def restart(self, ts):
        self.batches, self.ts = [], ts


def overlap(s, name, tokens=PROMPT):
    found = s.fleet.models["m"].index.find_matches(tokens)
    return found[WorkerRank(name)].total if WorkerRank(name) in found else 0


@pytest.mark.parametrize("ts", [500.0, 1.0], ids=["later", "with an earlier clock"])
def test_a_worker_that_came_back_has_forgotten_and_is_learned_again(ts):
    async def run(s):
        publisher, other = Publisher(), list(range(500, 570))
        link = s.add("a", [publisher.listen])
        await asyncio.sleep(1)
        publisher.store()
        publisher.store(other)
        assert overlap(s, "a") == 4 and overlap(s, "a", other) == 4
        link.is_connected = False
        publisher.restart(ts)
        await until(lambda: s.state("a") == "broken")
        link.is_connected = True
        publisher.store(other, lost=True)
        publisher.store(other[:32], lost=True)
        await until(lambda: s.state("a") == "ready")
        await asyncio.sleep(1)
        assert overlap(s, "a") == 0 and overlap(s, "a", other) == 4
        publisher.store()
        assert overlap(s, "a") == 4

    scene(run)


def test_a_worker_that_joins_gets_what_waits_at_another():
    async def run(s):
        s.add("a")
        await until(lambda: s.state("a") == "ready")
        dispatcher, moved = s.fleet.models["m"].dispatcher, []
        async with AsyncExitStack() as stack:
            assignments = [
                await stack.enter_async_context(dispatcher.assign(RoutingRequest(str(i), PROMPT)))
                for i in range(3)
            ]
            for assignment in assignments:
                assignment.on_moving = lambda assignment=assignment: (
                    moved.append(assignment.request_id) or True
                )
            assignments[0].generated(1)
            s.fleet.published("a", [WorkerLoad(num_running=1, num_waiting=2)])
            await asyncio.sleep(3)
            assert not moved
            s.add("b")
            await until(lambda: s.state("b") == "ready")
            await asyncio.sleep(1.5)
            assert moved[0] == "1", "the first that waits"

    scene(run)


def test_ranks_that_events_name_are_kept_apart_without_a_dp_size():
    """Regression: they were merged, and a block that one rank removed was forgotten for the others too."""

    async def run(s):
        publisher, other = Publisher(), list(range(500, 570))
        s.add("a", [publisher.listen], dp_size=None)
        s.add("b", dp_size=None)
        await until(lambda: s.state("a") == s.state("b") == "ready")
        worker, index = s.fleet.workers["a"], s.fleet.models["m"].index
        one, two = WorkerRank("a", 1), WorkerRank("a", 2)
        names = publisher.store(rank=1)
        assert worker.ranks == [one] and index.find_matches(PROMPT)[one].total == 4
        publisher.store(rank=2)
        publisher.store(other, rank=2)
        assert worker.ranks == [one, two] == sorted(index.ranks)
        publisher.publish(BlockRemoved(names, GPU), rank=2)
        assert set(index.find_matches(PROMPT)) == {one} and set(index.find_matches(other)) == {two}
        for tokens, rank in ((PROMPT, one), (other, two)):
            async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("x", tokens)) as assignment:
                assert assignment.choice.rank == rank and assignment.choice.overlap.total == 4
        s.fleet.leave("a")
        assert not index.ranks and await s.went() == "b"

    scene(run)


@pytest.mark.parametrize("dp_size", [1, None])
def test_the_only_rank_of_a_worker_may_have_a_number_of_its_own(dp_size):
    """As each of several servers has that make up one deployment, each with its own address."""

    async def run(s):
        publisher = Publisher()
        s.add("a", [publisher.listen], dp_size=dp_size)
        s.add("b")
        await until(lambda: s.state("a") == s.state("b") == "ready")
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("early", [1])) as early:
            publisher.store(rank=5)
            assert len(s.fleet.workers["a"].ranks) == 1
            early.generated(1)
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("x", PROMPT)) as assignment:
            assert assignment.worker.id == "a" and assignment.choice.overlap.total == 4
        assert [view.active_requests for view in s.fleet.view().workers] == [0, 0]

    scene(run)


def test_what_a_worker_has_broken_and_had_is_counted_on_when_it_is_started_again():
    async def run(s):
        s.add("a")
        await until(lambda: s.state("a") == "ready")
        await s.went()
        s.fleet.workers["a"].failed(WorkerFailedError("the connection broke", is_absent=True))
        s.fleet.leave("a")
        s.add("a", models=("n",))
        [view] = s.fleet.view().workers
        assert (view.requests, view.breaks) == (1, 1)
        for number in range(300):
            s.add(f"b{number}")
            s.fleet.leave(f"b{number}")
        assert len(s.fleet._counts) == MAX_GONE

    scene(run)


def test_a_worker_that_only_hung_keeps_what_it_has():
    async def run(s):
        publisher = Publisher()
        link = s.add("a", [publisher.listen])
        await asyncio.sleep(1)
        publisher.store()
        link.is_hung = True
        await until(lambda: s.state("a") == "broken")
        link.is_hung = False
        await until(lambda: s.state("a") == "ready")
        assert overlap(s, "a") == 4 and publisher.feed.num_lost == 0

    scene(run)


def test_what_was_predicted_goes_with_the_workers_own_word():
    async def run(s):
        publisher = Publisher()
        s.add("a", [publisher.listen])
        await asyncio.sleep(1)
        router = s.fleet.models["m"].router

        def known():
            return router.schedule(PROMPT).overlap.total

        await s.went()
        assert known() == 4  # predicted
        publisher.publish(AllBlocksCleared())
        assert known() == 0
        await s.went()
        names = publisher.store()
        publisher.publish(BlockRemoved(names[2:], GPU))
        assert known() == 2
        await asyncio.sleep(10)
        assert known() == 2

    scene(run)


def test_without_events_decisions_stand_in_and_the_answers_correct_them():
    async def run(s):
        s.add("a")
        await asyncio.sleep(1)
        router = s.fleet.models["m"].router
        longer = PROMPT[:64] + list(range(300, 364))
        await s.went(longer)
        await asyncio.sleep(30)
        assert router.schedule(longer).overlap.total == 8
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
            assignment.cached(16)
            assignment.generated(1)
        assert router.schedule(longer).overlap.total == 4, "it has dropped what lay behind the first block"
        assert s.fleet.view().workers[0].hit_rate == pytest.approx(16 / 198)
        await asyncio.sleep(121)
        assert router.schedule(PROMPT).overlap.total == 0

    scene(run)


def test_load_from_elsewhere_counts_and_our_own_does_not_count_twice():
    async def run(s):
        links = {"a": s.add("a"), "b": s.add("b")}
        await asyncio.sleep(1)
        links["a"].load = [WorkerLoad(num_running=1)]
        await asyncio.sleep(6)
        assert {await s.went() for _ in range(9)} == {"b"}
        links["a"].load = [WorkerLoad()]
        await asyncio.sleep(6)
        async with s.fleet.models["m"].dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
            links[assignment.worker.id].load = [WorkerLoad(num_running=1)]
            await asyncio.sleep(6)
        assert {await s.went() for _ in range(20)} == {"a", "b"}

    scene(run, policy="least_loaded")


def test_a_request_that_only_a_full_worker_can_take_does_not_hold_up_others():
    async def run(s):
        s.add("a", tags=frozenset({"big"}), max_running=1)
        s.add("b", max_running=1)
        await asyncio.sleep(1)
        dispatcher = s.fleet.models["m"].dispatcher
        big = frozenset({"big"})
        order = []

        async def ask(name, seconds, **more):
            async with dispatcher.assign(RoutingRequest(name, PROMPT, **more)) as assignment:
                order.append((name, assignment.worker.id))
                await asyncio.sleep(seconds)

        async with dispatcher.assign(RoutingRequest("1", PROMPT, tags=big)), asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("on b", 5))
            await asyncio.sleep(1)
            waiting = tasks.create_task(ask("big", 0, tags=big))
            await asyncio.sleep(1)
            tasks.create_task(ask("any", 0))
            tasks.create_task(ask("urgent", 0, priority=-1))
            await asyncio.sleep(10)
            assert order == [("on b", "b"), ("urgent", "b"), ("any", "b")]
            assert s.fleet.view().queue.length == 1 and s.fleet.view().queue.oldest_s > 9
            waiting.cancel()
        assert s.fleet.view().queue.length == 0 and s.fleet.view().workers[0].active_requests == 0

    scene(run)


def test_what_is_known_of_a_external_worker_is_shown_and_counted():
    async def run(s):
        link = s.add("a")
        link.load = [WorkerLoad(num_running=2, num_waiting=1, kv_usage=0.25, rank=0)]
        await until(lambda: s.state("a") == "ready")
        await until(lambda: s.fleet.view().workers[0].running)
        dispatcher = s.fleet.models["m"].dispatcher
        async with dispatcher.assign(RoutingRequest("1", PROMPT)) as assignment:
            await asyncio.sleep(0.2)
            assignment.streamed(1)
            for _ in range(3):
                await asyncio.sleep(0.05)
                assignment.streamed(2)
        with pytest.raises(WorkerFailedError):
            async with dispatcher.assign(RoutingRequest("2", PROMPT)):
                raise WorkerFailedError("broke off")
        [view], served = s.fleet.view().workers, s.fleet.served()["a"]
        assert (view.running, view.waiting, view.kv["device"].usage, view.failed) == (2, 1, 0.25, 1)
        assert (served.prompt_tokens, served.output_tokens, served.failed) == (len(PROMPT), 7, 1)
        assert quantiles_of(served.first_token).p50 == pytest.approx(0.2, rel=0.13)
        assert quantiles_of(served.between_tokens).p50 == pytest.approx(0.025, rel=0.13)

    scene(run)


def test_one_of_ours_counts_for_itself():
    async def run(s):
        s.add("a", is_external=False)
        worker = s.fleet.workers["a"]
        assert s.fleet.served() == {}
        worker.stats, worker.served = (
            Stats(num_running=4, num_blocks=10),
            ServedTotals(output_tokens=9, failed=2),
        )
        [view] = s.fleet.view().workers
        assert (view.running, view.kv["device"].usage, view.failed) == (4, 1.0, 2)
        assert s.fleet.served()["a"].output_tokens == 9

    scene(run)
