"""What `shoal fleet up` runs beside its router, when it cannot begin."""

import asyncio
from types import SimpleNamespace

from shoal.cli.fleet import FleetWorkers
from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connector import Component
from shoal.fleet.planner_config import PlannerConfig
from tests.fake_connector import FakeConnector


def run(workers):
    """Returns why they could not be started."""

    async def main():
        drain = asyncio.Event()
        await workers.run(drain, SimpleNamespace(clock=LoopClock()))
        assert drain.is_set()
        await workers.end(asyncio.Event())
        return workers.error

    return asyncio.run(main())


def test_a_state_that_cannot_be_written_ends_the_fleet_and_is_told(tmp_path):
    """The router had gone on without workers."""

    class Full(FakeConnector):
        async def start(self):
            raise OSError(28, "No space left on device")

    components = [Component("m", (), model="m", count=1)]
    workers = FleetWorkers(PlannerConfig(), components, lambda setting: Full(components), None, tmp_path, "")
    error = run(workers)
    assert (
        isinstance(error, UnavailableError) and "No space left" in str(error) and str(tmp_path) in str(error)
    )


def test_a_record_that_cannot_be_written_is_told_before_any_worker_starts(tmp_path):
    path = tmp_path / "none" / "record.jsonl"
    components = [Component("m", (), model="m", count=1)]
    connector = FakeConnector(components)
    planner = PlannerConfig(enabled=True, record=str(path))
    error = run(FleetWorkers(planner, components, lambda setting: connector, None, tmp_path, ""))
    assert isinstance(error, ConfigError) and str(path) in str(error)
    assert not connector.states
