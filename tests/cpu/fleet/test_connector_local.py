"""Places of this host's workers while who runs them does not answer, on virtual time."""

import asyncio

import pytest

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.connector import Component, Setting
from shoal.fleet.connector_local import LocalConnector, Running
from shoal.fleet.state_file import StateFile
from shoal.fleet_api import WorkerState

ONE_GPU = Component("m", ("run",), "m", devices=("0",), count=0)


class Slow:
    """A Supervisor whose answers take a second. `is_away`: it answers to nobody. It is the Registry, too."""

    def __init__(self):
        self.names, self.is_away = [], False

    async def _answer(self):
        await asyncio.sleep(1.0)
        if self.is_away:
            raise UnavailableError("the supervisor does not answer")

    async def open(self, leftovers):
        pass

    async def running(self):
        found = {name: Running(None, False) for name in self.names}
        await self._answer()
        return found

    async def start(self, placement):
        await self._answer()
        self.names.append(placement.id)

    async def stop(self, worker_id, grace_s):
        await self._answer()
        self.names.remove(worker_id)

    async def close(self, grace_s):
        self.names.clear()

    def state_of(self, worker_id):
        return WorkerState.READY if worker_id in self.names else None

    def role_of(self, worker_id):
        return None


def run(tmp_path, test, *components):
    async def main():
        slow = Slow()
        connector = LocalConnector(Setting(components, slow, LoopClock(), 60.0, None, tmp_path), slow)
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
        looking = asyncio.create_task(connector._look())
        await asyncio.sleep(0.5)
        slow.names.append(place.id)
        await connector._begin(place, is_there=True)
        await looking
        StateFile(tmp_path).path.unlink()
        await connector._look()
        with pytest.raises(ConfigError, match="0 of 1 are free"):
            await connector.place("m", "both")

    run(tmp_path, test, ONE_GPU)
