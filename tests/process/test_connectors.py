"""The contract of connectors: what the planner drives behaves alike, wherever workers run. Only in the end they
differ: what belongs to a system of its own, as Kubernetes' pods do, outlives the connector.

A world is one kind of connector with what it starts.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from circus.client import CircusClient, make_message
from circus.exc import CallError

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors import circus, restarts
from shoal.fleet.connectors import kubernetes as connector_kubernetes
from shoal.fleet.connectors import local as connector_local
from shoal.fleet.connectors.by_name import connector_named
from shoal.fleet.connectors.connector import ConnectorContext
from shoal.fleet.connectors.kubernetes import deployment_of
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet.connectors.state_file import ProcessId, StateFile
from shoal.fleet.connectors.virtual import VirtualClient
from shoal.fleet_views import WorkerState
from tests import ray_cluster
from tests.connector_cases import START_TIMEOUT_S, Folder, component, lives, two_components
from tests.fake_connector import FakeConnector
from tests.fake_kubernetes import FakeKubernetes, use
from tests.serving import PYTHON, ROOT

DEADLINE_S = 60.0
RAY_START_TIMEOUT_S = 25.0  # an actor's process imports Ray first


class World:
    """`outlives`: workers stay when the connector is closed."""

    def __init__(self, connector, router, components, outlives=False):
        self.outlives = outlives
        self.connector, self.router, self.components = connector, router, components

    def kill(self, worker_id):
        """Ends the worker's process as a power cut would."""
        os.kill(self.router.pid(worker_id), signal.SIGKILL)

    def drained(self):
        """Returns the workers that finished their work."""
        return sorted(path.stem for path in self.router.path.glob("*.drained"))

    def ready(self):
        """Ids of the workers that are ready."""
        names = [f"{component.name}-{number}" for component in self.components for number in range(1, 6)]
        return [name for name in names if self.router.state_of(name) == WorkerState.READY]

    async def until(self, *names):
        """Waits until these workers are ready, and no others are."""
        deadline = time.monotonic() + DEADLINE_S
        while self.ready() != sorted(names):
            assert time.monotonic() < deadline, (self.ready(), names)
            await asyncio.sleep(0.02)


def local(name):
    """Connectors of this host."""

    @contextlib.asynccontextmanager
    async def world(folder, components):
        router = Folder(folder)
        log = ProcessLog(sys.stderr, "text")
        context = ConnectorContext(components, router, LoopClock(), START_TIMEOUT_S, log, folder)
        connector = connector_named(name)(context)

        try:
            yield World(connector, router, components)
        finally:
            await connector.close(0.0)
            log.close()

    return world


class FakeWorld(World):
    """Its workers are counted, and do nothing."""

    def kill(self, worker_id):
        self.connector.kill(worker_id)

    def drained(self):
        return None


@contextlib.asynccontextmanager
async def fake(folder, components):
    connector = FakeConnector(components, start_s=0.05, start_timeout_s=0.2)
    connector.fails = {one.model for one in components if "stuck" in one.command}
    connector.state_of = connector.states.get
    yield FakeWorld(connector, connector, components)


async def keep_alive(worker_id, component):
    """Does another system's work for a worker: it is started again when it dies, and ends when this is cancelled."""
    words = [word.replace("{id}", worker_id) for word in component.command]
    while True:
        process = await asyncio.create_subprocess_exec(*words)
        try:
            await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill() if "stuck" in words else process.terminate()
            await process.wait()
            raise
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def kubernetes(folder, components):
    """Pods are processes here, which are started again when they die."""
    router = Folder(folder)
    by_deployment = {deployment_of(one): one for one in components}
    pods = {}

    async def start(pod, deployment):
        pods[pod] = asyncio.ensure_future(keep_alive(pod, by_deployment[deployment]))

    async def stop(pod, deployment):
        pods[pod].cancel()
        await asyncio.wait([pods.pop(pod)])

    cluster = FakeKubernetes(start, stop)
    async with cluster.serving(folder) as kubeconfig:
        for one in components:
            cluster.deploy(deployment_of(one), one.count)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connector_kubernetes, "POLL_S", 0.02)
            use(patched, kubeconfig)
            connector = connector_named("kubernetes")(
                ConnectorContext(components, router, LoopClock(), START_TIMEOUT_S, None, folder)
            )
            try:
                yield World(connector, router, components, outlives=True)
            finally:
                await connector.close(0.0)


@contextlib.asynccontextmanager
async def virtual(folder, components):
    """An orchestrator that scales by starting and ending processes here, the youngest first."""
    router = Folder(folder)
    running = {}  # the tasks that keep workers alive, by component and number

    async def scale(component, count):
        ours = running.setdefault(component.name, [])
        while len(ours) < count:
            ours.append(asyncio.ensure_future(keep_alive(f"{component.name}-{len(ours) + 1}", component)))
        ending = [ours.pop() for _ in range(len(ours) - count)]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def orchestrate():
        client = VirtualClient(folder)
        while True:
            decision = await client.wait()
            for one in components:
                await scale(one, decision.workers[one.model][one.role])
            client.complete(decision)

    orchestrator = asyncio.ensure_future(orchestrate())
    connector = connector_named("virtual")(
        ConnectorContext(components, router, LoopClock(), START_TIMEOUT_S, None, folder)
    )

    try:
        yield World(connector, router, components, outlives=True)
    finally:
        orchestrator.cancel()
        for one in components:
            await scale(one, 0)


@contextlib.asynccontextmanager
async def actors_on_ray(folder, components):
    from shoal.fleet.connectors.ray import ray_connector

    router = Folder(folder)
    log = ProcessLog(sys.stderr, "text")
    components = [dataclasses.replace(one, resources={"CPU": 1}) for one in components]
    connector = ray_connector(
        ConnectorContext(components, router, LoopClock(), RAY_START_TIMEOUT_S, log, folder)
    )

    try:
        yield World(connector, router, components)
    finally:
        await connector.close(0.0)
        log.close()


WORLDS = {
    "process": local("process"),
    "circus": local("circus"),
    "kubernetes": kubernetes,
    "virtual": virtual,
    "fake": fake,
    "ray": actors_on_ray,
}
SLOW = {"circus", "ray"}  # seconds for each test, as another supervisor starts


@pytest.fixture(scope="module")
def ray_nodes():
    with ray_cluster.joined(cpus=[4]):
        yield


def kinds(names):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


@pytest.fixture(params=kinds(WORLDS))
def run(request, tmp_path, monkeypatch):
    """Runs `test(world)` with two components of the model "m": one worker that does both roles, and no prefill
    worker, or the given ones."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    if request.param == "ray":
        request.getfixturevalue("ray_nodes")

    def run(test, *components):
        components = components or two_components(tmp_path)

        async def all_of_it():
            async with WORLDS[request.param](tmp_path, components) as world:
                await test(world)

        asyncio.run(asyncio.wait_for(all_of_it(), 2 * DEADLINE_S))

    run.folder = tmp_path
    return run


def test_as_many_are_started_as_the_components_count(run):
    async def test(world):
        await world.connector.start()
        assert world.connector.pending("m") in (0, 1) and world.connector.pending("another") == 0
        await world.until("m-1")
        assert world.connector.pending("m") == 0

    run(test)


def test_a_worker_that_was_added_is_ready(run):
    async def test(world):
        await world.connector.start()
        await world.until("m-1")
        added = asyncio.create_task(world.connector.add("m", "both"))
        while not (world.connector.pending("m") or added.done()):
            await asyncio.sleep(0.001)
        assert await added == "m-2"
        assert world.ready() == ["m-1", "m-2"] and world.connector.pending("m") == 0

    run(test)


def test_workers_that_are_added_at_once_are_as_many(run):
    async def test(world):
        await world.connector.start()
        await world.until("m-1")
        adding = [world.connector.add("m", "both") for _ in range(2)]
        assert sorted(await asyncio.gather(*adding)) == ["m-2", "m-3"]
        assert world.ready() == ["m-1", "m-2", "m-3"]

    run(test)


def test_the_highest_number_goes_first_and_is_gone_when_it_has_drained(run):
    async def test(world):
        await world.connector.start()
        for _ in range(2):
            await world.connector.add("m", "both")
        await world.until("m-1", "m-2", "m-3")
        assert await world.connector.remove("m", "both") == "m-3"
        assert world.ready() == ["m-1", "m-2"] and world.drained() in (["m-3"], None)
        assert await world.connector.add("m", "both") == "m-3"

    run(test)


@pytest.mark.parametrize("run", kinds(["process", "circus", "kubernetes"]), indirect=True)
def test_who_has_the_role_now_is_removed_and_not_who_was_started_for_it(run):
    """A person, or the planner, has made m-2 a prefill worker."""

    async def test(world):
        await world.connector.start()
        await world.connector.add("m", "both")
        await world.connector.add("m", "prefill")
        (run.folder / "m-2.role").write_text("prefill")
        assert await world.connector.remove("m", "prefill") == "m-2"
        await world.connector.add("m", "both")
        (run.folder / "m-2.role").unlink()
        (run.folder / "m-prefill-1.role").write_text("both")
        assert await world.connector.remove("m", "both") == "m-prefill-1"
        with pytest.raises(UnavailableError, match="no prefill worker of m"):
            await world.connector.remove("m", "prefill")
        await world.until("m-1", "m-2")

    run(test)


def test_a_role_returns_from_none(run):
    async def test(world):
        await world.connector.start()
        await world.until("m-1")
        assert await world.connector.add("m", "prefill") == "m-prefill-1"
        for role, name in (("prefill", "m-prefill-1"), ("both", "m-1")):
            assert await world.connector.remove("m", role) == name
            with pytest.raises(UnavailableError, match=f"no {role} worker of m"):
                await world.connector.remove("m", role)
        assert world.ready() == []
        assert await world.connector.add("m", "both") == "m-1"

    run(test)


def test_a_worker_that_does_not_get_ready_in_time_is_taken_back(run):
    async def test(world):
        await world.connector.start()
        with pytest.raises(UnavailableError, match=r"ready .*is taken back"):
            await world.connector.add("m", "both")
        deadline = time.monotonic() + DEADLINE_S
        while world.connector.pending("m"):  # where another system ends it, that may take a while
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        with pytest.raises(UnavailableError, match="no both worker of m"):
            await world.connector.remove("m", "both")

    run(test, component(run.folder, "bad", "both", 0, "stuck"))


def test_a_worker_that_does_not_get_ready_is_not_awaited_for_ever(run):
    async def test(world):
        await world.connector.start()
        assert world.connector.pending("m") == 1
        deadline = time.monotonic() + DEADLINE_S
        while world.connector.pending("m"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    run(test, component(run.folder, "bad", "both", 1, "stuck"))


def test_a_role_that_no_component_has_is_named(run):
    async def test(world):
        await world.connector.start()
        for change in (world.connector.add, world.connector.remove):
            with pytest.raises(ConfigError, match=r"\[\[workers\]\] of m must include the role 'decode'"):
                await change("m", "decode")

    run(test)


def test_a_worker_that_dies_is_started_again_and_is_pending_meanwhile(run):
    async def test(world):
        await world.connector.start()
        await world.until("m-1")
        world.kill("m-1")
        await world.until()
        assert world.connector.pending("m") == 1
        await world.until("m-1")
        assert world.connector.pending("m") == 0

    run(test)


def test_closing_ends_all_that_does_not_outlive_it_and_lets_them_drain(run):
    async def test(world):
        await world.connector.start()
        await world.connector.add("m", "both")
        await world.until("m-1", "m-2")
        await world.connector.close(DEADLINE_S)
        if world.outlives:
            assert world.ready() == ["m-1", "m-2"]
        else:
            assert world.ready() == [] and world.drained() in (["m-1", "m-2"], None)

    run(test)


def test_a_second_close_cuts_the_first_short(run):
    async def test(world):
        await world.connector.start()
        closing = asyncio.create_task(world.connector.close(DEADLINE_S))
        await asyncio.sleep(0)
        await world.connector.close(0.0)
        await closing
        assert world.ready() == []

    run(test, component(run.folder, "bad", "both", 1, "stuck"))


# Connectors of this host: what is left when somebody dies


class Supervisor:
    """toy_supervisor.py in a process of its own."""

    def __init__(self, name, folder, *models):
        self.folder, self.router = folder, Folder(folder)
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tests.process.toy_supervisor", name, str(folder), *models],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self):
        assert self.process.stdout.readline() == "ready\n"
        return self

    def pids(self, *names):
        """Waits until these workers are ready, and no others are known to the state."""
        deadline = time.monotonic() + DEADLINE_S
        while self.known() != sorted(names) or not all(map(lives, map(self.router.pid, names))):
            assert time.monotonic() < deadline, (self.known(), names)
            time.sleep(0.05)
        return [self.router.pid(name) for name in names]

    def known(self):
        components = StateFile(self.folder).read().components
        return sorted(f"{name}-{number}" for name, entry in components.items() for number in entry.workers)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


LOCAL = ["process", "circus"]


@pytest.fixture(params=kinds(LOCAL))
def supervise(request, tmp_path):
    started = []

    def start(*models):
        started.append(Supervisor(request.param, tmp_path, *models))
        return started[-1].ready()

    start.connector = request.param
    yield start
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.kill()
    for process in psutil.process_iter(["cmdline"]):
        if str(tmp_path / "circus.ini") in (process.info["cmdline"] or ()):
            process.kill()  # its workers die with it


def test_the_next_supervisor_has_the_workers_of_one_that_was_killed(supervise):
    first = supervise("m", "m")
    before = first.pids("m-1", "m-2", "m-3")
    first.kill()
    after = supervise().pids("m-1", "m-2", "m-3")
    assert (after == before) == (supervise.connector == "circus"), "Circus keeps them, ours die with it"
    deadline = time.monotonic() + DEADLINE_S
    while set(filter(lives, before)) - set(after):
        assert time.monotonic() < deadline, "a worker of before lives beside the new one"
        time.sleep(0.05)


def test_a_state_that_was_half_written_is_put_right_from_what_runs(supervise):
    supervisor = supervise("m")
    pids = supervisor.pids("m-1", "m-2")
    path = StateFile(supervisor.folder).path
    path.write_bytes(path.read_bytes()[:100])
    assert supervisor.pids("m-1", "m-2") == pids


def test_the_state_has_the_process_of_a_workers_present_life(supervise):
    supervisor = supervise()
    [pid] = supervisor.pids("m-1")
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        entry = StateFile(supervisor.folder).read().components["m"].workers[1]
        if entry.process and entry.process.pid == supervisor.router.pid("m-1") != pid:
            break
        assert time.monotonic() < deadline, entry
        time.sleep(0.05)


@pytest.mark.parametrize("supervise", kinds(["circus"]), indirect=True)
def test_workers_come_back_after_the_arbiter_was_killed(supervise):
    supervisor = supervise("m")
    before = supervisor.pids("m-1", "m-2")
    os.kill(int((supervisor.folder / "circus.pid").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while any(map(lives, before)):
        assert time.monotonic() < deadline, "a worker outlives the arbiter"
        time.sleep(0.05)
    assert not set(supervisor.pids("m-1", "m-2")) & set(before)


@pytest.mark.parametrize("name, package", [("circus", "circus.client"), ("kubernetes", "kubernetes_asyncio")])
def test_a_connector_whose_package_is_missing_is_refused_with_the_way_to_get_it(name, package, monkeypatch):
    monkeypatch.delitem(sys.modules, f"shoal.fleet.connectors.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"connector '{name}' needs .*pip install 'shoal\[{name}\]'"):
        connector_named(name)


def test_the_client_of_circus_has_one_call_at_a_time_also_when_one_was_given_up(tmp_path, monkeypatch):
    calls = []  # the beginnings and ends

    class SlowClient:
        def __init__(self, **_):
            pass

        def call(self, message):
            calls.append("begin")
            time.sleep(0.05)
            calls.append("end")
            return {"statuses": {}}

    monkeypatch.setattr(circus, "CircusClient", SlowClient)

    async def test():
        processes = circus.CircusProcesses(tmp_path, ())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(processes.running(), 0.01)
        assert await processes.running() == {}
        assert calls == ["begin", "end"] * 2

    asyncio.run(test())


def test_a_worker_that_was_taken_over_is_not_said_to_have_died_at_once(tmp_path, monkeypatch, caplog):
    class Client:
        def __init__(self, **_):
            pass

        def call(self, message):
            return {"statuses": {"m-1": "active"}, "pids": [os.getpid()]}

    async def test():
        processes = circus.CircusProcesses(tmp_path, ())
        await processes.running()
        await asyncio.sleep(0.2)
        await processes._restart("m-1")

    monkeypatch.setattr(circus, "CircusClient", Client)
    asyncio.run(test())
    assert "m-1 ended after" in caplog.text and "after 0.0 s" not in caplog.text


def test_workers_of_a_dead_arbiter_are_started_until_all_are_there(tmp_path, monkeypatch):
    """Regression: one call without an answer lost the calls after it, and the devices of their workers were free."""
    worker, adds, names = component(tmp_path, "m", "both", 3), [], set()

    class HastyClient:
        def __init__(self, **_):
            pass

        def stop(self):
            pass

        def call(self, message):
            if message["command"] == "add":
                adds.append(message["properties"]["name"])
                if len(adds) == 2:
                    raise CallError("Timed out.")
                names.add(adds[-1])
            return {"statuses": dict.fromkeys(names, "active"), "pids": [os.getpid()]}

    async def start_arbiter():
        monkeypatch.setattr(processes, "_arbiter", lambda: ProcessId.of(os.getpid()))

    async def test():
        with StateFile(tmp_path).changing() as state:
            placements = [state.place(worker) for _ in range(3)]
        monkeypatch.setattr(processes, "_arbiter", lambda: None)
        monkeypatch.setattr(processes, "_start_arbiter", start_arbiter)
        keeping = asyncio.create_task(processes._keep_alive())
        found = {}
        while not found:
            await asyncio.sleep(0.01)
            with contextlib.suppress(UnavailableError):
                found = await processes.running()
        assert set(found) == {one.id for one in placements}
        keeping.cancel()

    monkeypatch.setattr(circus, "CircusClient", HastyClient)
    monkeypatch.setattr(circus, "TICK_S", 0.01)
    processes = circus.CircusProcesses(tmp_path, [worker])
    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_folder_with_too_long_a_name_for_the_sockets_of_circus_is_refused(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    processes = circus.CircusProcesses(folder, ())
    with pytest.raises(ConfigError, match=r"/circus is too long for a socket .*shorter --state-dir"):
        asyncio.run(processes.open([]))
    assert not list(folder.iterdir())


# Workers that a person adds, drains or removes, and workers that never start


def by_hand(tmp_path, monkeypatch, test, *components, name="process"):
    """Runs `test(world)` with a connector of this host."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)

    async def all_of_it():
        async with local(name)(tmp_path, components or two_components(tmp_path)) as world:
            await world.connector.start()
            await test(world)

    asyncio.run(asyncio.wait_for(all_of_it(), 2 * DEADLINE_S))


def test_a_worker_that_a_person_drains_is_not_awaited(tmp_path, monkeypatch):
    async def test(world):
        await world.until("m-1")
        with monkeypatch.context() as patched:
            patched.setattr(world.router, "state_of", lambda worker_id: WorkerState.DRAINING)
            assert world.connector.pending("m") == 0
            patched.setattr(world.router, "state_of", lambda worker_id: WorkerState.BROKEN)
            assert world.connector.pending("m") == 1
        assert world.connector.pending("m") == 0

    by_hand(tmp_path, monkeypatch, test)


def test_a_worker_that_the_router_names_for_ever_holds_up_nobody(tmp_path, monkeypatch):
    """Another process has its id, say."""

    async def test(world):
        await world.until("m-1")
        with monkeypatch.context() as patched:
            patched.setattr(world.router, "state_of", lambda worker_id: WorkerState.DRAINING)
            patched.setattr(connector_local, "GONE_S", 0.2)
            with pytest.raises(UnavailableError, match="worker m-1 has ended, and the router still lists it"):
                await world.connector.remove("m", "both")

    by_hand(tmp_path, monkeypatch, test)


def test_workers_that_are_given_up_are_not_awaited_and_leave_the_fleet_without_hope(tmp_path, monkeypatch):
    bad = dataclasses.replace(
        component(tmp_path, "bad", "both", 2), command=(sys.executable, "-S", "-c", "1/0")
    )

    async def test(world):
        assert world.connector.pending("m") == 2
        await world.connector.wait_until_all_failed()
        assert world.connector.pending("m") == 0

    by_hand(tmp_path, monkeypatch, test, bad)


def test_a_start_that_ends_again_and_again_is_taken_back_before_its_time_is_over(tmp_path, monkeypatch):
    bad = dataclasses.replace(
        component(tmp_path, "bad", "both", 0), command=(sys.executable, "-S", "-c", "1/0")
    )

    async def test(world):
        monkeypatch.setattr(world.connector, "_start_timeout_s", 10 * DEADLINE_S)
        with pytest.raises(UnavailableError, match="bad-1 does not stay alive and is taken back"):
            await world.connector.add("m", "both")
        assert world.connector.pending("m") == 0 and not StateFile(tmp_path).read().components["bad"].workers

    by_hand(tmp_path, monkeypatch, test, bad)


@pytest.mark.parametrize("name", kinds(LOCAL))
def test_a_worker_that_was_given_up_is_replaced_on_its_gpu_by_the_next_one(tmp_path, monkeypatch, name):
    """Regression: it kept its GPU for ever, although it had no process."""
    good = component(tmp_path, "m", "both", 0)
    x = component(tmp_path, "x", "prefill", 1, devices=("0",))
    until_there = f"import os, sys; os.path.exists({str(tmp_path / 'mended')!r}) or sys.exit(1)\n"
    words = (*x.command[:3], until_there + x.command[3], *x.command[4:])

    async def test(world):
        monkeypatch.setattr(world.connector, "_start_timeout_s", DEADLINE_S)
        await world.connector.add("m", "both")
        while not world.connector._is_crash_looping("x-1"):
            await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match="x-1 does not stay alive"):
            await world.connector.add("m", "prefill")
        (tmp_path / "mended").touch()
        assert await world.connector.add("m", "prefill") == "x-1"
        await asyncio.sleep(2 * connector_local.WATCH_S)
        assert lives(world.router.pid("x-1"))
        assert StateFile(tmp_path).read().components["x"].workers[1].devices == ["0"]
        with pytest.raises(ConfigError, match="needs 1 devices, and 0 of 1 are free"):
            await world.connector.add("m", "prefill")

    by_hand(tmp_path, monkeypatch, test, good, dataclasses.replace(x, command=words), name=name)


@pytest.mark.slow
def test_a_worker_that_a_person_takes_out_of_circus_is_not_awaited_and_its_place_is_free(
    tmp_path, monkeypatch
):
    async def test(world):
        await world.connector.add("m", "both")
        client = CircusClient(endpoint=f"ipc://{tmp_path}/circus")
        client.call(make_message("rm", name="m-2", waiting=True))
        client.stop()
        await world.until("m-1")
        while len(StateFile(tmp_path).read().components["m"].workers) > 1:
            await asyncio.sleep(0.05)
        assert world.connector.pending("m") == 0
        assert await world.connector.add("m", "both") == "m-2"

    by_hand(tmp_path, monkeypatch, test, name="circus")
