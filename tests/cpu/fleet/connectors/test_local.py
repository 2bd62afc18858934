"""Places of this host's workers while their supervisor does not answer, when workers are given up, and while they
end, on virtual time."""

import asyncio

import pytest

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.connectors.connector import Component, ConnectorContext
from shoal.fleet.connectors.local import LocalConnector, Running
from shoal.fleet.connectors.state_file import StateFile
from shoal.fleet_views import WorkerState

ONE_GPU = Component("m", ("run",), "m", devices=("0",), count=0)


class Slow:
    """A Supervisor whose answers take a second. `is_away`: it answers to nobody. `given_up`: workers that are not
    started again; `is_bad`: so is each that starts. It is the RouterView, too, where each worker has requests for
    `busy_s` seconds."""

    def __init__(self):
        self.names, self.is_away = [], False
        self.given_up, self.is_bad = set(), False
        self.broken = set()  # their processes are there, and do not serve
        self.busy_s = 0.0

    async def _answer(self):
        await asyncio.sleep(1.0)
        if self.is_away:
            raise UnavailableError("the supervisor does not answer")

    async def open(self, leftovers):
        pass

    async def running(self):
        found = {name: Running(None, name in self.given_up) for name in self.names}
        await self._answer()
        return found

    async def start(self, placement):
        await self._answer()
        self.names.append(placement.id)
        if self.is_bad:
            self.given_up.add(placement.id)

    async def stop(self, worker_id, grace_s):
        await self._answer()
        self.names.remove(worker_id)
        self.given_up.discard(worker_id)
        self.broken.discard(worker_id)

    async def close(self, grace_s):
        self.names.clear()

    def state_of(self, worker_id):
        if worker_id in self.broken:
            return WorkerState.BROKEN
        lives = worker_id in self.names and worker_id not in self.given_up
        return WorkerState.READY if lives else None

    def role_of(self, worker_id):
        return None

    async def add(self, spec):
        pass

    async def retire(self, worker_id):
        await asyncio.sleep(self.busy_s)

    async def remove(self, worker_id):
        pass


def run(tmp_path, test, *components):
    async def main():
        slow = Slow()
        connector = LocalConnector(
            ConnectorContext(components, slow, LoopClock(), 60.0, None, tmp_path), slow
        )
        await connector.start()
        await test(slow, connector)
        await connector.close(0.0)

    run_virtual(main())


def test_a_start_that_nobody_answers_to_leaves_no_gpu_taken(tmp_path):
    async def test(slow, connector):
        place = await connector.place("m", "both")
        slow.is_away = True
        with pytest.raises(UnavailableError, match="does not answer"):
            await connector.begin(place)
        slow.is_away = False
        assert await connector.add("m", "both") == "m-1"

    run(tmp_path, test, ONE_GPU)


def test_a_worker_whose_end_nobody_answers_to_keeps_its_gpu(tmp_path):
    async def test(slow, connector):
        await connector.add("m", "both")
        slow.is_away = True
        removing = asyncio.create_task(connector.end("m-1"))
        with pytest.raises(UnavailableError, match="does not answer"):
            await removing
        slow.is_away = False
        with pytest.raises(ConfigError, match="needs 1 devices, and 0 of 1 are free"):
            await connector.add("m", "both")
        assert await connector.remove("m", "both") == "m-1"
        assert await connector.add("m", "both") == "m-1"

    run(tmp_path, test, ONE_GPU)


def test_a_worker_that_starts_during_a_look_keeps_its_place_when_the_file_is_lost(tmp_path):
    async def test(slow, connector):
        place = await connector.place("m", "both")
        looking = asyncio.create_task(connector._poll())
        await asyncio.sleep(0.5)
        slow.names.append(place.id)
        await connector._launch(place, is_running=True)
        await looking
        StateFile(tmp_path).path.unlink()
        await connector._poll()
        with pytest.raises(ConfigError, match="0 of 1 are free"):
            await connector.place("m", "both")

    run(tmp_path, test, ONE_GPU)


TWO_GPUS = Component("m", ("run",), "m", devices=("0", "1"), count=2)


def sharing(name, count=1, devices_per_worker=1):
    """Workers of one of several kinds that share two GPUs."""
    return Component(
        name,
        ("run",),
        name,
        devices=("0", "1"),
        devices_per_worker=devices_per_worker,
        shares_devices=True,
        count=count,
    )


def places(tmp_path):
    """The GPUs of each worker that has a place."""
    components = StateFile(tmp_path).read().components
    return {
        f"{name}-{number}": worker.devices
        for name, entry in components.items()
        for number, worker in entry.workers.items()
    }


async def give_up(slow, connector, *names):
    slow.given_up |= set(names)
    await connector._poll()


def test_the_next_worker_takes_the_place_of_one_that_was_given_up(tmp_path):
    """Regression: a crash-looping worker kept its GPU, so the planner could not add one."""

    async def test(slow, connector):
        await give_up(slow, connector, "m-1")
        assert places(tmp_path) == {"m-1": ["0"], "m-2": ["1"]}, "people see it until another one comes"
        assert await connector.add("m", "both") == "m-1"
        assert slow.names == ["m-2", "m-1"] and not slow.given_up
        assert places(tmp_path) == {"m-1": ["0"], "m-2": ["1"]}
        with pytest.raises(ConfigError, match="needs 1 devices, and 0 of 2 are free"):
            await connector.add("m", "both")

    run(tmp_path, test, TWO_GPUS)


def test_workers_that_are_added_at_once_take_no_place_of_one_that_was_given_up_twice(tmp_path):
    async def test(slow, connector):
        await give_up(slow, connector, "m-1", "m-2")
        adding = [connector.add("m", "both") for _ in range(2)]
        assert sorted(await asyncio.gather(*adding)) == ["m-1", "m-2"]
        assert places(tmp_path) == {"m-1": ["0"], "m-2": ["1"]}

    run(tmp_path, test, TWO_GPUS)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_worker_that_has_not_served_for_too_long_ends_before_another_takes_its_place(is_back, tmp_path):
    """Regression: a failed worker kept its GPU in addition to its successor, beyond the planner's budget."""

    async def test(slow, connector):
        assert connector.pending("m") == 0
        slow.broken.add("m-1")
        assert connector.pending("m") == 1
        await asyncio.sleep(59.0)
        if is_back:
            slow.broken.clear()
            assert connector.pending("m") == 0
            slow.broken.add("m-1")
            assert connector.pending("m") == 1
        await asyncio.sleep(2.0)
        assert connector.pending("m") == is_back
        if is_back:
            with pytest.raises(ConfigError, match="0 of 2 are free"):
                await connector.add("m", "both")
        else:
            assert await connector.add("m", "both") == "m-1" and slow.names == ["m-2", "m-1"]

    run(tmp_path, test, TWO_GPUS)


def test_a_gpu_of_a_worker_that_was_given_up_is_free_for_those_who_share_it(tmp_path):
    async def test(slow, connector):
        await give_up(slow, connector, "a-1")
        assert await connector.add("b", "both") == "b-2"
        assert places(tmp_path) == {"b-1": ["1"], "b-2": ["0"]} and slow.names == ["b-1", "b-2"]

    run(tmp_path, test, sharing("a"), sharing("b"))


def test_a_worker_that_was_given_up_stays_noted_where_others_find_room_without_its_gpu(tmp_path):
    async def test(slow, connector):
        await give_up(slow, connector, "a-1")
        assert await connector.add("b", "both") == "b-1"
        assert places(tmp_path) == {"a-1": ["0"], "b-1": ["1"]}

    run(tmp_path, test, sharing("a"), sharing("b", 0))


def test_a_worker_that_was_given_up_is_none_of_those_that_have_a_role_and_none_that_is_removed_first(
    tmp_path,
):
    async def test(slow, connector):
        assert connector.roles() == ["both", "both"]
        await give_up(slow, connector, "m-2")
        assert connector.roles() == ["both"]
        assert await connector.remove("m", "both") == "m-1"
        assert connector.roles() == [] and await connector.remove("m", "both") == "m-2"

    run(tmp_path, test, TWO_GPUS)


@pytest.mark.parametrize("later_s", [0.1 * number for number in range(10)])
def test_a_fleet_has_hope_when_the_first_worker_of_a_planner_does_not_start(tmp_path, later_s):
    """Regression: the fleet ended, depending on the moment of the check, although other workers may serve and the
    planner tries the addition again."""

    async def test(slow, connector):
        slow.is_bad = True
        await asyncio.sleep(later_s)
        all_failed = asyncio.create_task(connector.wait_until_all_failed())
        for _ in range(3):
            with pytest.raises(UnavailableError, match="does not stay alive and is taken back"):
                await connector.add("m", "both")
            await asyncio.sleep(5.0)
            assert not all_failed.done() and not connector.roles()
        all_failed.cancel()

    run(tmp_path, test, ONE_GPU)


def test_no_more_of_those_that_were_given_up_are_forgotten_than_make_room(tmp_path):
    async def test(slow, connector):
        slow.given_up |= {"a-1", "b-1"}
        with pytest.raises(ConfigError, match="needs 3 devices"):
            await connector.add("large", "both")
        assert set(slow.names) == {"a-1", "b-1"}
        assert await connector.add("m", "both") == "m-1"
        assert set(slow.names) == {"b-1", "m-1"}

    run(
        tmp_path, test, sharing("a"), sharing("b"), sharing("m", 0), sharing("large", 0, devices_per_worker=3)
    )


def test_a_fleet_has_hope_while_a_worker_that_was_given_up_is_replaced_and_none_when_that_failed(tmp_path):
    async def test(slow, connector):
        await connector.remove("m", "both")
        await give_up(slow, connector, "m-1")
        slow.is_bad = True
        adding = asyncio.create_task(connector.add("m", "both"))
        while connector._running:
            await asyncio.sleep(0.1)
        all_failed = asyncio.create_task(connector.wait_until_all_failed())
        while not slow.names:
            await asyncio.sleep(0.1)
            assert not all_failed.done()
        with pytest.raises(UnavailableError, match="m-1 does not stay alive"):
            await adding
        await asyncio.wait_for(all_failed, 5.0)
        slow.is_bad = False
        assert await connector.add("m", "both") == "m-1"

    run(tmp_path, test, TWO_GPUS)


EXTERNAL = Component("m", ("run", "{port}"), "m", worker="http://127.0.0.1:{port}")


@pytest.mark.parametrize("busy_s", [0.0, 70.0, 590.0])
def test_a_worker_of_another_engine_ends_when_its_requests_have(tmp_path, busy_s, caplog):
    """Regression: the requests were broken after a minute."""

    async def test(slow, connector):
        slow.busy_s = busy_s
        removing = asyncio.create_task(connector.remove("m", "both"))
        await asyncio.sleep(busy_s)
        assert slow.names == ["m-1"]
        await asyncio.sleep(5.0)
        assert slow.names == [] and await removing == "m-1" and not caplog.text

    run(tmp_path, test, EXTERNAL)


def test_a_request_that_hangs_does_not_keep_a_worker_of_another_engine_for_ever(tmp_path, caplog):
    async def test(slow, connector):
        slow.busy_s = float("inf")
        assert await asyncio.wait_for(connector.remove("m", "both"), 610.0) == "m-1"
        assert "m-1 ends with requests that did not finish within 600 s" in caplog.text

    run(tmp_path, test, EXTERNAL)


def test_a_fleet_that_ends_does_not_wait_for_a_worker_that_was_to_end_before(tmp_path):
    async def test(slow, connector):
        slow.busy_s = float("inf")
        removing = asyncio.create_task(connector.remove("m", "both"))
        await asyncio.sleep(10.0)
        begun = connector._clock.now()
        removing.cancel()
        await connector.close(60.0)
        assert slow.names == [] and connector._clock.now() - begun < 1.0

    run(tmp_path, test, EXTERNAL)


def full_disk(folder):
    """Makes writes of the state fail."""
    (folder / "state.new").mkdir()


def test_a_worker_is_parked_only_on_record_and_the_record_that_it_woke_may_come_later(tmp_path, caplog):
    async def test(slow, connector):
        full_disk(tmp_path)
        with pytest.raises(IsADirectoryError):
            connector.record_parked("m-1", True)
        (tmp_path / "state.new").rmdir()
        connector.record_parked("m-1", True)
        assert connector.parked() == [("m-1", "m", "both")]
        full_disk(tmp_path)
        connector.record_parked("m-1", False)
        connector.record_parked("m-2", False)
        await asyncio.sleep(5.0)
        assert connector.parked() == [("m-1", "m", "both")]
        assert caplog.text.count("running workers cannot be recorded in ") == 1
        (tmp_path / "state.new").rmdir()
        connector.record_parked("m-2", True)
        await asyncio.sleep(5.0)
        assert connector.parked() == [("m-2", "m", "both")]

    run(tmp_path, test, TWO_GPUS)


def test_a_fleet_ends_although_its_state_cannot_be_written(tmp_path, caplog):
    async def test(slow, connector):
        full_disk(tmp_path)
        await connector.close(0.0)
        assert not slow.names
        assert "still lists workers, which have ended" in caplog.text

    run(tmp_path, test, TWO_GPUS)
