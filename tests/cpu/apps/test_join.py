"""Checks of `shoal serve --plane` before an engine is started, and the addresses of its engine's events."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from shoal.apps import join
from shoal.apps.join import ModelToServe, check_fleet, event_endpoints, with_events
from shoal.apps.serve import plan
from shoal.config import EngineConfig, ServerConfig
from shoal.errors import ConfigError
from shoal.stats import KvLoans, Stats
from shoal.weights.source import CheckpointFiles

PLANE = "tcp://127.0.0.1:5600"


@pytest.mark.parametrize(
    "options, named",
    [
        ({"plane": "http://127.0.0.1:1"}, "http://127.0.0.1:1"),
        ({"plane": "tcp://0.0.0.0:5600"}, "--fleet-key-file"),
        ({"plane": "nats://10.0.0.1:4222"}, "--fleet-key-file"),
        ({"plane": PLANE, "fleet_host": "0.0.0.0"}, "--fleet-key-file"),
        ({"plane": PLANE, "fleet_key_file": "/nowhere/key"}, "/nowhere/key"),
        ({"plane": PLANE, "worker_id": "a b"}, "a b"),
        ({"plane": PLANE, "worker_tags": ["a,b"]}, "'a,b'"),
    ],
    ids=str,
)
def test_mistakes_are_found_before_an_engine_starts(options, named):
    with pytest.raises(ConfigError, match=named):
        plan("/nowhere/model", [], {}, ServerConfig(**options))


class Lending:
    """An engine whose blocks are read by others for a number of polls."""

    def __init__(self, num_looks):
        self.num_looks = num_looks

    async def stats(self):
        self.num_looks -= 1
        return Stats(kv_loans=KvLoans(offers=int(self.num_looks > 0)))


def test_a_worker_that_ends_waits_for_those_who_read_from_it_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(join, "READERS_POLL_S", 0.001)
    engine = Lending(3)
    asyncio.run(join._readers_end(engine))
    assert engine.num_looks == 0
    monkeypatch.setattr(join, "READERS_S", 0.05)
    asyncio.run(asyncio.wait_for(join._readers_end(Lending(10**9)), 60))


def test_a_worker_serves_one_model():
    with pytest.raises(ConfigError, match="one model"):
        plan(None, ["a=x", "b=y"], {}, ServerConfig(plane=PLANE, swap=True))


@pytest.mark.parametrize(
    "options",
    [{"role": "prefill"}, {"worker_id": "a"}, {"worker_tags": ["x"]}, {"weights_from_peers": True}],
    ids=str,
)
def test_a_worker_without_a_plane_is_none(options):
    with pytest.raises(ConfigError, match="--plane"):
        ServerConfig(**options)


def test_a_key_opens_what_lies_beyond_this_machine(tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef" * 2)
    key = str(tmp_path / "key")
    check_fleet(ServerConfig(plane="nats://10.0.0.1:4222", fleet_host="0.0.0.0", fleet_key_file=key))


def test_the_engine_tells_this_process_of_its_blocks_and_nobody_else():
    planned = ModelToServe(["m"], EngineConfig(model="m"), CheckpointFiles(Path()))
    with event_endpoints(planned.config) as events:
        told = with_events(planned, events).config.kv_events_config
        assert told.enable_kv_cache_events and (told.endpoint, told.replay_endpoint) == (
            events.publisher,
            events.replay,
        )
        folder = Path(told.endpoint.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with event_endpoints(EngineConfig(model="m", enable_prefix_caching=False)) as none:
        assert none is None
    own = EngineConfig(model="m", kv_events_config={"enable_kv_cache_events": True})
    with pytest.raises(ConfigError, match="leave it out"), event_endpoints(own):
        pass


def test_folders_of_killed_workers_are_removed_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "shoal-events-file").touch()
    dead = tmp_path / "shoal-events-dead"
    dead.mkdir()
    (dead / "events").touch()
    config = EngineConfig(model="m")
    with event_endpoints(config) as first, event_endpoints(config) as second:
        folders = {Path(one.publisher.removeprefix("ipc://")).parent for one in (first, second)}
        assert {*tmp_path.iterdir()} == {*folders, tmp_path / "shoal-events-file"}
    assert [*tmp_path.iterdir()] == [tmp_path / "shoal-events-file"]


def test_a_folder_that_another_worker_removes_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    made, lost = tempfile.mkdtemp, []

    def mkdtemp(**options):
        folder = made(**options)
        if not lost:
            lost.append(folder)
            os.rmdir(folder)
        return folder

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with event_endpoints(EngineConfig(model="m")) as events:
        folder = events.publisher.removeprefix("ipc://").removesuffix("/events")
        assert os.path.isdir(folder) and lost and folder not in lost
