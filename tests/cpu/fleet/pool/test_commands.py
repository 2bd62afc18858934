"""One command for many workers: at once, or rolling without a failed request."""

import asyncio

import pytest

from shoal.control import MemoryUsage, Sleep, UpdateWeights, WakeUp
from shoal.errors import CheckpointError, ConfigError, UnavailableError, WorkerFailedError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.index.indexer import KvIndexer
from shoal.fleet.native.fake_worker import FakeWorker
from shoal.fleet.pool.commands import command_workers
from shoal.fleet.routing.dispatcher import Dispatcher, RoutingRequest
from shoal.fleet.routing.kv_router import KvRouter
from shoal.fleet.worker import Worker, WorkerInfo
from shoal.fleet_views import WorkerState


class Rig:
    def __init__(self, names):
        router = KvRouter(KvIndexer(16), policy="round_robin", seed=0)
        self.dispatcher = Dispatcher(router, max_queued=1000, clock=LoopClock())
        self.log = []
        self.workers = []
        for name in names:
            info = WorkerInfo(id=name, url="http://w", models=("m",))
            link = FakeWorker(info, LoopClock())
            link.log, link.command_s = self.log, 5.0
            worker = Worker(info, link, LoopClock().now)
            worker.reached()
            self.workers.append(worker)
            self.dispatcher.add(worker)
        self.served = []

    async def ask(self, number, seconds=2.0):
        async with self.dispatcher.assign(RoutingRequest(str(number), [number] * 20)) as assignment:
            worker = assignment.worker
            assert not worker.num_holds and not worker.is_asleep
            worker.link.running += 1
            await asyncio.sleep(seconds)
            worker.link.running -= 1
            self.served.append(worker.id)

    def begin(self, count, **more):
        return [asyncio.create_task(self.ask(number, **more)) for number in range(count)]

    async def command(self, command, rolling=False, workers=None):
        return await command_workers(workers or self.workers, command, rolling=rolling)


def virtual(test):
    """Runs it on virtual time."""
    return lambda: run_virtual(test())


@virtual
async def test_at_once_asks_all_at_the_same_time():
    rig = Rig("abc")
    found = await rig.command(MemoryUsage())
    expected = await rig.workers[0].link.engine.control(MemoryUsage())
    assert LoopClock().now() == 5.0 and found.results == dict.fromkeys("abc", expected) and not found.errors


@virtual
async def test_rolling_asks_one_after_the_other_and_none_has_a_request_meanwhile():
    rig = Rig("abc")
    asking = rig.begin(9)
    await asyncio.sleep(0)
    rolling = asyncio.create_task(rig.command(UpdateWeights("x"), rolling=True))
    while not rolling.done():
        asking += [asyncio.create_task(rig.ask(len(asking)))]
        await asyncio.sleep(0.5)
    await asyncio.gather(*asking)
    found = await rolling
    assert found.results == found.versions == {"a": 1, "b": 1, "c": 1}
    assert rig.log == [(name, when, 0) for name in "abc" for when in ("begins", "ends")]
    assert len(rig.served) == len(asking) > 30 and set(rig.served) == set("abc")
    assert all(worker.state == WorkerState.READY for worker in rig.workers)


@virtual
async def test_requests_wait_for_the_only_worker():
    rig = Rig("a")
    rolling = asyncio.create_task(rig.command(UpdateWeights("x"), rolling=True))
    await asyncio.sleep(1)
    assert rig.workers[0].state == WorkerState.DRAINING
    await asyncio.gather(*rig.begin(3))
    assert (await rolling).results == {"a": 1} and rig.served == ["a"] * 3


@virtual
async def test_a_request_that_leaves_just_as_it_gets_its_place_holds_up_no_command():
    rig = Rig("a")
    [worker] = rig.workers
    worker.full_until = float("inf")
    [asking] = rig.begin(1)
    await asyncio.sleep(1)
    idle = asyncio.create_task(worker.wait_idle())
    worker.full_until = 0.0
    rig.dispatcher.changed()
    assert worker.active == 1
    asking.cancel()
    await asyncio.wait_for(idle, 60)
    assert worker.active == 0


@virtual
async def test_those_who_leave_the_queue_are_forgotten_at_once():
    rig = Rig("a")
    rig.dispatcher.busy_prefill_tokens = 1
    first, *others = rig.begin(100, seconds=1e9)
    await asyncio.sleep(1)
    for one in others[1:]:
        one.cancel()
    await asyncio.sleep(1)
    assert rig.dispatcher.queue.length == len(rig.dispatcher._waiting) == 1
    first.cancel()
    await asyncio.sleep(1)
    assert not rig.dispatcher._waiting and not others[0].done(), "the one that stayed has its place"


@virtual
async def test_a_failure_ends_a_rolling_command_and_says_who_has_which_version():
    rig = Rig("abc")
    rig.workers[1].link.command_error = CheckpointError("no such folder")
    found = await rig.command(UpdateWeights("x"), rolling=True)
    assert found.results == {"a": 1} and list(found.errors) == ["b"] and found.not_asked == ["c"]
    assert found.versions == {"a": 1, "b": 0, "c": 0}
    assert all(worker.takes_requests for worker in rig.workers)


@virtual
async def test_a_failure_at_once_leaves_the_others_done():
    rig = Rig("abc")
    rig.workers[1].link.command_error = WorkerFailedError("it died")
    found = await rig.command(UpdateWeights("x"))
    assert found.results == {"a": 1, "c": 1} and list(found.errors) == ["b"] and not found.not_asked


@virtual
async def test_a_worker_that_an_operator_drains_stays_so():
    rig = Rig("ab")
    rig.workers[0].is_draining = True
    await rig.command(UpdateWeights("x"), rolling=True)
    assert [worker.state for worker in rig.workers] == [WorkerState.DRAINING, WorkerState.READY]


@virtual
async def test_whoever_leaves_a_rolling_command_leaves_no_worker_held():
    rig = Rig("ab")
    rolling = asyncio.create_task(rig.command(UpdateWeights("x"), rolling=True))
    await asyncio.sleep(1)
    rolling.cancel()
    await asyncio.gather(rolling, return_exceptions=True)
    assert all(
        worker.takes_requests and not worker.on_change - {rig.dispatcher.changed} for worker in rig.workers
    )


@virtual
async def test_a_worker_is_held_until_the_last_of_two_rolling_commands_has_ended():
    rig = Rig("a")
    first = asyncio.create_task(rig.command(UpdateWeights("x"), rolling=True))
    await asyncio.sleep(2)
    second = asyncio.create_task(rig.command(UpdateWeights("y"), rolling=True))
    await first
    assert rig.workers[0].state == WorkerState.DRAINING
    await second
    assert rig.workers[0].state == WorkerState.READY


@virtual
async def test_a_sleeping_worker_gets_nothing_until_it_is_woken():
    rig = Rig("ab")
    sleeping = asyncio.create_task(rig.command(Sleep(), workers=rig.workers[:1]))
    await asyncio.sleep(1)
    await asyncio.gather(*rig.begin(3))  # also while it falls asleep
    await sleeping
    await asyncio.gather(*rig.begin(3))
    assert rig.served == ["b"] * 6
    await rig.command(Sleep(), workers=rig.workers[1:])
    with pytest.raises(UnavailableError, match="sleep"):
        await rig.ask(7)
    await rig.command(WakeUp())
    await asyncio.gather(*rig.begin(4))
    assert set(rig.served[6:]) == {"a", "b"}


@virtual
async def test_a_request_wakes_a_worker_where_that_is_configured_and_waits_for_it():
    rig = Rig("ab")
    await rig.command(Sleep())
    waking = []

    def wake(worker):
        if not waking:
            waking.append(asyncio.create_task(rig.command(WakeUp(), workers=[worker])))
        return True

    rig.dispatcher.wake = wake
    began = LoopClock().now()
    await asyncio.gather(*rig.begin(3))
    assert rig.served == ["a"] * 3 and LoopClock().now() == began + 7
    assert rig.workers[1].is_asleep


@virtual
async def test_a_paused_worker_is_woken_by_no_request():
    rig = Rig("a")
    await rig.command(Sleep(level=0))
    rig.dispatcher.wake = lambda worker: pytest.fail("it was woken")
    with pytest.raises(UnavailableError, match=r"paused; .*POST /resume"):
        await rig.ask(1)


@virtual
async def test_a_pause_is_lifted_by_no_request_although_a_worker_sleeps_that_could_be_woken():
    for asleep in ("a", "b", "ab"):
        rig = Rig("ab")
        await rig.command(Sleep(level=1), workers=[each for each in rig.workers if each.id in asleep])
        await rig.command(Sleep(level=0))
        rig.dispatcher.wake = lambda worker: pytest.fail("it was woken")
        with pytest.raises(UnavailableError, match="paused"):
            await rig.ask(1)
        await rig.command(WakeUp())
        await rig.ask(2)
        await rig.command(Sleep(level=1))
        rig.dispatcher.wake = lambda worker: False
        with pytest.raises(UnavailableError, match="sleep"):  # the pause is over
            await rig.ask(3)


@virtual
async def test_a_worker_that_could_not_fall_asleep_is_awake():
    rig = Rig("a")
    rig.workers[0].link.command_error = UnavailableError("no memory")
    assert list((await rig.command(Sleep())).errors) == ["a"]
    await rig.ask(1)
    assert rig.served == ["a"]


@virtual
async def test_a_external_worker_is_named():
    rig = Rig("ab")
    rig.workers[1].info = WorkerInfo(id="b", url="http://w", models=("m",), is_external=True)
    with pytest.raises(ConfigError, match="b: sleep needs native workers"):
        await rig.command(Sleep())
    assert not rig.log
