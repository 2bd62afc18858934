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

from shoal.errors import ConfigError, UnknownWorkerError
from shoal.fleet import processes as module
from shoal.fleet.process_log import ProcessLog
from shoal.fleet.processes import Component, Processes

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
DEADLINE_S = 60


def python(code, name="toy", **more):
    return Component(name, (sys.executable, "-c", textwrap.dedent(code)), **more)


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition, say=lambda: ""):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, say()
        await asyncio.sleep(0.02)
    return found


@pytest.fixture
def quick(monkeypatch):
    """Delays that are as many, and too short to wait for."""
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.01)


def run(test, style="text"):
    """Runs `test(processes, stream)`; returns what the processes said."""
    stream = io.StringIO()

    async def all_of_it():
        log = ProcessLog(stream, style)
        processes = Processes(log)
        try:
            await test(processes, stream)
        finally:
            processes.kill()
            await processes.close()
            log.close()

    asyncio.run(asyncio.wait_for(all_of_it(), 2 * DEADLINE_S))
    return stream.getvalue()


def test_every_line_has_the_name_of_who_said_it():
    async def both_speak(processes, stream):
        for text in ("fish", "boat"):
            code = f"import sys; print('{text} 1'); print('{text} 2', file=sys.stderr); {SLEEP}"
            processes.add(python(code, name=text))
        await until(lambda: stream.getvalue().count("begun") == 2)

    lines = run(both_speak).splitlines()
    for text in ("fish", "boat"):
        assert {f"{text}-1 | {text} 1", f"{text}-1 | {text} 2", f"{text}-1 | begun"} <= set(lines)


def test_a_log_of_objects_has_an_object_a_line():
    async def speak(processes, stream):
        processes.add(python('print(\'plain\'); print(\'{"level": "info", "message": "said"}\')'))
        await until(lambda: "said" in stream.getvalue())

    said = [json.loads(line) for line in run(speak, "json").splitlines()]
    assert {"process": "toy-1", "message": "plain"} in said
    assert {"process": "toy-1", "level": "info", "message": "said"} in said


def test_a_long_line_without_an_end_is_cut_and_not_kept():
    async def flood(processes, stream):
        processes.add(python("print('x' * 200_000); print('end', flush=True); import time; time.sleep(600)"))
        await until(lambda: "end" in stream.getvalue())

    lines = run(flood).splitlines()
    assert sum(line.count("x") for line in lines) == 200_000 and max(map(len, lines)) < 70_000


def test_a_worker_that_dies_is_started_again(quick):
    async def kill_it(processes, stream):
        worker = processes.add(python(SLEEP))
        for life in (1, 2, 3):
            await until(lambda life=life: stream.getvalue().count("begun") == life)
            os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: stream.getvalue().count("begun") == 4)
        assert not worker.has_given_up and lives(worker.pid)

    run(kill_it)


def test_a_worker_that_cannot_start_is_given_up_with_its_exit_code(quick, caplog):
    async def wait(processes, stream):
        worker = processes.add(python("import sys; sys.exit('no such model')"))
        await processes.until_hopeless()
        assert worker.has_given_up and worker.pid is None

    said = run(wait)
    assert said.count("no such model") == module.MAX_DEATHS
    assert "toy-1 has ended 5 times in succession (exit code 1)" in caplog.text


def test_one_worker_that_is_given_up_leaves_the_others(quick):
    async def wait(processes, stream):
        bad = processes.add(python("raise SystemExit(1)", name="bad"))
        good = processes.add(python(SLEEP, name="good"))
        hopeless = asyncio.create_task(processes.until_hopeless())
        await until(lambda: bad.has_given_up and "begun" in stream.getvalue())
        assert not hopeless.done() and lives(good.pid)
        hopeless.cancel()

    run(wait)


def test_a_program_that_is_not_there_is_named(quick):
    async def wait(processes, stream):
        processes.add(Component("toy", ("no-such-program-at-all",)))
        await processes.until_hopeless()

    assert "'no-such-program-at-all' cannot be started" in run(wait)


def test_a_worker_ends_what_it_has_when_it_is_removed():
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit()))
        print('begun', flush=True)
        time.sleep(600)
    """

    async def remove(processes, stream):
        worker = processes.add(python(code))
        await until(lambda: "begun" in stream.getvalue())
        pid = worker.pid
        await processes.remove("toy-1")
        assert not lives(pid) and list(processes) == []
        with pytest.raises(UnknownWorkerError, match="toy-1"):
            await processes.remove("toy-1")

    assert "drained" in run(remove)


def test_a_worker_that_does_not_end_is_killed_with_what_it_has_started():
    code = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print('child', child.pid, flush=True)
        time.sleep(600)
    """

    async def remove(processes, stream):
        worker = processes.add(python(code))
        await until(lambda: "child" in stream.getvalue())
        pids = [worker.pid, int(stream.getvalue().split()[-1])]
        assert all(map(lives, pids))
        await processes.remove("toy-1", grace_s=0.3)
        await until(lambda: not any(map(lives, pids)))

    run(remove)


def test_what_a_dead_worker_has_started_ends_too(quick):
    code = """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        print('child', child.pid, flush=True)
        os._exit(1)
    """

    async def wait(processes, stream):
        processes.add(python(code))
        await processes.until_hopeless()
        children = [int(line.split()[-1]) for line in stream.getvalue().splitlines() if "child" in line]
        assert len(children) == module.MAX_DEATHS
        await until(lambda: not any(map(lives, children)))

    run(wait)


def test_ids_are_the_lowest_that_are_free_and_devices_are_shared_out():
    async def add(processes, stream):
        component = python(
            "import os; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], flush=True);" + SLEEP,
            devices=("0", "2", "4", "6"),
            devices_per_worker=2,
        )
        first, second = processes.add(component), processes.add(component)
        assert [first.id, second.id] == ["toy-1", "toy-2"]
        assert [first.devices, second.devices] == [("0", "2"), ("4", "6")]
        with pytest.raises(ConfigError, match="2 devices, and 0 of 4 are free"):
            processes.add(component)
        await processes.remove("toy-1")
        third = processes.add(component)
        assert (third.id, third.devices) == ("toy-1", ("0", "2"))
        await until(lambda: stream.getvalue().count("GPUs") == 3 or stream.getvalue().count("GPUs 0,2") == 1)

    assert "toy-2 | GPUs 4,6" in run(add)


def test_ports_are_free_differ_and_stay_over_a_restart(quick):
    async def add(processes, stream):
        words = (
            sys.executable,
            "-c",
            "import sys; print('at', *sys.argv[1:])",
            "{id}",
            "{port}",
            "{events_port}",
        )
        first, second = (processes.add(Component("toy", words)) for _ in range(2))
        ports = [*first.ports.values(), *second.ports.values()]
        assert len(set(ports)) == 4 and "replay_port" not in first.ports
        await processes.until_hopeless()
        for worker in (first, second):
            line = f"{worker.id} | at {worker.id} {worker.ports['port']} {worker.ports['events_port']}\n"
            assert stream.getvalue().count(line) == module.MAX_DEATHS
        assert first.fill("http://127.0.0.1:{port}") == f"http://127.0.0.1:{first.ports['port']}"

    run(add)


SUPERVISOR = """
    import asyncio, sys
    from shoal.fleet.process_log import ProcessLog
    from shoal.fleet.processes import Component, Processes

    async def main():
        processes = Processes(ProcessLog(sys.stdout, "text"))
        words = (sys.executable, "-c", "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)")
        for _ in range(2):
            processes.add(Component("toy", words))
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
