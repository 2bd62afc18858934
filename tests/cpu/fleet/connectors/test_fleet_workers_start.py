"""Workers of `shoal fleet up` that cannot start."""

import asyncio
from types import SimpleNamespace

import pytest

from shoal.apps import fleet
from shoal.apps.fleet import FleetSupervisor
from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors.connector import Component
from shoal.fleet.file import components
from shoal.fleet.planner.config import PlannerConfig
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

    found = [Component("m", (), model="m", count=1)]
    workers = FleetSupervisor(PlannerConfig(), found, lambda _: Full(found), None, tmp_path, "", None)
    error = run(workers)
    assert (
        isinstance(error, UnavailableError) and "No space left" in str(error) and str(tmp_path) in str(error)
    )


@pytest.fixture
def up(tmp_path, monkeypatch):
    """Starts a fleet of this file as far as its router, and returns the components that it has then."""
    started = []

    async def begin(file, config, workers):
        started.append(workers._components)
        return 0

    def up(text):
        (tmp_path / "fleet.toml").write_text(text)
        assert fleet.fleet_up(str(tmp_path / "fleet.toml"), str(tmp_path / "state")) == 0
        return started.pop()

    monkeypatch.setattr(fleet, "_up", begin)
    monkeypatch.setattr(fleet.logs, "set_up", lambda *_: None)
    return up


EXTERNAL = "[[workers]]\nname = 'm'\ncommand = 'sh serve --port {port}'\n"


@pytest.mark.parametrize("name", ["none/record.jsonl", "."])
def test_a_record_that_cannot_be_written_is_told_before_the_router_starts(tmp_path, up, name):
    path = tmp_path / name
    with pytest.raises(ConfigError, match=r"\[planner\] record .* cannot be written: .*; choose") as error:
        up(EXTERNAL + f"[planner]\nenabled = true\nrecord = '{path}'\n")
    assert str(path) in str(error.value)


@pytest.fixture
def gpus(monkeypatch):
    """Sets the machine's number of GPUs."""

    def give(count):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(components, "_num_gpus", lambda: count)

    give(0)
    return give


def own(model, options="device = 'auto'", more=""):
    return f"[[workers]]\nmodel = '{model}'\noptions = {{ dtype = 'float32', {options} }}\n{more}\n"


CUDA, CPU, AUTO = (f"device = '{name}'" for name in ("cuda", "cpu", "auto"))


@pytest.mark.parametrize(
    ("num_gpus", "options", "more", "wrong"),
    [
        (0, CUDA, "", r'1 has device = "cuda" in its options, and this process has no GPU'),
        (0, CUDA, "count = 2", r'1 has device = "cuda" in its options, and this process has no GPU'),
        (0, AUTO, "count = 2\ndevices = [0, 0]", "1 has devices 0, and this machine has 0 GPUs"),
        (2, AUTO, "count = 3\ndevices = [1, 2, 3]", "1 has devices 2, 3, and this machine has 2 GPUs"),
        (2, AUTO, "count = 3\n[planner]", "1 needs 3 GPUs, and 2 of the 2 here are left"),
    ],
)
def test_a_gpu_too_few_is_told_before_the_router_starts(folder, up, gpus, num_gpus, options, more, wrong):
    """The workers had died again and again behind a router that was up."""
    gpus(num_gpus)
    with pytest.raises(ConfigError, match=rf"\[\[workers\]\] {wrong}"):
        up(own(folder, options, more))


def test_a_gpu_that_cuda_visible_devices_names_has_to_be_there(folder, up, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="has devices 3, and this machine has 0 GPUs"):
        up(own(folder, CUDA))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    assert up(own(folder, CUDA))[0].devices == ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",)


def test_workers_that_need_no_gpu_of_this_machine_start(folder, up, gpus):
    assert up(own(folder)) and up(own(folder, CPU, "devices = [7]"))
    assert up(EXTERNAL + "devices = [7]\n"), "another engine knows what it needs"
    elsewhere = "count = 3\ndevices = [5, 6, 7]\n[planner]\nconnector = 'virtual'"
    assert up(own(folder, CUDA, elsewhere)), "they run elsewhere"
    gpus(2)
    assert up(own(folder, CUDA, "count = 2"))[0].devices == ("0", "1")
    assert up(own(folder, CUDA, "count = 4\ndevices = [0, 0, 1, 1]"))[0].count == 4


def test_gpus_of_windows_have_no_files_and_are_not_counted(folder, up, gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(components, "WSL", str(tmp_path))
    assert up(own(folder, CUDA)) and up(own(folder, CUDA, "devices = [0]"))
