"""Workers and routers for soaks: the same commands as in fleet_processes, in processes that are forked from one
that has imported everything. A worker is there in a fraction of the time that its imports would take.

The core of an engine is forked ahead of its server, while the server has no threads yet, and waits for its
arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys

import shoal.apps.route
import shoal.apps.serve  # noqa: F401 - imported here once, for all
from shoal.cli.main import main
from shoal.engine.process import core_main, core_process
from shoal.telemetry import logs
from tests.fleet_processes import Processes
from tests.serving import PYTHON, ROOT

PR_SET_PDEATHSIG = 1


class ForkedProcesses(Processes):
    """Processes are known by their ids; the kernel gives their ends to the one that forks. `settings`: constants
    of modules that have another value there, {module: {name: value}}."""

    settings: dict[str, dict[str, object]] = {}

    def __enter__(self):
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        with (self.folder / "forks.log").open("a") as log:
            self.forks = subprocess.Popen(
                [PYTHON, "-m", "tests.forked_workers", str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self.orders = ours.makefile("rw")
        return self

    def __exit__(self, *_):
        for process in list(self.running.values()):
            process.kill()
        self.orders.close()
        self.forks.kill()
        self.forks.wait()

    def _start(self, name, *command):
        order = {
            "argv": list(map(str, command)),
            "log": str(self.folder / f"{name}.log"),
            "settings": self.settings,
        }
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()
        self.running[name] = Forked(int(self.orders.readline()))


class Forked:
    """A process that was not started by this one."""

    def __init__(self, pid):
        self.pid, self.fd = pid, os.pidfd_open(pid)

    def poll(self):
        """None: it lives. Its exit code is another's to know."""
        return None if not select.select([self.fd], [], [], 0)[0] else 0

    def wait(self, timeout_s=60):
        assert select.select([self.fd], [], [], timeout_s)[0], f"process {self.pid} does not end"
        return 0

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


# In the process that forks


class Core:
    """A process that waits to become an engine's core, as subprocess.Popen shows its own."""

    def __init__(self):
        stdin, self._theirs = os.pipe()
        self._ours, stdout = os.pipe()
        arguments, give = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (self._theirs, self._ours, give):
                os.close(fd)
            os.setpgid(0, 0)
            for fd, number in ((stdin, 0), (stdout, 1), (stdout, 2)):
                os.dup2(fd, number)
            given = os.read(arguments, 1 << 16)
            if not given:  # the server has ended, or is a router
                os._exit(0)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(os.fdopen(n, "wb", 0), write_through=True) for n in (1, 2)
            )
            sys.argv = ["core", *json.loads(given)]
            core_main.main()
        for fd in (stdin, stdout, arguments):
            os.close(fd)
        self._give = give
        self.stdin, self.stdout = os.fdopen(self._theirs, "wb"), os.fdopen(self._ours, "rb")
        self.returncode = None

    def spawn(self, folder, device):
        """Stands in for core_process._spawn."""
        level = str(logging.getLogger().getEffectiveLevel())
        os.write(self._give, json.dumps([str(folder), level, logs.current_style()]).encode())
        os.close(self._give)
        return self

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self):
        self.stdin.close()
        self.stdout.close()
        if self.returncode is None:
            os.waitpid(self.pid, 0)


def run(order):
    """Runs the command in a new process until it ends, or until its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for module, constants in order["settings"].items():
        for name, value in constants.items():
            setattr(importlib.import_module(module), name, value)
    if order["argv"][0] == "serve":
        core_process._spawn = Core().spawn
    os._exit(main(order["argv"]))


def serve_orders(fd):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    orders = socket.socket(fileno=fd).makefile("rw")
    for line in orders:
        pid = os.fork()
        if pid == 0:
            os.close(fd)
            run(json.loads(line))
        orders.write(f"{pid}\n")
        orders.flush()


if __name__ == "__main__":
    serve_orders(int(sys.argv[1]))
