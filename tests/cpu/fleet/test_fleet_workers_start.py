"""What `shoal fleet up` runs beside its router, when it cannot begin."""

import asyncio
from types import SimpleNamespace

from shoal.cli.fleet import FleetWorkers
from shoal.errors import ConfigError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connector import Component
from shoal.fleet.planner_config import PlannerConfig
from tests.fake_connector import FakeConnector


def test_a_record_that_cannot_be_written_is_told_before_any_worker_starts(tmp_path):
    path = tmp_path / "none" / "record.jsonl"
    components = [Component("m", (), model="m", count=1)]
    connector = FakeConnector(components)

    async def run():
        planner = PlannerConfig(enabled=True, record=str(path))
        workers = FleetWorkers(planner, components, lambda setting: connector, None, tmp_path, "")
        drain = asyncio.Event()
        await workers.run(drain, SimpleNamespace(clock=LoopClock()))
        assert drain.is_set()
        await workers.end(asyncio.Event())
        return workers.error

    error = asyncio.run(run())
    assert isinstance(error, ConfigError) and str(path) in str(error)
    assert not connector.states
