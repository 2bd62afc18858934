"""Ranks as real processes: commands and replies of any size, every kind of death, nothing left behind."""

import gc
import operator
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from toy_worker import collectives

from shoal.engine.ranks.rendezvous import Rendezvous
from shoal.engine.ranks.workers import WorkerProcesses
from shoal.errors import CheckpointError, EngineDeadError, RequestError

HERE = Path(__file__).parent
# environment of scripts that are rank 0
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), *sys.path])}
PATIENCE_S = 30  # half of what a rank sleeps that is to be ended
TARGET = "toy_worker:toy"  # ranks have our sys.path, and pytest has put this folder on it


@pytest.fixture
def start():
    groups = []

    def make(world_size=2, target=TARGET, **init):
        groups.append(WorkerProcesses(world_size, target, init))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def factory(name):
    return TARGET.replace(":toy", f":{name}")


def pids_of(group):
    """A rank answers before it counts the command as run, and a test must not stop it in between."""
    pids, progress = [about["pid"] for about in group.submit("about").results()], group._monitor.progress
    wait_until(lambda: not any(map(progress.command_of, range(1, len(pids) + 1))), "a rank is in it yet")
    return pids


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Commands and replies


def test_every_rank_answers_in_rank_order(start):
    group = start(3, name="x", nested={"a": [1, None]})
    assert group.submit("echo", 5, "text", None, [1, 2]).results() == [
        [rank, 5, "text", None, [1, 2]] for rank in (1, 2)
    ]
    abouts = group.submit("about").results()
    assert [a["world_size"] for a in abouts] == [3, 3] and abouts[0]["init"] == {
        "name": "x",
        "nested": {"a": [1, None]},
    }


def test_the_group_is_there_before_its_ranks_are(start):
    begin = time.monotonic()
    group = start(3)
    is_there_s = time.monotonic() - begin
    group.submit("echo").results()
    assert is_there_s < (time.monotonic() - begin) / 2


def test_what_cannot_be_sent_at_the_start_leaves_no_rank_behind(new_children):
    with pytest.raises(TypeError, match=r"argument 0 of 'toy_worker:toy'.*object"):
        WorkerProcesses(2, TARGET, {"x": object()})
    assert not new_children()


def test_several_commands_may_be_under_way(start):
    group = start()
    pending = [group.submit("echo", i) for i in range(20)]
    group.submit("echo", "dropped: nobody wants the reply")
    assert [p.results()[0][1] for p in reversed(pending)] == list(reversed(range(20)))


def test_a_message_of_50_mb_goes_and_comes_back(start):
    big = np.random.default_rng(1).integers(0, 255, 50 << 20, np.uint8)
    back = start().submit("echo", big, torch.ones(3, dtype=torch.bfloat16)).results()[0]
    assert np.array_equal(back[1], big) and torch.equal(back[2], torch.ones(3, dtype=torch.bfloat16))


def test_ten_thousand_messages_reach_a_rank_that_slept(start):
    group = start(3)
    group.submit("about").results()
    group.send("sleep", 0.5)  # the ring (4 MiB) fills meanwhile
    for i in range(10_000):
        group.send("note", i, np.full(500 + i % 1500, i % 251, np.uint8))
    assert group.submit("notes").results() == [list(range(10_000))] * 2


def test_idle_ranks_use_no_processor_time(start):
    """In the first second there may be something left of their start."""
    group = start(3)

    def is_idle():
        before = group.submit("cpu_time").results()
        time.sleep(0.5)
        after = group.submit("cpu_time").results()
        return all(b - a < 0.01 for a, b in zip(before, after))

    wait_until(is_idle, "they use the processor")


def test_an_argument_that_cannot_be_sent_is_named_and_harms_nothing(start):
    group = start()
    with pytest.raises(TypeError, match=r"argument 1 of 'echo'.*function"):
        group.send("echo", 1, lambda: 0)
    with pytest.raises(TypeError, match="argument 0 of 'echo'"):
        group.submit("echo", 2**70)
    assert group.submit("echo", 1).results() == [[1, 1]]


def test_what_a_rank_prints_appears_under_its_name(start, capfd):
    group = start(3)
    group.submit("print", "hello").results()
    group.close()
    out, err = capfd.readouterr()
    assert "[rank 1] hello\n" in err and "[rank 2] hello\n" in err and not out


# Errors that end nothing


def test_an_exception_comes_back_with_rank_and_traceback_and_the_rank_lives_on(start):
    group = start()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: KeyError: 'oh'.*in fail"):
        group.submit("fail", "oh").results()
    with pytest.raises(RequestError, match="rank 1: too long"):
        group.submit("refuse", "too long").results()
    with pytest.raises(RuntimeError, match="rank 1: KeyError: 'no_such_command'"):
        group.submit("no_such_command").results()
    with pytest.raises(RuntimeError, match="rank 1: TypeError: object"):
        group.submit("unsendable").results()
    assert group.submit("echo", 1).results() == [[1, 1]]


def test_a_closed_group_ends_the_wait_for_a_reply(start):
    group = start()
    group.submit("about").results()
    pending = group.submit("sleep", 60)
    group.close()
    with pytest.raises(EngineDeadError, match="closed"):
        pending.results()


# Errors that end the group


def test_a_killed_rank_is_noticed_with_its_last_words(start):
    group = start(3)
    pids = pids_of(group)
    group.submit("echo").results()
    begin = time.monotonic()
    group.send("kill", "my last words")
    wait_until(lambda: group.failed, "nobody noticed")
    with pytest.raises(
        EngineDeadError, match=r"(?s)rank \d \(pid \d+\) was killed by SIGKILL.*my last words"
    ):
        group.check()
    for use in (lambda: group.send("echo"), lambda: group.submit("echo")):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            use()
    assert time.monotonic() - begin < PATIENCE_S
    wait_until(lambda: all(map(gone, pids)), "the other rank must not wait for the dead one")


def test_a_wait_for_replies_ends_when_a_rank_dies(start):
    group = start(3)
    pids = pids_of(group)
    pending = group.submit("sleep", 60)
    os.kill(pids[1], signal.SIGSEGV)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"(?s)rank 2 .*SIGSEGV.*Fatal Python error"):
        pending.results()
    assert time.monotonic() - begin < PATIENCE_S


def test_a_wait_for_room_ends_when_a_rank_dies(start):
    group = start()
    [pid] = pids_of(group)
    group.send("sleep", 60)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        group.send("echo", np.zeros(50 << 20, np.uint8))


def test_a_command_without_reply_that_raises_ends_the_rank_with_its_traceback(start):
    group = start()
    group.send("fail", "oh")
    wait_until(lambda: group.failed, "nobody noticed")
    with pytest.raises(EngineDeadError, match=r"(?s)rank 1 .* exited with code 1.*in fail.*KeyError: 'oh'"):
        group.check()


@pytest.mark.parametrize(
    "name, kind, message",
    [
        (
            "refusing_factory",
            CheckpointError,
            "rank [12]: model.safetensors is truncated: 5 bytes of 10; download it again",
        ),
        ("broken_factory", EngineDeadError, r"(?s)rank [12] .* exited with code 1.*OSError: the dog ate it"),
        (
            "exiting_factory",
            EngineDeadError,
            r"rank [12] .* exited with code 7 in 'toy_worker:exiting_factory'; it printed nothing",
        ),
        ("no_such_factory", EngineDeadError, "no_such_factory"),
    ],
)
def test_an_error_in_a_factory_is_raised_here(start, name, kind, message):
    group = start(3, factory(name))
    with pytest.raises(kind, match=message):
        group.submit("about").results()
    with pytest.raises(kind, match=message):
        group.check()


def test_a_rank_that_refuses_to_start_ends_the_others(start, new_children):
    group = start(3, factory("choosy_factory"))
    wait_until(lambda: group.failed, "nobody noticed")
    wait_until(lambda: all(gone(child.pid) for child in new_children()), "rank 1 lives on")
    with pytest.raises(CheckpointError, match="rank 2: not with me"):
        group.check()


def test_a_rank_that_is_stopped_in_a_command_is_named(start):
    group = start(3)
    pids = pids_of(group)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.2)
    assert not group.failed, "it does nothing wrong while nothing is asked of it"
    pending = group.submit("echo", 1)
    with pytest.raises(EngineDeadError, match=rf"^rank 2 \(pid {pids[1]}\) is stopped .* in 'echo'$"):
        pending.results()
    wait_until(lambda: all(map(gone, pids)), "a rank is left")


def test_a_rank_that_does_nothing_in_a_quick_command_is_named_if_rank_0_waits(start, monkeypatch):
    monkeypatch.setattr("shoal.engine.ranks.progress.IDLE_S", 1.0)
    group, waits = start(3), []
    group.watch_waits(lambda: bool(waits))
    pids = pids_of(group)
    group.send("sleep_on", 2, 60)
    time.sleep(2.5)
    assert not group.failed, "rank 0 may be the one that works"
    waits.append(True)
    wait_until(lambda: group.failed, "nobody noticed")
    with pytest.raises(
        EngineDeadError, match=rf"^rank 2 \(pid {pids[1]}\) hangs: it has done nothing for 1 s in 'sleep_on'$"
    ):
        group.check()
    wait_until(lambda: all(map(gone, pids)), "a rank is left")


def test_a_rank_that_computes_and_those_that_wait_for_it_are_not_hung(start, monkeypatch):
    monkeypatch.setattr("shoal.engine.ranks.progress.IDLE_S", 1.0)
    group = start(3)
    group.watch_waits(lambda: True)
    group.submit("about").results()
    group.send("compute_or_sleep", 1, 4.0)  # rank 1 computes, rank 2 waits
    assert group.submit("echo", 1).results() == [[1, 1], [2, 1]]


# The end


def test_close_ends_the_ranks_whatever_they_do_and_may_be_called_twice(start):
    group = start(3)
    pids = pids_of(group)
    group.send("sleep", 60)
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < PATIENCE_S and all(map(gone, pids))
    group.close()
    with pytest.raises(EngineDeadError, match="closed"):
        group.send("echo")


def test_close_kills_a_rank_that_is_stopped(start, monkeypatch):
    monkeypatch.setattr("shoal.engine.ranks.workers.EXIT_TIMEOUT_S", 0.2)
    group = start()
    [pid] = pids_of(group)
    os.kill(pid, signal.SIGSTOP)
    group.close()
    assert gone(pid)


def test_a_group_that_nobody_holds_ends(start):
    group = WorkerProcesses(2, TARGET, {})
    [pid] = pids_of(group)
    del group
    gc.collect()
    wait_until(lambda: gone(pid), "the rank lives on")


def test_two_groups_at_once_do_not_meet(start):
    first, second = start(name="first"), start(name="second")
    pending = [g.submit("about") for g in (first, second)]
    assert [p.results()[0]["init"]["name"] for p in pending] == ["first", "second"]
    first.close()
    assert second.submit("echo", 1).results() == [[1, 1]]


def test_groups_leave_no_file_descriptor_thread_or_child_behind():
    def left():
        gc.collect()
        process = psutil.Process()
        return process.num_fds(), process.num_threads(), len(process.children())

    WorkerProcesses(3, TARGET, {}).close()
    first = left()
    for _ in range(6):
        WorkerProcesses(3, TARGET, {}).close()
    # A thread that has been joined is counted for a moment yet.
    wait_until(lambda: all(map(operator.le, left(), first)), "something is left")


SCRIPT = textwrap.dedent("""
    import os, signal, sys, time
    from shoal.engine.ranks.workers import WorkerProcesses
    signal.signal(signal.SIGINT, signal.default_int_handler)    # what a shell starts in the background ignores it, and so would we
    group = WorkerProcesses(3, "toy_worker:toy", {})
    abouts = group.submit("about").results()
    group.send("sleep", 60)
    print(*[a["pid"] for a in abouts], flush=True)
    END
""")  # no `if __name__ == "__main__"`: ranks do not import the user's script


def run_script(end):
    """A process that is rank 0, and its ranks' pids."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("END", end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        start_new_session=True,
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2, process.communicate()[1]
    return process, pids


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGABRT)),
    ],
    ids=lambda s: s.name,
)
def test_ranks_end_when_rank_0_is_killed(number):
    process, pids = run_script("time.sleep(60)")
    with process:
        assert {os.getsid(pid) for pid in pids} == {process.pid}, "the ranks belong to rank 0's session"
        process.send_signal(number)
        wait_until(lambda: all(map(gone, pids)), f"ranks outlive {number.name}")


@pytest.mark.parametrize(
    "end",
    [
        "",
        "1 / 0",
        "sys.exit(3)",
        "os._exit(4)",
        "group.close()",
        "import threading; threading.Thread(target=sys.exit).start()",
    ],
)
def test_ranks_end_when_rank_0_does(end):
    process, pids = run_script(end)
    with process:
        wait_until(lambda: all(map(gone, pids)) and process.poll() is not None, "somebody is left")
        errors = process.stderr.read()
        assert ("ZeroDivisionError" in errors) == (end == "1 / 0") and "rank" not in errors


def test_ctrl_c_reaches_rank_0_alone():
    process, pids = run_script("""
try:
    print("waiting", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
    print("alive", group.failed, flush=True)
    time.sleep(60)
""")
    with process:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        assert process.stdout.readline() == "alive False\n"
        assert not any(map(gone, pids))
        process.kill()


def test_the_ranks_survive_the_thread_that_started_them(start):
    import threading

    groups = []
    thread = threading.Thread(target=lambda: groups.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert groups[0].submit("echo", 1).results() == [[1, 1]]


def test_a_fork_of_rank_0_that_exits_leaves_the_ranks_alone():
    code = textwrap.dedent("""
        import os, sys
        from shoal.engine.ranks.workers import WorkerProcesses
        group = WorkerProcesses(2, "toy_worker:toy", {})
        group.submit("about").results()
        child = os.fork()
        if not child:
            sys.exit()    # runs what is registered for the exit
        os.waitpid(child, 0)
        print(group.submit("echo", 1).results())
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, env=ENV
    )
    assert done.stdout == "[[1, 1]]\n", done.stderr


# Collectives between processes


def test_collectives_of_all_ranks(start):
    rendezvous = Rendezvous()
    group = start(3, factory("parallel_toy"), port=rendezvous.port)
    tp = rendezvous.connect(0, 3, "cpu", group.check)
    pending = group.submit("collectives")
    results = [collectives(tp), *pending.results()]
    for r in results:
        assert torch.equal(r["summed"], torch.full((3, 2), 6.0, dtype=torch.bfloat16))
        assert torch.equal(r["columns"], torch.tensor([[1.0, -1, 2, -2, 3, -3]]))
        assert torch.equal(r["rows"], torch.tensor([[1.0, -1], [2, -2], [3, -3]]))
        assert torch.equal(r["sent"], torch.tensor([0, 7], dtype=torch.int32))


def test_a_rank_that_dies_before_the_rendezvous_ends_the_wait_for_it(start):
    rendezvous = Rendezvous()
    group = start(2, factory("refusing_factory"))
    with pytest.raises(CheckpointError, match="truncated"):
        rendezvous.connect(0, 2, "cpu", group.check)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_collective_raises_when_a_rank_dies(start, world_size):
    rendezvous = Rendezvous()
    group = start(world_size, factory("parallel_toy"), port=rendezvous.port)
    tp = rendezvous.connect(0, world_size, "cpu", group.check)
    pids = pids_of(group)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pids[-1]}"])
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        tp.all_reduce(torch.ones(4))
    assert time.monotonic() - begin < PATIENCE_S
    with pytest.raises(EngineDeadError, match=rf"rank {world_size - 1} .*SIGKILL"):
        group.check(wait_s=1.0)
    tp.close()


@pytest.mark.slow
def test_ranks_stuck_in_a_collective_end_with_the_group(start):
    rendezvous = Rendezvous()
    group = start(3, factory("parallel_toy"), port=rendezvous.port)
    tp = rendezvous.connect(0, 3, "cpu", group.check)
    pids = pids_of(group)
    group.send("hold_the_line")
    time.sleep(0.1)
    group.close()
    assert all(map(gone, pids))
    tp.close()
