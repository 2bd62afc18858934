"""Routers that share their active requests, on a registry of this process and on virtual time."""

import asyncio
from collections import Counter
from random import Random

from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.config import FleetConfig
from shoal.fleet.index.indexer import WorkerRank
from shoal.fleet.native.fake_worker import FakeWorker
from shoal.fleet.pool.fleet import Fleet
from shoal.fleet.registry.embedded import EmbeddedRegistry, Host
from shoal.fleet.routing.active_requests import Ended
from shoal.fleet.routing.dispatcher import RoutingRequest
from shoal.fleet.worker import Worker, WorkerInfo

PROMPT = list(range(100, 170))
LEASE_S = 6.0


class Routers:
    """Routers over the same workers."""

    def __init__(self, *, workers="ab", **options):
        self.clock, self.random, self.workers = LoopClock(), Random(0), workers
        self.host = Host(self.clock, LEASE_S)
        self.options = {"seed": 1, "policy": "least_loaded", "lease": LEASE_S, **options}
        self.fleets = []

    async def add(self, **more):
        registry = EmbeddedRegistry.of_host(self.host, self.clock, self.random, LEASE_S)
        fleet = Fleet(FleetConfig(**self.options), self.clock, registry)
        self.fleets.append(fleet)
        await fleet.start()
        for name in self.workers:
            info = WorkerInfo(id=name, url=f"http://{name}:1", models=("m",), is_external=True, **more)
            fleet.join(Worker(info, FakeWorker(info, self.clock), self.clock.now))
        await asyncio.sleep(1)
        return fleet

    def kill(self, fleet):
        """Stops a router like kill -9."""
        for task in fleet.registry._tasks:
            task.cancel()
        self.fleets.remove(fleet)

    async def close(self):
        for fleet in self.fleets:
            await fleet.close()
            await fleet.registry.close()
        self.host.close()


def load(fleet, name):
    return fleet.models["m"].router.active_requests.load(WorkerRank(name))


def assign(fleet, request_id, **more):
    return fleet.models["m"].dispatcher.assign(RoutingRequest(request_id, PROMPT, **more))


def scene(run, **options):
    async def main():
        routers = Routers(**options)
        try:
            await run(routers)
        finally:
            await routers.close()

    run_virtual(main())


def test_each_router_knows_the_requests_of_the_other():
    async def run(routers):
        one, other = await routers.add(), await routers.add()
        async with assign(one, "1") as mine:
            await asyncio.sleep(0.1)
            there = mine.worker.id
            assert load(other, there).active_requests == 1 and load(other, there).prefill_tokens == 70
            for number in range(6):
                async with assign(other, f"o{number}") as theirs:
                    assert theirs.worker.id != there
            mine.generated(1)
            await asyncio.sleep(0.1)
            assert load(other, there).prefill_tokens == 0 and load(other, there).active_requests == 1
        await asyncio.sleep(0.1)
        assert load(other, there).active_requests == 0 == load(other, there).active_tokens

    scene(run)


def test_a_router_that_joins_late_gets_the_active_requests():
    async def run(routers):
        one = await routers.add()
        async with assign(one, "1") as mine, assign(one, "2") as second:
            mine.generated(1)
            late = await routers.add()
            assert load(late, mine.worker.id).active_requests == 1
            assert load(late, mine.worker.id).prefill_tokens == 0
            assert load(late, second.worker.id).prefill_tokens == 70

    scene(run)


def test_requests_of_a_dead_router_are_dropped_within_its_lease():
    async def run(routers):
        one, other = await routers.add(), await routers.add()
        async with assign(one, "1") as mine:
            await asyncio.sleep(0.1)
            routers.kill(one)
            await asyncio.sleep(LEASE_S + 0.2)
            assert load(other, mine.worker.id).active_requests == 0
            assert other.replica_sync.num_routers == 0

    scene(run)


def test_a_lost_end_is_corrected_by_the_next_full_list():
    async def run(routers):
        one, other = await routers.add(), await routers.add()
        async with assign(one, "1") as mine:
            await asyncio.sleep(0.1)
            heard = one.models["m"].router.active_requests.on_change
            one.models["m"].router.active_requests.on_change = lambda change: (
                None if isinstance(change, Ended) else heard(change)
            )
        await asyncio.sleep(1)
        assert load(other, mine.worker.id).active_requests == 1
        await asyncio.sleep(31)
        assert load(other, mine.worker.id).active_requests == 0

    scene(run)


def test_a_stream_of_hours_stays_active_at_other_routers():
    async def run(routers):
        one, other = await routers.add(), await routers.add()
        async with assign(one, "1") as mine:
            mine.generated(1)
            for _ in range(240):
                await asyncio.sleep(60)
                mine.generated(1)
            assert load(one, mine.worker.id).active_requests == 1
            assert load(other, mine.worker.id).active_requests == 1
        await asyncio.sleep(1)
        assert load(other, mine.worker.id).active_requests == 0

    scene(run)


def test_two_routers_do_not_fill_a_worker_beyond_its_room():
    async def run(routers):
        one, other = await routers.add(max_running=1), await routers.add(max_running=1)
        async with assign(one, "1"), assign(one, "2"):
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(assign(other, "3").__aenter__())
            await asyncio.sleep(10)
            assert not waiting.done() and other.view().queue.length == 1
        await asyncio.sleep(0.1)
        assert waiting.done()

    scene(run)


def test_without_events_prompts_of_the_other_router_count_as_cached():
    async def run(routers):
        one, other = await routers.add(), await routers.add()
        async with assign(one, "1") as mine:
            mine.generated(1)
        await asyncio.sleep(1)
        choice = other.models["m"].router.schedule(PROMPT)
        assert (choice.rank.worker, choice.overlap.total) == (mine.worker.id, 4)

    scene(run, policy="kv")


def busiest(num_routers, num_sites):
    """Returns the average load of the busiest of eight workers with 64 requests in all. Routers share their
    active requests within their site alone."""
    mean_load, num_requests, seconds = 64, 600, 0.5

    async def main():
        rng, active, seen = Random(5), Counter(), []
        sites = [Routers(workers="abcdefgh") for _ in range(num_sites)]
        fleets = [await sites[number % num_sites].add() for number in range(num_routers)]

        async def ask(number):
            dispatcher = fleets[number % num_routers].models["m"].dispatcher
            async with dispatcher.assign(RoutingRequest(str(number), [number] * 20)) as assignment:
                active[assignment.worker.id] += 1
                seen.append(max(active.values()))
                assignment.generated(1)
                await asyncio.sleep(rng.expovariate(1 / seconds))
                active[assignment.worker.id] -= 1

        async with asyncio.TaskGroup() as asked:
            for number in range(num_requests):
                asked.create_task(ask(number))
                await asyncio.sleep(rng.expovariate(mean_load / seconds))
        for site in sites:
            await site.close()
        steady = seen[num_requests // 3 :]
        return sum(steady) / len(steady)

    return run_virtual(main())


def test_several_routers_spread_load_as_one_does():
    alone, shared, apart = busiest(1, 1), busiest(6, 1), busiest(6, 6)
    print(
        f"the busiest worker has {alone:.1f} of 64 with one router, {shared:.1f} with six, {apart:.1f} apart"
    )
    assert shared < alone + 0.6 < apart
