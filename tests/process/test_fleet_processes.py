"""Workers as processes: started again when they die, ended together, and never left behind. The workers here
are small programs."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from shoal.fleet.connectors import restarts
from shoal.fleet.connectors.connector import Component
from shoal.fleet.connectors.process_log import ProcessLog
from shoal.fleet.connectors.processes import Processes
from shoal.fleet.connectors.state_file import ProcessId, State
from tests.waiting import until

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
DEADLINE_S = 60


def python(code, name="toy", **more):
    return Component(name, (sys.executable, "-c", textwrap.dedent(code)), **more)


class Toys:
    """Processes, with places for their workers."""

    def __init__(self, log):
        self.processes, self.state = Processes(log), State()

    async def add(self, component):
        placement = self.state.place(component)
        await self.processes.start(placement)
        return placement

    async def pid(self, placement):
        return (await self.processes.running())[placement.id].pid

    async def until_given_up(self, *placements):
        for placement in placements:
            while not (await self.processes.running())[placement.id].is_crash_looping:
                await asyncio.sleep(0.02)


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def quick(monkeypatch):
    """Delays that are as many, and too short to wait for."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)


def run(test, style="text"):
    """Runs `test(toys, stream)`; returns what the processes said."""
    stream = io.StringIO()

    async def all_of_it():
        log = ProcessLog(stream, style)
        toys = Toys(log)
        try:
            await test(toys, stream)
        finally:
            await toys.processes.close(0.0)
            log.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 2 * DEADLINE_S))
    return stream.getvalue()


def test_every_line_has_the_name_of_who_said_it():
    async def both_speak(toys, stream):
        for text in ("fish", "boat"):
            code = f"import sys; print('{text} 1'); print('{text} 2', file=sys.stderr); {SLEEP}"
            await toys.add(python(code, name=text))
        await until(lambda: stream.getvalue().count("begun") == 2)

    lines = run(both_speak).splitlines()
    for text in ("fish", "boat"):
        assert {f"{text}-1 | {text} 1", f"{text}-1 | {text} 2", f"{text}-1 | begun"} <= set(lines)


def test_a_log_of_objects_has_an_object_a_line():
    async def speak(toys, stream):
        await toys.add(python('print(\'plain\'); print(\'{"level": "info", "message": "said"}\')'))
        await until(lambda: "said" in stream.getvalue())

    said = [json.loads(line) for line in run(speak, "json").splitlines()]
    assert {"process": "toy-1", "message": "plain"} in said
    assert {"process": "toy-1", "level": "info", "message": "said"} in said


def test_a_long_line_without_an_end_is_cut_and_not_kept():
    async def flood(toys, stream):
        await toys.add(python("print('x' * 200_000); print('end', flush=True); import time; time.sleep(600)"))
        await until(lambda: "end" in stream.getvalue())

    lines = run(flood).splitlines()
    assert sum(line.count("x") for line in lines) == 200_000 and max(map(len, lines)) < 70_000


def test_a_worker_that_dies_is_started_again(quick):
    async def kill_it(toys, stream):
        worker = await toys.add(python(SLEEP))
        for life in (1, 2, 3):
            await until(lambda life=life: stream.getvalue().count("begun") == life)
            os.kill(await toys.pid(worker), signal.SIGKILL)
        await until(lambda: stream.getvalue().count("begun") == 4)
        assert lives(await toys.pid(worker))

    run(kill_it)


def test_a_worker_that_cannot_start_is_given_up_with_its_exit_code(quick, caplog):
    async def wait(toys, stream):
        worker = await toys.add(python("import sys; sys.exit('no such model')"))
        await toys.until_given_up(worker)
        assert await toys.pid(worker) is None

    said = run(wait)
    assert said.count("no such model") == restarts.MAX_DEATHS
    assert "toy-1 has ended 5 times in a row (exit code 1)" in caplog.text


def test_one_worker_that_is_given_up_leaves_the_others(quick):
    async def wait(toys, stream):
        bad = await toys.add(python("raise SystemExit(1)", name="bad"))
        good = await toys.add(python(SLEEP, name="good"))
        await toys.until_given_up(bad)
        await until(lambda: "begun" in stream.getvalue())
        assert lives(await toys.pid(good))

    run(wait)


def test_a_program_that_is_not_there_is_named(quick):
    async def wait(toys, stream):
        await toys.until_given_up(await toys.add(Component("toy", ("no-such-program-at-all",))))

    assert "'no-such-program-at-all' cannot be started" in run(wait)


def test_a_worker_ends_what_it_has_when_it_is_removed():
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit()))
        print('begun', flush=True)
        time.sleep(600)
    """

    async def remove(toys, stream):
        worker = await toys.add(python(code))
        await until(lambda: "begun" in stream.getvalue())
        pid = await toys.pid(worker)
        await toys.processes.stop(worker.id, DEADLINE_S)
        assert not lives(pid) and await toys.processes.running() == {}
        await toys.processes.stop(worker.id, DEADLINE_S)  # it is gone already

    assert "drained" in run(remove)


def test_a_worker_that_does_not_end_is_killed_with_what_it_has_started():
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print('child', child.pid, flush=True)
        time.sleep(600)
    """

    async def remove(toys, stream):
        worker = await toys.add(python(code))
        await until(lambda: "child" in stream.getvalue())
        pids = [await toys.pid(worker), int(stream.getvalue().split()[-1])]
        assert all(map(lives, pids))
        await toys.processes.stop(worker.id, 0.3)
        await until(lambda: not any(map(lives, pids)))

    run(remove)


def test_what_a_dead_worker_has_started_ends_too(quick):
    code = """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print('child', child.pid, flush=True)
        os._exit(1)
    """

    async def wait(toys, stream):
        await toys.until_given_up(await toys.add(python(code)))
        # A thread copies the lines, and may lag behind the end of the process.
        await until(lambda: stream.getvalue().count("child") == restarts.MAX_DEATHS, stream.getvalue)
        children = [int(line.split()[-1]) for line in stream.getvalue().splitlines() if "child" in line]
        await until(lambda: not any(map(lives, children)))

    run(wait)


def test_a_worker_sees_its_own_gpus_in_the_order_of_their_numbers():
    async def add(toys, stream):
        code = "import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], flush=True);" + SLEEP
        component = python(code, devices=("10", "2", "4", "0"), devices_per_worker=2)
        for _ in range(2):
            await toys.add(component)
        await until(lambda: stream.getvalue().count("GPUs") == 2)

    said = run(add)
    assert "toy-1 | GPUs 0,2" in said and "toy-2 | GPUs 4,10" in said


def test_what_a_supervisor_before_has_left_is_ended():
    left = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:

        async def open_(toys, stream):
            waiting = asyncio.create_task(asyncio.to_thread(left.wait))
            life = ProcessId.of(other.pid)
            await toys.processes.open([ProcessId.of(left.pid), ProcessId(life.pid, life.started - 1)])
            await waiting

        run(open_)
        assert left.returncode == -signal.SIGKILL
        assert other.poll() is None, "it has the number of one that has died, and is another process"
    finally:
        left.kill()
        other.kill()
        other.wait()


def test_ports_are_free_differ_and_stay_over_a_restart(quick):
    async def add(toys, stream):
        words = (
            sys.executable,
            "-c",
            "import sys; print('at', *sys.argv[1:])",
            "{id}",
            "{port}",
            "{events_port}",
        )
        first, second = [await toys.add(Component("toy", words)) for _ in range(2)]
        ports = [*first.ports.values(), *second.ports.values()]
        assert len(set(ports)) == 4 and "replay_port" not in first.ports
        await toys.until_given_up(first, second)
        for worker in (first, second):
            line = f"{worker.id} | at {worker.id} {worker.ports['port']} {worker.ports['events_port']}\n"
            await until(
                lambda line=line: stream.getvalue().count(line) == restarts.MAX_DEATHS, stream.getvalue
            )

    run(add)


SUPERVISOR = """
    import asyncio, sys
    from shoal.fleet.connectors.connector import Component
    from shoal.fleet.connectors.process_log import ProcessLog
    from shoal.fleet.connectors.processes import Processes
    from shoal.fleet.connectors.state_file import Placement

    async def main():
        processes = Processes(ProcessLog(sys.stdout, "text"))
        words = (sys.executable, "-c", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)")
        for number in (1, 2):
            await processes.start(Placement(Component("toy", words), number, (), {}))
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_workers_die_with_a_supervisor_that_is_killed():
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR)], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(supervisor.stdout.readline().split()[-1]) for _ in range(2)]
        assert all(map(lives, pids))
    finally:
        supervisor.kill()
        supervisor.wait()
    deadline = time.monotonic() + DEADLINE_S
    while any(map(lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
