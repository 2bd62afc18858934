"""Processes of an engine (its core, its ranks) forked from one that has imported everything: most of a start's time
are imports of torch. Tests that start many use it; tests/process/test_core_process.py starts them as users do.

A forked process becomes this process's child, as if `subprocess.Popen` had started it: the process between them has
ended, and this one adopts orphans while it waits for that.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NoReturn, Self

from tests.serving import PYTHON, ROOT

PRELOADED = ("shoal.engine.process.core_main", "shoal.engine.ranks.worker_main")
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
FREE_FD = 500  # descriptors from here on are in nobody's way


class Forks:
    """`subprocess` stands in for the module of that name where the command is `python -m` and a module."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        """`modules`: those that the process which forks imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        with theirs:
            process = subprocess.Popen(
                [PYTHON, "-m", "tests.quick_starts", str(theirs.fileno()), *modules],
                # Processes that share a machine wait for each other's threads: one each.
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._set_up(ours, process.wait)

    @classmethod
    def inside(cls) -> Self:
        """Returns forks of this process as it is now. It must have no threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            ours.close()
            serve(theirs)
            os._exit(0)
        theirs.close()
        self = cls.__new__(cls)
        self._set_up(ours, lambda: os.waitpid(pid, 0))
        return self

    def _set_up(self, orders: socket.socket, wait: Callable[[], object]) -> None:
        self._orders, self._wait, self._lock = orders, wait, threading.Lock()
        forks = self

        class Popen(subprocess.Popen):
            def _execute_child(self, args, _e, _p, _c, pass_fds, cwd, env, *rest):
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
                module = args.index("-m") + 1
                fds = dict(zip((0, 1, 2), (p2cread, c2pwrite, errwrite))) | {fd: fd for fd in pass_fds}
                self.pid = forks.fork(args[module], args[module + 1 :], env, cwd or os.getcwd(), fds)
                self._child_created = True
                self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

        self.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Popen})

    def fork(self, module: str, argv: list[str], env: dict[str, str], cwd: str, fds: dict[int, int]) -> int:
        order = {
            "module": module,
            "argv": argv,
            "env": env,
            "cwd": cwd,
            "fds": list(fds),
            "parent": os.getpid(),
        }
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], list(fds.values()))
                return int(self._orders.recv(20))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._orders.close()
        self._wait()


# In the process that forks


def serve(orders: socket.socket) -> None:
    gc.collect()
    gc.freeze()
    faulthandler.enable()
    while True:
        data, received, _, _ = socket.recv_fds(orders, 1 << 20, 32)
        if not data:
            return
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            if (pid := os.fork()) == 0:
                for fd in (read, write, orders.fileno()):
                    os.close(fd)
                become(received=received, **json.loads(data))
            os.write(write, str(pid).encode())
            os._exit(0)
        for fd in (write, *received):
            os.close(fd)
        pid_text = os.read(read, 20)
        os.close(read)
        os.waitpid(between, 0)  # the child has its new parent now
        orders.send(pid_text)


def become(
    module: str,
    argv: list[str],
    env: dict[str, str],
    cwd: str,
    fds: list[int],
    parent: int,
    received: list[int],
) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(PR_SET_NAME, module.rpartition(".")[2].encode(), 0, 0, 0)
        os.setpgid(0, 0)
        while os.getppid() != parent:
            time.sleep(0.001)
        free = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FREE_FD) for fd in received]
        for fd in received:
            os.close(fd)
        for fd, number in zip(free, fds):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path[:] = dict.fromkeys([*env["PYTHONPATH"].split(os.pathsep), *sys.path])
        sys.argv = [module, *argv]
        sys.stdout, sys.stderr = (open(fd, "w", buffering=1) for fd in (1, 2))  # noqa: SIM115
        importlib.import_module(module).main()
    except BaseException:  # noqa: BLE001 - a process ends with its error in its output, as Python's do
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
