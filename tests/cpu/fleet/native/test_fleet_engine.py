"""FleetEngine over fake workers, on virtual time: whatever breaks and whenever, every request ends once
and has the tokens that one worker would have given."""

import asyncio
import json
import logging
import os
from contextlib import aclosing
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from shoal.api import FinishReason, Request
from shoal.control import ReadSleepState, ResetPrefixCache
from shoal.errors import (
    BusyError,
    ConfigError,
    EngineDeadError,
    RequestError,
    UnavailableError,
    WorkerFailedError,
)
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.native.fake_worker import TOKEN_S, FakeWorker
from shoal.fleet.native.fleet_engine import MAX_TRIES, FleetEngine
from shoal.fleet.native.worker_wire import Report
from shoal.fleet.routing.dispatcher import Dispatcher
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerInfo, WorkerLoad
from shoal.sampling_params import SamplingParams
from shoal.stats import SleepState, Stats
from shoal.telemetry.logs import JsonFormatter
from shoal.text.reading.thoughts import Start, Thoughts
from shoal.text.thinking_budget import ThinkingBudget

REPLY = range(10, 500)  # another token at each position
BASE_SEED = int(os.environ.get("SHOAL_STORM_SEED", "0"))


class Site:
    def __init__(self, count, *, limit=3, max_running=0, max_queued=1000, seed=0):
        self.clock = LoopClock()
        self.router = KvRouter(KvIndexer(16), policy="round_robin", seed=seed, clock=self.clock.now)
        self.dispatcher = Dispatcher(self.router, max_queued=max_queued, clock=self.clock)
        self.engine = FleetEngine(self.dispatcher, migration_limit=limit)
        self.max_running = max_running
        self.links = []
        for _ in range(count):
            self.add()

    def add(self, tags=()):
        info = WorkerInfo(
            id=f"w{len(self.links)}",
            url="http://127.0.0.1:1",
            models=("m",),
            max_running=self.max_running,
            tags=frozenset(tags),
        )
        link = FakeWorker(info, self.clock)
        link.engine.reply = REPLY
        worker = Worker(info, link, self.clock.now)
        worker.reached()
        self.links.append(link)
        self.dispatcher.add(worker)
        return worker

    def worker(self, i):
        return self.dispatcher.workers[f"w{i}"]

    async def assert_idle(self):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert all(one.is_idle for one in (*self.links, *self.dispatcher.workers.values()))
        assert self.router.active_requests.is_idle and self.dispatcher.is_idle and self.engine.is_idle


def request(name="r", max_tokens=20, prompt=range(1, 40), **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields.pop("params", {}))
    return Request(name, list(prompt), params, **fields)


async def answer(engine, asked):
    """(tokens, finish reason)"""
    ids, finish = [], None
    async with aclosing(engine.generate(asked)) as outputs:
        async for output in outputs:
            assert finish is None and output.request_id == asked.request_id
            ids += output.token_ids
            finish = output.finish_reason
    return ids, finish


WHOLE = (list(REPLY[:20]), FinishReason.LENGTH)


@pytest.mark.parametrize("position", range(20))
def test_a_worker_that_dies_at_any_token_changes_none(position):
    async def run():
        site = Site(2)
        site.links[0].error_at[position] = WorkerFailedError("died")
        assert await answer(site.engine, request()) == WHOLE
        assert [len(link.received) for link in site.links] == [1, 1]
        assert (site.engine.num_migrations, site.engine.num_retries) == ((1, 0) if position else (0, 1))
        await site.assert_idle()

    run_virtual(run())


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("position", range(1, 20))
def test_a_worker_that_dies_beside_a_budget_of_thoughts_changes_none(position, dying):
    marks = {**{i: b"." for i in REPLY}, REPLY[1]: b"<think>", 7: b"</", 8: b"think>"}
    thoughts = Thoughts("qwen3", "<think>", "</think>", (), anywhere=True)
    budget = ThinkingBudget(3, thoughts, Start.UNKNOWN, (7, 8), marks)

    async def run():
        site = Site(2)
        site.links[dying].error_at[position] = WorkerFailedError("died")
        ids, finish = [], None
        async with aclosing(budget.generate(site.engine.generate, request())) as outputs:
            async for output in outputs:
                ids += output.token_ids
                finish = output.finish_reason
        assert ids == [*REPLY[:5], 7, 8, *REPLY[7:20]] and finish is FinishReason.LENGTH
        await site.assert_idle()

    run_virtual(run())


def spans_of(site, outputs):
    """By name and worker: when it began and how long it took, by the clock of the workers."""
    return {
        (span.name, span.worker): (round(at - span.ago_s, 3), round(span.seconds, 3), span.attributes)
        for at, output in outputs
        for span in output.spans or ()
    }


async def timed(site, asked):
    return [(site.clock.now(), output) async for output in site.engine.generate(asked)]


def test_a_move_is_told_with_its_reason_and_how_long_it_took_and_logged_under_the_clients_id(caplog):
    async def run():
        site = Site(2)
        site.links[0].error_at[5] = WorkerFailedError("it was unplugged")
        began = site.clock.now()
        outputs = await timed(site, request(external_id="a client's"))
        told = [at for at, output in outputs if output.spans]
        assert len(told) == 2, "with the first output of each worker"
        found = spans_of(site, outputs)
        assert {name for name, worker in found if worker == "w1"} == {
            "migration",
            "routing",
            "queue",
            "prefill",
        }
        start, seconds, attributes = found["migration", "w1"]
        assert start == pytest.approx(began + 6 * TOKEN_S) and seconds == pytest.approx(TOKEN_S)
        assert attributes == {"from": "w0", "why": "it was unplugged", "output_tokens": 5}
        assert found["routing", "w0"][:2] == (pytest.approx(began), 0)

    caplog.set_level(logging.DEBUG, "shoal.fleet.native.fleet_engine")
    run_virtual(run())
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("DEBUG", 'request goes to worker w0 id="a client\'s"'),
        ("INFO", 'request leaves worker w0 after 5 tokens: it was unplugged id="a client\'s"'),
        ("DEBUG", 'request goes to worker w1 id="a client\'s"'),
    ]
    assert {json.loads(JsonFormatter().format(one))["request_id"] for one in caplog.records} == {"a client's"}


def test_a_wait_for_a_worker_is_told_as_a_queue():
    async def run():
        site = Site(1, max_running=1)
        first = asyncio.create_task(timed(site, request("first")))
        await asyncio.sleep(0.5)
        found = spans_of(site, await timed(site, request("second")))
        assert found["queue", ""][1] == pytest.approx(20 * TOKEN_S - 0.5, abs=0.01)
        assert spans_of(site, await first)["queue", ""][1] == 0
        assert (await timed(site, request("third")))[0][1].queued_seconds == 0

    run_virtual(run())


def test_what_is_sent_again_is_the_request_with_the_tokens_so_far():
    async def run():
        site = Site(2)
        site.links[0].error_at[7] = WorkerFailedError("died")
        asked = request(
            params={
                "seed": 5,
                "presence_penalty": 0.5,
                "min_tokens": 15,
                "logprobs": 2,
                "prompt_logprobs": 1,
            },
            cache_salt="s",
            eos_token_ids=(2,),
        )
        outputs = [output async for output in site.engine.generate(asked)]
        first, second = site.links[0].received[0], site.links[1].received[0]
        assert second.output_token_ids == list(REPLY[:7]) and first.output_token_ids == []
        assert second.params.prompt_logprobs is None and first.params.prompt_logprobs == 1
        second.params.prompt_logprobs = 1
        assert second.params == first.params and second.prompt_token_ids == first.prompt_token_ids
        assert (second.cache_salt, second.eos_token_ids) == ("s", (2,))
        assert second.request_id != first.request_id
        assert sum(len(o.logprobs or ()) for o in outputs) == 20
        assert sum(o.prompt_logprobs is not None for o in outputs) == 1

    run_virtual(run())


def test_the_prompts_cached_tokens_are_those_of_the_first_worker():
    async def run():
        site = Site(2)
        site.links[0].error_at[5] = WorkerFailedError("died")
        site.links[0].engine.cached_tokens, site.links[1].engine.cached_tokens = 0, 32
        told = [output.num_cached_tokens async for output in site.engine.generate(request())]
        assert set(told) == {0}
        assert [site.worker(i).cached_tokens for i in range(2)] == [0, 32], "each worker's own count"

    run_virtual(run())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_request_with_tokens_ends_after_the_limit_of_migrations(limit):
    async def run():
        site = Site(6, limit=limit)
        for link in site.links:
            link.error_at |= {n: WorkerFailedError("died") for n in range(2, 100, 2)}
        ids = []
        with pytest.raises(UnavailableError, match=f"{limit + 1} times .*--migration-limit"):
            async for output in site.engine.generate(request()):
                ids += output.token_ids
        # A worker that goes on at an even position fails at once, and makes no progress.
        assert ids == list(REPLY[:2])
        assert sum(len(link.received) for link in site.links) == limit + 1
        await site.assert_idle()

    run_virtual(run())


def test_a_request_that_kills_every_worker_before_its_first_token_is_given_up():
    async def run():
        site = Site(MAX_TRIES + 3)
        for link in site.links:
            link.error_at[0] = EngineDeadError("the engine core was killed")
        with pytest.raises(UnavailableError, match="the request may be the cause"):
            await answer(site.engine, request())
        assert sum(len(link.received) for link in site.links) == MAX_TRIES
        await site.assert_idle()

    run_virtual(run())


def test_workers_that_are_known_to_be_away_do_not_count_as_killed():
    async def run():
        site = Site(MAX_TRIES + 3)
        for link in site.links[:-1]:
            link.kill()
        assert await answer(site.engine, request()) == WHOLE

    run_virtual(run())


def test_nobody_left_is_told():
    async def run():
        site = Site(2)
        for link in site.links:
            link.kill()
        with pytest.raises(UnavailableError, match="no worker is ready"):
            await answer(site.engine, request())

    run_virtual(run())


def test_an_impossible_request_is_refused_once():
    async def run():
        site = Site(3)
        for link in site.links:
            link.engine.refuses = "no"
        with pytest.raises(RequestError):
            await answer(site.engine, request())
        assert sum(len(link.received) for link in site.links) == 1
        assert all(worker.is_reached for worker in site.dispatcher.workers.values())

    run_virtual(run())


@pytest.mark.parametrize("error", [UnavailableError("asleep"), BusyError("full")], ids=repr)
def test_a_worker_that_takes_nothing_now_is_passed_over_and_not_broken(error):
    async def run():
        site = Site(2)
        site.links[0].error_at[0] = error
        for _ in range(5):
            assert await answer(site.engine, request()) == WHOLE
        assert site.worker(0).is_reached

    run_virtual(run())


def test_a_full_worker_is_waited_for_however_long():
    async def run():
        site = Site(2)
        for link in site.links:
            link.error_at[0] = BusyError("the queue is full", retry_after_s=2.0)
        running = asyncio.create_task(answer(site.engine, request()))
        await site.clock.sleep(100)
        assert not running.done()
        for link in site.links:
            link.error_at.clear()
        assert await running == WHOLE
        await site.assert_idle()

    run_virtual(run())


def test_a_request_that_every_worker_refuses_for_long_is_told_why():
    async def run():
        site = Site(2)
        for link in site.links:
            link.error_at[0] = UnavailableError("the engine sleeps at level 1")
        with pytest.raises(UnavailableError, match="sleeps at level 1"):
            await answer(site.engine, request())
        await site.assert_idle()

    run_virtual(run())


def test_a_worker_that_ends_its_requests_to_sleep_hands_them_on():
    async def run():
        site = Site(2)
        asked = request()
        running = asyncio.create_task(answer(site.engine, asked))
        await site.clock.sleep(5.5 * TOKEN_S)
        owner = next(link for link in site.links if link.running)
        owner.send_abort(owner.received[-1].request_id)
        assert await running == WHOLE
        assert site.engine.num_migrations == 0 and len(site.links[0].received + site.links[1].received) == 2

    run_virtual(run())


def test_an_abort_by_the_caller_is_no_reason_to_migrate():
    async def run():
        site = Site(2)
        running = asyncio.create_task(answer(site.engine, request()))
        await site.clock.sleep(5.5 * TOKEN_S)
        await site.engine.abort("r")
        ids, finish = await running
        assert finish == FinishReason.ABORT and ids == list(REPLY[: len(ids)]) and 0 < len(ids) < 20
        await site.assert_idle()

    run_virtual(run())


def test_a_request_that_is_aborted_while_it_waits_ends_with_its_place():
    async def run():
        site = Site(1, max_running=1)
        first = asyncio.create_task(answer(site.engine, request("a")))
        second = asyncio.create_task(answer(site.engine, request("b")))
        await site.clock.sleep(5.5 * TOKEN_S)
        await site.engine.abort("b")
        assert await first == WHOLE and await second == ([], FinishReason.ABORT)
        await site.assert_idle()

    run_virtual(run())


def test_leaving_the_stream_leaves_the_worker():
    async def run():
        site = Site(1)
        stream = site.engine.generate(request())
        await anext(stream)
        assert site.links[0].running == 1
        await stream.aclose()
        await site.assert_idle()

    run_virtual(run())


def test_a_worker_that_is_removed_hands_its_requests_on():
    async def run():
        site = Site(2)
        asked = [request(f"r{i}") for i in range(4)]
        running = [asyncio.create_task(answer(site.engine, one)) for one in asked]
        await site.clock.sleep(3.5 * TOKEN_S)
        worker = site.worker(0)
        site.dispatcher.remove("w0")
        worker.interrupt()
        assert await asyncio.gather(*running) == [WHOLE] * 4
        assert worker.active == 0
        await site.assert_idle()

    run_virtual(run())


def test_the_owner_is_the_worker_of_the_first_token():
    async def run():
        site = Site(3)
        site.links[0].error_at[0] = WorkerFailedError("died")
        site.links[2].error_at[5] = WorkerFailedError("died")
        asked = request()
        owners = {asked.worker async for _ in site.engine.generate(asked)}
        assert owners == {"w2"} and site.links[1].received, "the first died without a token"

    run_virtual(run())


def test_a_session_stays_with_its_worker():
    async def run():
        site = Site(4)
        site.router._policy = "affinity"
        asked = [request(f"r{i}", session=f"s{i % 2}") for i in range(12)]
        for one in asked:
            await answer(site.engine, one)
        assert all(len({one.worker for one in asked[i::2]}) == 1 for i in range(2))

    run_virtual(run())


def test_a_request_goes_to_workers_with_all_of_its_tags():
    async def run():
        site = Site(2)
        site.add(tags=("x",))
        site.add(tags=("x", "y"))
        for tags, expected in ((("x",), {"w2", "w3"}), (("y", "x"), {"w3"}), ((), {"w0", "w1", "w2", "w3"})):
            asked = [request(f"r{i}", tags=tags) for i in range(8)]
            for one in asked:
                await answer(site.engine, one)
            assert {one.worker for one in asked} == expected
        with pytest.raises(UnavailableError, match="no ready worker has the tags z"):
            await answer(site.engine, request(tags=("z",)))

    run_virtual(run())


def test_the_queue_is_bounded_and_moves_on():
    async def run():
        site = Site(1, max_running=2, max_queued=3)
        running = [asyncio.create_task(answer(site.engine, request(f"r{i}"))) for i in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await answer(site.engine, request("one more"))
        assert (await site.engine.stats()).num_waiting == 3
        assert await asyncio.gather(*running) == [WHOLE] * 5

    run_virtual(run())


def test_stats_are_sums_and_one_awake_worker_is_awake():
    async def run():
        site = Site(3)
        stats = await site.engine.stats()
        assert (stats.num_running, stats.num_blocks, stats.kv_cache_usage) == (3, 30, 0.5)
        asleep = Report(Stats(), SleepState(1, {"weights"}), 0)
        site.links[0].report = site.links[1].report = asleep
        assert not (await site.engine.control(ReadSleepState())).is_sleeping
        site.links[2].report = asleep
        assert (await site.engine.sleep_state()).level == 1
        with pytest.raises(ConfigError):
            await site.engine.control(ResetPrefixCache())

    run_virtual(run())


def test_what_a_worker_has_counted_stays_when_it_is_gone():
    async def run():
        site = Site(2)
        for link in site.links:
            link.report = Report(Stats(num_blocks=10, prefix_cache_hits=7, step_tokens=9), SleepState(), 0)
        assert (await site.engine.stats()).prefix_cache_hits == 14
        site.dispatcher.remove("w0")
        stats = await site.engine.stats()
        assert (stats.num_blocks, stats.prefix_cache_hits, stats.step_tokens) == (10, 14, 18)

    run_virtual(run())


def test_requests_that_wait_at_a_worker_move_to_one_that_joins():
    """Regression: they waited beside it until the first worker had come to them."""

    async def run():
        site = Site(1)
        site.links[0].slots = asyncio.Semaphore(2)
        asked = [asyncio.create_task(answer(site.engine, request(f"r{i}"))) for i in range(7)]
        await site.clock.sleep(0.9)
        site.worker(0).loads = [WorkerLoad(num_running=2, num_waiting=5)]
        site.add()
        site.dispatcher.rebalance()
        await site.clock.sleep(0.2)
        assert not site.links[1].received, "a wait so short is not worth a move"
        site.dispatcher.rebalance()
        await site.clock.sleep(0.05)
        moved = [one.request_id for one in site.links[1].received]
        assert moved == ["r2.2", "r3.2"], "the first that wait, as many as the other worker runs"
        site.dispatcher.rebalance()
        assert await asyncio.gather(*asked) == [WHOLE] * 7
        assert len(site.links[1].received) == 2 and len(site.links[0].received) == 7
        assert (site.engine.num_migrations, site.engine.num_retries) == (0, 0)
        assert all(worker.num_failed == 0 for worker in site.dispatcher.workers.values())
        await site.assert_idle()

    run_virtual(run())


def test_a_request_stays_where_it_waits_if_no_other_worker_would_run_it_at_once():
    async def run():
        site = Site(1)
        site.links[0].slots = asyncio.Semaphore(1)
        asked = [asyncio.create_task(answer(site.engine, request(f"r{i}", tags=("x",)))) for i in (0,)]
        site.dispatcher.workers["w0"].info = msgspec.structs.replace(
            site.worker(0).info, tags=frozenset({"x"})
        )
        asked += [asyncio.create_task(answer(site.engine, request(f"r{i}", tags=("x",)))) for i in (1, 2)]
        await site.clock.sleep(1.1)
        site.add()  # without the tag
        busy = site.add(("x",))
        busy.loads = [WorkerLoad(num_running=3, num_waiting=1)]
        site.worker(0).loads = [WorkerLoad(num_running=1, num_waiting=2)]
        site.dispatcher.rebalance()
        asked[2].cancel()  # its client leaves
        await asyncio.gather(*asked[:2])
        assert [len(link.received) for link in site.links] == [3, 0, 0]

    run_virtual(run())


@pytest.mark.parametrize("seed", range(BASE_SEED, BASE_SEED + 30))
def test_in_a_storm_every_request_ends_once_with_the_right_tokens(seed):
    """Workers die, come, drain, sleep and forget; clients leave. SHOAL_STORM_SEED chooses other storms."""
    print(f"SHOAL_STORM_SEED={seed}")
    random = Random(seed)
    outcome = SimpleNamespace(whole=0, left=0, failed=0)

    async def client(site, i):
        await site.clock.sleep(random.uniform(0, 20))
        length = random.randint(1, 60)
        asked = request(f"r{i}", length, range(random.randint(1, 80)))
        leaves_after = random.randint(0, length) if random.random() < 0.2 else None
        ids, finish = [], None
        stream = site.engine.generate(asked)
        try:
            async for output in stream:
                assert finish is None
                ids, finish = ids + output.token_ids, output.finish_reason
                if leaves_after is not None and len(ids) >= leaves_after:
                    break
        except UnavailableError:
            outcome.failed += 1
        else:
            if finish is None:
                assert leaves_after is not None
                outcome.left += 1
            else:
                assert finish == FinishReason.LENGTH and len(ids) == length
                outcome.whole += 1
        finally:
            await stream.aclose()
        assert ids == list(REPLY[: len(ids)])

    async def trouble(site):
        for _ in range(40):
            await site.clock.sleep(random.uniform(0, 1))
            kind = random.choice(["kill", "drain", "hang", "abort", "fault", "move"])
            worker = random.choice(list(site.dispatcher.workers.values()))
            link = worker.link
            if kind == "kill":
                link.kill()
                site.add()
                await site.clock.sleep(random.uniform(0, 3))
                site.dispatcher.remove(worker.id)
                worker.interrupt()
            elif kind == "drain":
                worker.is_draining = not worker.is_draining
                worker.changed()
            elif kind == "hang":
                worker.hung(WorkerFailedError("it hangs"))
                await site.clock.sleep(random.uniform(0, 1))
                worker.reached()
            elif kind == "move":
                worker.loads = [
                    WorkerLoad(num_running=random.randint(0, 9), num_waiting=random.randint(0, 9))
                ]
                site.dispatcher.rebalance()
            elif kind == "abort":
                for one in link.received[-3:]:
                    link.send_abort(one.request_id)
            else:
                link.error_at = {
                    random.randint(0, 60): random.choice([WorkerFailedError("x"), BusyError("y")])
                }

    async def run():
        site = Site(4, limit=20, max_running=random.choice([0, 3]), seed=seed)
        await asyncio.gather(trouble(site), *[client(site, i) for i in range(60)])
        assert outcome.whole + outcome.left + outcome.failed == 60
        assert outcome.whole > 20
        await site.assert_idle()

    run_virtual(run())


@pytest.mark.parametrize("position", [None, 0, 5])
def test_traffic_counts_a_request_once_whatever_workers_it_had(position):
    async def run():
        site = Site(2)
        if position is not None:
            site.links[0].error_at[position] = WorkerFailedError("died")
        before, begun = site.dispatcher.traffic, site.clock.now()
        await answer(site.engine, request())
        seconds = site.clock.now() - begun
        assert (before.num_requests, before.input_tokens, before.num_first) == (1, 39, 1)
        assert (before.num_ended, before.output_tokens, before.num_gaps) == (1, 20, 19)
        assert before.ttft_s >= TOKEN_S and before.ttft_s + before.gaps_s == pytest.approx(seconds)

    run_virtual(run())


def test_in_a_large_fleet_the_last_worker_with_room_is_found():
    """A choice looks at some of the workers, and at all before it lets a request wait."""

    async def run():
        site = Site(100, max_running=1)
        site.router._policy = "least_loaded"
        answers = [answer(site.engine, request(f"r{n}")) for n in range(100)]
        assert await asyncio.gather(*answers) == [WHOLE] * 100
        assert site.dispatcher.times.queue.sum == 0
        assert [len(link.received) for link in site.links] == [1] * 100
        await site.assert_idle()

    run_virtual(run())
