"""The file of what runs: places are taken once, and what a crash has left is found and put right."""

import json
import os
import subprocess
import sys

import pytest

from shoal.errors import ConfigError
from shoal.fleet.connectors.connector import Component
from shoal.fleet.connectors.state_file import Placement, ProcessId, StateFile, fleet_folder, holding

ONE = Component("one", ("run", "{id}", "{port}"), "m", count=2)
PAIR = Component("pair", ("run",), "m", role="prefill", devices=("10", "9", "8", "2"), devices_per_worker=2)


@pytest.fixture
def file(tmp_path):
    return StateFile(tmp_path)


def dead():
    """Returns the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    process_id = ProcessId.of(process.pid)
    process.communicate()
    return process_id


def ids(state, component=ONE):
    return [placement.id for placement in state.placements(component)]


def begin(file, *components):
    with file.changing() as state:
        kept, new = state.begin(components)
    return [one.id for one in kept], [one.id for one in new]


def test_a_worker_that_was_parked_is_so_for_the_next_fleet(file):
    begin(file, ONE)
    with file.changing() as state:
        state.park(state.placements(ONE)[1], True)
    assert begin(file, ONE) == (["one-1", "one-2"], [])
    state = file.read()
    assert [state.is_parked(placement) for placement in state.placements(ONE)] == [False, True]


def test_numbers_and_gpus_are_the_lowest_that_are_free(file):
    with file.changing() as state:
        assert [state.place(ONE).id for _ in range(3)] == ["one-1", "one-2", "one-3"]
        first, second = state.place(PAIR), state.place(PAIR)
        assert (first.devices, second.devices) == (("2", "8"), ("9", "10"))
        with pytest.raises(ConfigError, match="pair needs 2 devices, and 0 of 4 are free"):
            state.place(PAIR)
        state.free(first)
        assert state.place(PAIR) == first
        state.free(state.placements(ONE)[1])
        assert state.place(ONE, taken={"one-2": None}).id == "one-4"


def test_gpus_that_components_share_are_given_once(file):
    a, b, own = (
        Component("a", ("a",), devices=("0", "1"), shares_devices=True),
        Component("b", ("b",), devices=("0", "1"), shares_devices=True),
        Component("own", ("own",), devices=("0",)),
    )
    with file.changing() as state:
        assert [state.place(a).devices, state.place(b).devices] == [("0",), ("1",)]
        with pytest.raises(ConfigError, match="0 of 2 are free"):
            state.place(a)
        assert state.place(own).devices == ("0",), "a file that names a GPU twice has two workers share it"


def test_a_gpu_that_is_named_twice_has_two_workers(file):
    with file.changing() as state:
        twice = Component("twice", ("x",), devices=("0", "0"))
        assert [state.place(twice).devices for _ in range(2)] == [("0",), ("0",)]
        with pytest.raises(ConfigError, match="0 of 2 are free"):
            state.place(twice)


def test_ports_are_free_and_differ(file):
    with file.changing() as state:
        first, second = state.place(ONE), state.place(ONE)
    assert first.ports != second.ports and set(first.ports) == {"port"}
    assert first.command == ["run", "one-1", str(first.ports["port"])]
    assert file.read().placements(ONE) == [first, second]


def test_people_can_read_it(file):
    begin(file, ONE)
    with file.changing() as state:
        state.see({"one-1": os.getpid(), "one-2": None})
    text = file.path.read_text()
    entry = json.loads(text)["components"]["one"]
    assert entry["command"] == ["run", "{id}", "{port}"] and "\n  " in text
    assert entry["workers"]["1"]["process"]["pid"] == os.getpid() and entry["workers"]["1"]["since"]


def test_a_secret_of_the_environment_is_not_in_it(file):
    begin(file, Component("one", ("run",), environment={"SHOAL_API_KEY": "secret"}))
    assert "secret" not in file.path.read_text()


def test_a_block_that_fails_changes_nothing(file):
    begin(file, ONE)
    before = file.path.read_text()
    with pytest.raises(ZeroDivisionError), file.changing() as state:
        state.place(ONE)
        raise ZeroDivisionError
    assert file.path.read_text() == before


def test_after_an_end_components_start_with_their_counts(file):
    begin(file, ONE)
    with file.changing() as state:
        state.place(ONE)
        state.supervisor = None
    assert begin(file, ONE) == ([], ["one-1", "one-2"])


def test_after_a_crash_there_is_what_was(file):
    begin(file, ONE, PAIR)
    with file.changing() as state:
        state.place(ONE)
        state.free(state.placements(PAIR)[0])
        taken = state.placements(ONE)
    assert begin(file, ONE, PAIR) == (["one-1", "one-2", "one-3"], [])
    assert file.read().placements(ONE) == taken and file.read().components["pair"].workers == {}


@pytest.mark.parametrize(
    "changed",
    [
        Component("one", ("run", "other"), "m", count=2),
        Component("one", ONE.command, "m", count=1),
        Component("one", ONE.command, "m", count=2, environment={"A": "b"}),
        Component("one", ONE.command, "m", count=2, devices=("0", "1", "2")),
    ],
    ids=["command", "count", "environment", "devices"],
)
def test_what_a_person_has_changed_since_begins_anew(file, changed):
    begin(file, ONE)
    with file.changing() as state:
        state.place(ONE)
    kept, new = begin(file, changed)
    assert kept == [] and len(new) == changed.count


def test_components_that_are_in_the_file_no_more_are_forgotten(file):
    begin(file, ONE, PAIR)
    begin(file, ONE)
    assert set(file.read().components) == {"one"}


def test_too_few_gpus_leave_the_file_as_it_was(file):
    with pytest.raises(ConfigError, match="4 are free"), file.changing() as state:
        state.begin([Component("pair", ("run",), devices=PAIR.devices, devices_per_worker=5)])
    assert not file.path.exists()


def test_the_place_of_a_worker_that_a_person_removed_is_free_again(file):
    with file.changing() as state:
        for _ in range(3):
            state.place(ONE)
        workers = state.components["one"].workers
        workers[2].process = ProcessId.of(os.getpid())  # it ran, and a person has removed it
        workers[3].process = ProcessId.of(os.getpid())  # it is running
        state.see({"one-3": os.getpid()})
        assert ids(state) == ["one-1", "one-3"], "the first one is starting"


def test_a_worker_between_two_lives_keeps_its_place(file):
    with file.changing() as state:
        state.place(ONE)
        state.see({"one-1": os.getpid()})
        state.see({"one-1": None})
        assert ids(state) == ["one-1"] and state.processes == [ProcessId.of(os.getpid())]


@pytest.mark.parametrize("text", ["", "{", '{"boot": 3}', "\0" * 100])
def test_a_file_that_cannot_be_read_is_told_and_written_anew(file, text, caplog):
    begin(file, ONE)
    known = file.read().placements(ONE)
    file.path.write_text(text)
    with file.changing() as state:
        for placement in known:
            state.adopt(placement)
        state.see({"one-1": os.getpid(), "one-2": os.getpid()})
    assert file.read().placements(ONE) == known and str(file.path) in caplog.text


def test_another_start_of_the_machine_makes_it_history(file):
    begin(file, ONE)
    old = file.path.read_text()
    file.path.write_text(old.replace(file.read().boot, "another"))
    assert begin(file, Component("one", ONE.command, "m", count=1)) == ([], ["one-1"])


def test_a_process_is_known_from_one_that_has_its_number(file):
    process_id = ProcessId.of(os.getpid())
    earlier = ProcessId(process_id.pid, process_id.started - 1)
    assert not process_id.is_over and earlier.is_over and dead().is_over


def test_one_process_holds_a_fleet(tmp_path):
    with holding(tmp_path, "supervisor"):
        told = f"process {os.getpid()} is the supervisor of this fleet already"
        with pytest.raises(ConfigError, match=told), holding(tmp_path, "supervisor"):
            pass
        with holding(tmp_path, "planner"):
            pass
    with holding(tmp_path, "supervisor"):
        pass


def test_each_file_of_a_fleet_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    names = [tmp_path / "fleet.toml", tmp_path / "there" / "fleet.toml"]
    found = [fleet_folder(name, None) for name in names]
    assert found[0] != found[1] and fleet_folder(names[0], None) == found[0]
    assert found[0].parent == tmp_path / "xdg" / "shoal" and found[0].name.startswith("fleet-")
    assert found[0].stat().st_mode & 0o777 == 0o700
    given = fleet_folder(names[0], str(tmp_path / "given"))
    monkeypatch.chdir(tmp_path)
    assert fleet_folder(names[0], "given") == given, "workers elsewhere get its sockets' addresses"
    assert given.parent == tmp_path / "given"
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="--state-dir"):
        fleet_folder(names[0], str(tmp_path / "plain"))


def test_a_placement_says_how_its_worker_starts_and_is_reached():
    component = Component(
        "vllm",
        ("vllm", "--port", "{port}"),
        worker="http://127.0.0.1:{port}",
        environment={"A": "b"},
        devices=("0", "1"),
    )
    placement = Placement(component, 3, ("1",), {"port": 9001})
    assert placement.command == ["vllm", "--port", "9001"]
    assert placement.environment == {"A": "b", "CUDA_VISIBLE_DEVICES": "1"}
    assert placement.spec == "http://127.0.0.1:9001,id=vllm-3"
    assert Placement(ONE, 1, (), {"port": 1}).spec is None
